// Communicators: how ranks find each other and wait for each other.
#include "comm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdarg>
#include <cstdlib>
#include <cstring>

namespace emu {

namespace {

constexpr size_t page = 4096;

struct Table {
    std::mutex mutex;
    std::map<void*, CommRef> comms;
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

long seconds(const char* variable, long otherwise) {
    const char* text = getenv(variable);
    return text && *text ? atol(text) : otherwise;
}

// Sleeps while the word holds `value`, at most so long.
void sleep_on(Count& count, uint32_t value, std::chrono::nanoseconds most) {
    timespec time{most.count() / 1000000000, most.count() % 1000000000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count), FUTEX_WAIT, value, &time, nullptr, 0);
}

bool reached(uint32_t count, uint32_t value) { return static_cast<int32_t>(count - value) >= 0; }

// Whether the count got there within `patience` (0: for ever).
bool wait_for(Count& count, uint32_t value, std::chrono::seconds patience) {
    using Clock = std::chrono::steady_clock;
    auto until = Clock::now() + patience;
    for (uint32_t now; !reached(now = count.load(std::memory_order_acquire), value);) {
        auto left = patience.count() ? until - Clock::now() : std::chrono::hours(1);
        if (left.count() <= 0) return false;
        sleep_on(count, now, left);
    }
    return true;
}

}  // namespace

size_t Board::size() { return (sizeof(Board) + page - 1) / page * page + (1 + most_ranks) * most_ranks * room; }

char* Board::shown(uint32_t rank) {
    return reinterpret_cast<char*>(this) + (sizeof(Board) + page - 1) / page * page + rank * room;
}

char* Board::between(uint32_t from, uint32_t to) { return shown(most_ranks + from * most_ranks + to); }

void set(Count& count, uint32_t value) {
    count.store(value, std::memory_order_release);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

HcclResult refuse_hccl(HcclResult code, const char* format, ...) {
    char line[900];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    complain("%s [HCCL error %d]", line, static_cast<int>(code));
    return code;
}

aclError on_stream(HcclResult result) {
    if (!result) return ACL_SUCCESS;
    return result == HCCL_E_TIMEOUT ? ACL_ERROR_RT_FFTS_PLUS_TIMEOUT : ACL_ERROR_RT_DRV_INTERNAL_ERROR;
}

HcclResult find_comm(HcclComm handle, CommRef& out, const char* who) {
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().comms.find(handle);
    if (found == table().comms.end()) return refuse_hccl(HCCL_E_PARA, "%s: %p is no communicator", who, handle);
    out = found->second;
    return HCCL_SUCCESS;
}

Comm::~Comm() {
    if (board) munmap(board, Board::size());
}

HcclResult Comm::map(const HcclRootInfo& root) {
    int process, file;
    if (sscanf(root.internal, "emu:%d:%d", &process, &file) != 2)
        return refuse_hccl(HCCL_E_PARA, "HcclCommInitRootInfo: not a root info of HcclGetRootInfo");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0)
        return refuse_hccl(HCCL_E_TCP_CONNECT, "HcclCommInitRootInfo: the root (process %d) is gone", process);
    void* mapped = MAP_FAILED;
    if (ftruncate(opened, Board::size()) == 0)
        mapped = mmap(nullptr, Board::size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
    close(opened);
    if (mapped == MAP_FAILED) return refuse_hccl(HCCL_E_MEMORY, "HcclCommInitRootInfo: the host has no memory");
    board = static_cast<Board*>(mapped);
    return HCCL_SUCCESS;
}

HcclResult Comm::join(uint32_t size, const HcclRootInfo& root, uint32_t mine, const HcclCommConfig* config) {
    const char* who = "HcclCommInitRootInfo";
    device = current_device();
    if (device == no_device) return refuse_hccl(HCCL_E_RUNTIME, "%s: no device is set on this thread", who);
    if (!size || size > most_ranks || mine >= size)
        return refuse_hccl(HCCL_E_PARA, "%s: rank %u of %u (at most %u ranks are emulated)", who, mine, size, most_ranks);
    ranks = size;
    rank = mine;
    patience_ = std::chrono::seconds(seconds("HCCL_EXEC_TIMEOUT", 1836));
    if (config && config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET)
        patience_ = std::chrono::seconds(config->hcclExecTimeOut);
    if (HcclResult bad = map(root)) return bad;
    if (config && config->hcclCommName[0])
        snprintf(name, sizeof name, "%s", config->hcclCommName);
    else
        snprintf(name, sizeof name, "%s", root.internal);

    Seat& seat = board->seats[rank];
    seat.device = device;
    uint32_t expected = 0;
    if (!seat.joined.compare_exchange_strong(expected, ranks))
        return refuse_hccl(HCCL_E_PARA, "%s: rank %u is there already", who, rank);
    set(seat.joined, ranks);
    std::chrono::seconds patience(seconds("HCCL_CONNECT_TIMEOUT", 120));
    for (uint32_t other = 0; other < ranks; ++other)
        if (!wait_for(board->seats[other].joined, 1, patience))
            return refuse_hccl(HCCL_E_TIMEOUT, "%s: rank %u did not come within %ld s (HCCL_CONNECT_TIMEOUT)", who, other,
                               static_cast<long>(patience.count()));
    for (uint32_t other = 0; other < ranks; ++other) {
        auto& there = board->seats[other];
        if (there.joined != ranks)
            return refuse_hccl(HCCL_E_PARA, "%s: rank %u counts %u ranks, rank %u %u", who, rank, ranks, other,
                               there.joined.load());
        if (other != rank && there.device == device)
            return refuse_hccl(HCCL_E_PARA, "%s: ranks %u and %u are both on device %d", who, std::min(rank, other),
                               std::max(rank, other), device);
    }
    return HCCL_SUCCESS;
}

HcclResult Comm::broken(HcclResult code) {
    int expected = HCCL_SUCCESS;
    error.compare_exchange_strong(expected, code);
    return code;
}

HcclResult Comm::await(Count& count, uint32_t value, uint32_t peer, const char* who) {
    if (wait_for(count, value, patience_)) return HCCL_SUCCESS;
    return broken(refuse_hccl(HCCL_E_TIMEOUT, "%s: rank %u waited %ld s for rank %u (HCCL_EXEC_TIMEOUT), communicator %s", who,
                              rank, static_cast<long>(patience_.count()), peer, name));
}

HcclResult Comm::meet(const char* who) {
    set(board->seats[rank].met, ++meetings_);
    for (uint32_t other = 0; other < ranks; ++other)
        if (HcclResult bad = await(board->seats[other].met, meetings_, other, who)) return bad;
    return HCCL_SUCCESS;
}

}  // namespace emu

using namespace emu;

namespace {

// Answers a question about a communicator.
template <class F>
HcclResult ask(HcclComm handle, const void* out, const char* who, F answer) {
    CommRef comm;
    if (!out) return HCCL_E_PTR;
    if (HcclResult bad = find_comm(handle, comm, who)) return bad;
    answer(*comm);
    return HCCL_SUCCESS;
}

}  // namespace

EMU_API HcclResult HcclGetRootInfo(HcclRootInfo* root) {
    HCCL_ENTER();
    if (!root) return HCCL_E_PTR;
    if (current_device() == no_device) return refuse_hccl(HCCL_E_RUNTIME, "HcclGetRootInfo: no device is set on this thread");
    int file = memfd_create("emulated-hccl", MFD_CLOEXEC);
    if (file < 0) return refuse_hccl(HCCL_E_SYSCALL, "HcclGetRootInfo: memfd_create failed");
    memset(root, 0, sizeof *root);
    snprintf(root->internal, sizeof root->internal, "emu:%d:%d", getpid(), file);
    return HCCL_SUCCESS;
}

EMU_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                              const HcclCommConfig* config, HcclComm* out) {
    HCCL_ENTER();
    if (!root || !out) return refuse_hccl(HCCL_E_PTR, "HcclCommInitRootInfo: a pointer is null");
    auto comm = std::make_shared<Comm>();
    HcclResult bad = comm->join(ranks, *root, rank, config);
    int process, file;  // everybody has mapped the board, or never will
    if (sscanf(root->internal, "emu:%d:%d", &process, &file) == 2 && process == getpid()) close(file);
    if (bad) return bad;
    std::lock_guard<std::mutex> guard(table().mutex);
    table().comms[comm.get()] = comm;
    *out = comm.get();
    return HCCL_SUCCESS;
}

