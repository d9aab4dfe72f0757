// What the parts of the emulated HCCL (libhccl.so) share. Ranks are processes with one emulated device each. They meet on
// a board: memory behind a memfd of rank 0 that all have mapped, where each has a seat. As on hardware nobody is told when
// a peer dies: whoever waits for it does so until HCCL_EXEC_TIMEOUT.
#pragma once

#include "../runtime/emulator.h"

#include <third_party/hccl/inc/hccl/hccl.h>

#include <atomic>
#include <chrono>

// Every emulated HCCL function starts with this: traced and counted as the runtime's are, and EMU_FAIL may name it.
#define HCCL_ENTER()                                                                           \
    do {                                                                                       \
        if (aclError fault_ = emu::enter(__func__)) return static_cast<HcclResult>(fault_);    \
    } while (0)

namespace emu {

constexpr uint32_t most_ranks = 32;
constexpr size_t room = 1 << 20;  // bytes that a rank can show, or send to one peer, at a time

// What a rank says of the operation it has come to. Peers compare.
struct Operation {
    char name[24];
    uint64_t number;              // which operation of the communicator this is, from 0
    uint64_t count;
    int32_t type, reduction;
    uint32_t root;
    uint64_t bytes;               // what this rank contributes
    uint64_t send_at[most_ranks], send_bytes[most_ranks], receive_bytes[most_ranks];  // by peer, where ranks may differ
};

// A word that one rank counts up and others wait for, asleep.
using Count = std::atomic<uint32_t>;

struct Seat {
    Count joined, met;
    int32_t device;
    Operation operation;
    Count sent[most_ranks], received[most_ranks];  // parts of messages to each peer, and from it
    uint64_t message[most_ranks];                  // bytes of the message that goes to each peer
};

struct Board {
    Seat seats[most_ranks];

    static size_t size();                        // one for any number of ranks: the file is sparse
    char* shown(uint32_t rank);                  // `room` bytes that everybody reads
    char* between(uint32_t from, uint32_t to);   // `room` bytes for one other rank
};

class Comm {
  public:
    ~Comm();
    // Meets the other ranks. Fails when they do not come within HCCL_CONNECT_TIMEOUT, or do not fit.
    HcclResult join(uint32_t ranks, const HcclRootInfo& root, uint32_t rank, const HcclCommConfig* config);

    // For the stream's worker, inside an operation. An error has been complained about, and stays with the communicator.
    HcclResult meet(const char* who);  // all ranks have come this far, and have seen what the others wrote before
    HcclResult await(Count& count, uint32_t value, uint32_t peer, const char* who);
    HcclResult broken(HcclResult error);

    Board* board = nullptr;
    uint32_t rank = 0, ranks = 0;
    int device = no_device;
    char name[COMM_NAME_MAX_LENGTH] = {};
    std::mutex order;               // operations run one at a time
    std::atomic<uint64_t> asked{0}; // operations so far
    std::atomic<int> error{HCCL_SUCCESS};

  private:
    HcclResult map(const HcclRootInfo& root);
    uint32_t meetings_ = 0;
    std::chrono::seconds patience_{0};
};
using CommRef = std::shared_ptr<Comm>;

void set(Count& count, uint32_t value);  // and wake who waits for it
aclError on_stream(HcclResult result);    // what an operation's failure leaves on its stream
HcclResult find_comm(HcclComm handle, CommRef& out, const char* who);
HcclResult refuse_hccl(HcclResult code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- arithmetic.cpp -----------------------------------------------------------------------------------------------------

size_t size_of(HcclDataType type);  // 0: not emulated
bool can_reduce(HcclDataType type, HcclReduceOp op);
// out[i] = rows[0][i] op rows[1][i] op ..., in this order; 16-bit floats in fp32, rounded once.
void reduce(HcclDataType type, HcclReduceOp op, const std::vector<const char*>& rows, size_t count, char* out);

}  // namespace emu
