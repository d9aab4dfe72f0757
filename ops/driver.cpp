#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <vector>

namespace memferry {
namespace {

void* open_library(const std::string& family, const std::string& wanted, std::string& found) {
    std::vector<std::string> names;
    if (!wanted.empty()) {
        names = {wanted};
    } else if (family == "cuda") {
        names = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
    } else if (family == "ascend") {
        names = {"libascendcl.so"};
    } else {
        throw std::runtime_error("driver: unknown family " + family + ": expected cuda or ascend");
    }
    // The one torch has loaded comes first: events and streams are its own.
    for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL})
        for (const auto& name : names)
            if (void* handle = dlopen(name.c_str(), flags)) {
                found = name;
                return handle;
            }
    throw std::runtime_error("driver: none of the libraries of " + family + " could be loaded (tried " + names.front() +
                             "): install the family's runtime or load torch's first");
}

template <class F>
void find(void* handle, const char* name, F& out) {
    out = reinterpret_cast<F>(dlsym(handle, name));
    if (!out) throw std::runtime_error(std::string("driver: the library lacks ") + name);
}

void* p(uint64_t x) { return reinterpret_cast<void*>(x); }

}  // namespace

Driver::Driver(const std::string& family, const std::string& library, int device)
    : ascend_(family == "ascend"), device_(device) {
    void* handle = open_library(family, library, library_);
    if (ascend_) {
        find(handle, "aclrtSetDevice", set_device_);
        find(handle, "aclrtSynchronizeEvent", event_synchronize_);
        find(handle, "aclrtRecordEvent", event_record_);
        find(handle, "aclrtStreamWaitEvent", acl_wait_);
        find(handle, "aclrtMemcpyAsync", acl_copy_);
        acl_query_ = reinterpret_cast<decltype(acl_query_)>(dlsym(handle, "aclrtQueryEventStatus"));
    } else {
        find(handle, "cudaSetDevice", set_device_);
        find(handle, "cudaEventSynchronize", event_synchronize_);
        find(handle, "cudaEventRecord", event_record_);
        find(handle, "cudaStreamWaitEvent", cuda_wait_);
        find(handle, "cudaMemcpyAsync", cuda_copy_);
        find(handle, "cudaEventQuery", cuda_query_);
        void* low = library.empty() ? dlopen("libcuda.so.1", RTLD_NOW) : handle;
        if (low) {
            wait_value_ = reinterpret_cast<decltype(wait_value_)>(dlsym(low, "cuStreamWaitValue32_v2"));
            write_value_ = reinterpret_cast<decltype(write_value_)>(dlsym(low, "cuStreamWriteValue32_v2"));
        }
    }
}

void Driver::check(int code, const char* call) const {
    if (code != 0)
        throw std::runtime_error(std::string(call) + " failed with error " + std::to_string(code) + " on device " +
                                 std::to_string(device_));
}

void Driver::bind_thread() const { check(set_device_(device_), "SetDevice"); }
void Driver::synchronize(uint64_t event) const { check(event_synchronize_(p(event)), "EventSynchronize"); }
// Whatever is wrong with the event `synchronize` will say.
bool Driver::reached(uint64_t event) const {
    constexpr int CUDA_NOT_READY = 600, ACL_COMPLETE = 1;
    if (cuda_query_) return cuda_query_(p(event)) != CUDA_NOT_READY;
    int status = ACL_COMPLETE;
    return !acl_query_ || acl_query_(p(event), &status) != 0 || status == ACL_COMPLETE;
}

void Driver::record(uint64_t event, uint64_t stream) const { check(event_record_(p(event), p(stream)), "EventRecord"); }

void Driver::wait(uint64_t stream, uint64_t event) const {
    check(ascend_ ? acl_wait_(p(stream), p(event)) : cuda_wait_(p(stream), p(event), 0), "StreamWaitEvent");
}

void Driver::wait_value(uint64_t stream, uint64_t address, uint32_t value) const {
    check(wait_value_(p(stream), address, value, 0), "StreamWaitValue32");
}

void Driver::write_value(uint64_t stream, uint64_t address, uint32_t value) const {
    check(write_value_(p(stream), address, value, 0), "StreamWriteValue32");
}

void Driver::copy(const Copy& c, Direction direction, uint64_t stream) const {
    const int kind = static_cast<int>(direction);
    check(ascend_ ? acl_copy_(p(c.dst), c.nbytes, p(c.src), c.nbytes, kind, p(stream))
                  : cuda_copy_(p(c.dst), p(c.src), c.nbytes, kind, p(stream)),
          "MemcpyAsync");
}

}  // namespace memferry