EMU_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* out) {
    return HcclCommInitRootInfoConfig(ranks, root, rank, nullptr, out);
}

// Operations in flight keep the communicator and go on waiting: that a destroyed one releases them is promised nowhere.
EMU_API HcclResult HcclCommDestroy(HcclComm handle) {
    HCCL_ENTER();
    std::lock_guard<std::mutex> guard(table().mutex);
    if (!table().comms.erase(handle)) return refuse_hccl(HCCL_E_PARA, "HcclCommDestroy: %p is no communicator", handle);
    return HCCL_SUCCESS;
}

EMU_API HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* out) {
    HCCL_ENTER();
    return ask(handle, out, __func__, [&](Comm& comm) { *out = static_cast<HcclResult>(comm.error.load()); });
}

EMU_API HcclResult HcclGetCommName(HcclComm handle, char* out) {
    HCCL_ENTER();
    return ask(handle, out, __func__, [&](Comm& comm) { strcpy(out, comm.name); });
}

EMU_API HcclResult HcclGetRankSize(HcclComm handle, uint32_t* out) {
    HCCL_ENTER();
    return ask(handle, out, __func__, [&](Comm& comm) { *out = comm.ranks; });
}

EMU_API HcclResult HcclGetRankId(HcclComm handle, uint32_t* out) {
    HCCL_ENTER();
    return ask(handle, out, __func__, [&](Comm& comm) { *out = comm.rank; });
}

// Names and time limits of communicators are understood; the rest of the configuration changes speeds only.
EMU_API uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

// Sums are in rank order whatever is asked for.
EMU_API HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue) {
    HCCL_ENTER();
    return config == HCCL_DETERMINISTIC ? HCCL_SUCCESS
                                        : refuse_hccl(HCCL_E_NOT_SUPPORT, "HcclSetConfig: %d is not emulated", (int)config);
}

EMU_API const char* HcclGetErrorString(HcclResult code) {
    static const char* texts[] = {"no error", "parameter error", "empty pointer", "memory error", "internal error",
                                  "not supported", "not found", "unavailable", "system call failed", "timeout",
                                  "cannot open a file", "tcp connect failed", "roce connect failed", "tcp transfer failed",
                                  "roce transfer failed", "runtime call failed", "driver call failed", "profiling call failed",
                                  "cce call failed", "network call failed", "try again", "remote error", "suspending",
                                  "retry failed", "out of memory"};
    return code >= 0 && code < HCCL_E_RESERVED ? texts[code] : "unknown error";
}
