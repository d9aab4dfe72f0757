// What the parts of the emulated CANN share. The C functions that torch_npu calls live in the .cpp files beside this one
// (libascendcl.so); operators/ holds the emulated operator library (libopapi.so) on top of them.
#pragma once

#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EMU_API extern "C" __attribute__((visibility("default")))

// Every emulated runtime function starts with this: it is traced, counted, and may be told to fail (fault.cpp).
#define EMU_ENTER()                                              \
    do {                                                         \
        if (aclError fault_ = emu::enter(__func__)) return fault_; \
    } while (0)

namespace emu {

// ---- settings.cpp: the environment, read once ---------------------------------------------------------------------

struct Settings {
    int devices;                // EMU_DEVICES, 2
    size_t hbm;                 // EMU_HBM, bytes of memory per device, 8 GiB
    std::string soc;            // EMU_SOC, Ascend910_9391 (A3)
    std::string cann, driver;   // EMU_CANN, 8.5.0 and EMU_DRIVER, 26.0.0: the versions it claims to have
    bool trace;                 // EMU_TRACE=1 names every call on stderr
    bool logs;                  // EMU_LOG=1 shows torch_npu's log
    bool map_once;              // EMU_MAP_ONCE=1: a host buffer may be mapped on one device only
    bool unified;               // EMU_UNIFIED=0: the driver knows no VA_FLAG (207000)
    bool stale;                 // EMU_STALE=1: devices keep reading the host memory of the time it was mapped
    std::string peers;          // EMU_PEERS, "all" (default), "none" or pairs "0-1,2-3" that can reach each other
    std::string fail;           // EMU_FAIL, see fault.cpp
    std::string lost;           // EMU_LOST, see fault.cpp
    std::string operators;      // EMU_OPERATORS, see fault.cpp
    std::map<int, unsigned> delay_us;  // EMU_DELAY="id:us,...": every task of the stream made id-th (from 0) waits so long
    unsigned jitter_us;         // EMU_JITTER="us" or "us:seed": one task in eight is delayed by up to so much
    unsigned jitter_seed;
};
const Settings& settings();

// One line on stderr, "[emulator] ...". Whatever breaks a rule says so here before the error code goes out.
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));
aclError refuse(aclError code, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string recent_complaint();
std::vector<std::string> split(const std::string& text, char separator);

// ---- fault.cpp ----------------------------------------------------------------------------------------------------

aclError enter(const char* function);
void read_faults();  // from the settings, once more
bool lost(int device);

enum class OperatorFault { none, error, wrong, crash };
// What EMU_OPERATORS says about this operator; `mapped` tells whether an operand lies in mapped host memory.
OperatorFault operator_fault(const std::string& name, bool mapped);

// ---- device.cpp ---------------------------------------------------------------------------------------------------

constexpr int no_device = -1;
int current_device();              // of this thread, or no_device
void adopt_device(int device);     // the same for a thread of the emulator's own
bool valid_device(int64_t device); // 0 <= device < EMU_DEVICES

// ---- memory.cpp: what lies where ------------------------------------------------------------------------------------

// A range of one device's address space. `address` is what the program holds; the emulated hardware reaches the bytes
// through `alias`. For device memory the address is a mapping without access rights, so a host access faults.
struct Region {
    enum Kind { hbm, mapped_host, imported };
    Kind kind;
    int device;              // whose address space
    int owner;               // the device that holds the bytes, or no_device for host memory
    uintptr_t address = 0;
    size_t size = 0;
    char* alias = nullptr;
    bool unified = false;    // mapped host memory whose device address is the host address (VA_FLAG)
    int file = -1;           // memfd behind device memory; what IPC exports
    std::vector<char> shadow;  // with EMU_STALE: what the device believes the host memory to hold

    ~Region();
    bool contains(uintptr_t p, size_t n) const { return p >= address && p - address <= size && n <= size - (p - address); }
};
using RegionRef = std::shared_ptr<Region>;

void* reserve_address(size_t bytes);  // a range of addresses without access rights
RegionRef find_region(const void* address);               // in any device's address space
RegionRef find_region(const void* address, int device);   // in this device's address space
void add_region(RegionRef region);
bool remove_region(const Region& region);

// ---- host.cpp -----------------------------------------------------------------------------------------------------

bool pinned(const void* address, size_t bytes);  // page-locked by aclrtMallocHost or by registration

// ---- access.cpp: an operand of an emulated kernel -----------------------------------------------------------------

// Reach of a kernel on `device` to an operand. open() fails like hardware does: an address that this device has not
// mapped, freed memory, or a peer without access. close() ends the kernel's access.
class Access {
  public:
    aclError open(int device, const void* address, size_t bytes, const char* who);
    void close();
    char* data() const { return data_; }
    bool mapped() const { return region_ && region_->kind == Region::mapped_host; }

  private:
    RegionRef region_;
    char* data_ = nullptr;
    size_t offset_ = 0, bytes_ = 0;
    std::vector<char> before_;
};

// ---- peer.cpp -----------------------------------------------------------------------------------------------------

bool peer_enabled(int device, int peer);  // may `device` access the memory of `peer` now?
bool connected(int device, int peer);

// ---- stream.cpp ---------------------------------------------------------------------------------------------------

class Stream {
  public:
    using Task = std::function<aclError()>;

    Stream(int device, int id);
    ~Stream();
    void push(Task task);
    aclError wait();       // until everything pushed so far is done; the stream's first error
    bool idle();
    aclError error();
    void hold(bool on);    // while held, the worker starts no task

    const int device, id;

  private:
    void work();
    unsigned delay();  // microseconds that the next task waits

    std::mutex mutex_;
    std::condition_variable wake_, progress_;
    std::deque<Task> queue_;
    uint64_t pushed_ = 0, done_ = 0;
    aclError error_ = ACL_SUCCESS;
    bool held_ = false, stop_ = false;
    unsigned random_;
    std::thread worker_;
};
using StreamRef = std::shared_ptr<Stream>;

// A handle (nullptr is the current device's default stream) to a stream; error 107000 unknown, 107003 other context.
aclError find_stream(aclrtStream handle, StreamRef& out);
std::vector<StreamRef> streams_of(int device);

}  // namespace emu
