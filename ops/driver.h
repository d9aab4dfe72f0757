// A device family's runtime, found in the process at run time: five calls are all the pipeline needs. No CUDA or CANN
// header is included; the prototypes below are the documented C interfaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace memferry {

enum class Direction : int { HostToDevice = 1, DeviceToHost = 2, DeviceToDevice = 3 };

struct Copy {  // one row of a batch, as Python lays it out
    uint64_t dst, src, nbytes;
};

class Driver {
public:
    // family: "cuda" or "ascend". library: a path or name to load instead of the family's own (tests). Throws
    // std::runtime_error when no library offers the calls.
    Driver(const std::string& family, const std::string& library, int device);

    // Each throws std::runtime_error naming the call and the error code.
    void bind_thread() const;
    void synchronize(uint64_t event) const;  // blocks the calling thread
    bool reached(uint64_t event) const;      // `synchronize` would not block; true too where the family cannot say
    void record(uint64_t event, uint64_t stream) const;
    void wait(uint64_t stream, uint64_t event) const;
    void copy(const Copy& c, Direction direction, uint64_t stream) const;

    // Waiting for and writing a 32-bit word of mapped memory in stream order: how the device waits for the host without
    // the launching thread having to. Not every family or driver offers it.
    bool has_values() const { return wait_value_ && write_value_; }
    void wait_value(uint64_t stream, uint64_t address, uint32_t value) const;  // until int32(word - value) >= 0
    void write_value(uint64_t stream, uint64_t address, uint32_t value) const;

    const std::string& library() const { return library_; }

private:
    void check(int code, const char* call) const;

    bool ascend_;
    int device_;
    std::string library_;
    int (*set_device_)(int) = nullptr;
    int (*event_synchronize_)(void*) = nullptr;
    int (*cuda_query_)(void*) = nullptr;
    int (*acl_query_)(void*, int*) = nullptr;
    int (*event_record_)(void*, void*) = nullptr;
    int (*cuda_wait_)(void*, void*, unsigned) = nullptr;
    int (*acl_wait_)(void*, void*) = nullptr;
    int (*cuda_copy_)(void*, const void*, size_t, int, void*) = nullptr;
    int (*acl_copy_)(void*, size_t, const void*, size_t, int, void*) = nullptr;
    int (*wait_value_)(void*, uint64_t, uint32_t, unsigned) = nullptr;
    int (*write_value_)(void*, uint64_t, uint32_t, unsigned) = nullptr;
};

}  // namespace memferry
