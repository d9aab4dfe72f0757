// Messages from one rank to another, in parts of `room`. Both sides wait until the last part has arrived.
#include "comm.h"

#include <algorithm>
#include <cstring>

namespace emu {

namespace {

struct Message {
    CommRef comm;
    const char* who;
    uint32_t peer;
    const void* address;
    uint64_t bytes;

    // The first part goes out, or is waited for, also when there are no bytes.
    uint64_t parts() const { return std::max<uint64_t>(1, (bytes + room - 1) / room); }
    uint64_t part(uint64_t i) const { return std::min<uint64_t>(room, bytes - i * room); }

    HcclResult send(const char* data) {
        auto& here = comm->board->seats[comm->rank];
        auto& there = comm->board->seats[peer];
        auto &sent = here.sent[peer], &received = there.received[comm->rank];
        here.message[peer] = bytes;
        for (uint64_t i = 0; i < parts(); ++i) {
            if (uint64_t n = part(i)) memcpy(comm->board->between(comm->rank, peer), data + i * room, n);
            set(sent, sent + 1);
            if (HcclResult bad = comm->await(received, sent, peer, who)) return bad;
        }
        return HCCL_SUCCESS;
    }

    HcclResult receive(char* data) {
        auto& here = comm->board->seats[comm->rank];
        auto& there = comm->board->seats[peer];
        auto &sent = there.sent[comm->rank], &received = here.received[peer];
        for (uint64_t i = 0; i < parts(); ++i) {
            if (HcclResult bad = comm->await(sent, received + 1, peer, who)) return bad;
            if (there.message[comm->rank] != bytes)
                return comm->broken(refuse_hccl(HCCL_E_PARA, "%s: rank %u sends %lu bytes to rank %u, which expects %lu", who,
                                                peer, there.message[comm->rank], comm->rank, bytes));
            if (uint64_t n = part(i)) memcpy(data + i * room, comm->board->between(peer, comm->rank), n);
            set(received, received + 1);
        }
        return HCCL_SUCCESS;
    }

    HcclResult run(bool sends) {
        if (comm->error) return static_cast<HcclResult>(comm->error.load());
        Access access;
        if (bytes && access.open(comm->device, address, bytes, who)) return comm->broken(HCCL_E_RUNTIME);
        if (access.mapped())
            return comm->broken(refuse_hccl(HCCL_E_PARA, "%s: the operand is host memory mapped on device %d", who, comm->device));
        return sends ? send(access.data()) : receive(access.data());
    }
};

HcclResult push(const char* who, const void* address, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle,
                aclrtStream stream_handle, bool sends) {
    CommRef comm;
    StreamRef stream;
    if (HcclResult bad = find_comm(handle, comm, who)) return bad;
    if (find_stream(stream_handle, stream) || stream->device != comm->device)
        return refuse_hccl(HCCL_E_PARA, "%s: not a stream of device %d", who, comm->device);
    if (!size_of(type)) return refuse_hccl(HCCL_E_NOT_SUPPORT, "%s: data type %d is not emulated", who, type);
    if (peer >= comm->ranks || peer == comm->rank)
        return refuse_hccl(HCCL_E_PARA, "%s: rank %u has no peer %u among %u ranks", who, comm->rank, peer, comm->ranks);
    if (count && !address) return refuse_hccl(HCCL_E_PTR, "%s: the buffer is null", who);
    Message message{comm, who, peer, address, count * size_of(type)};
    stream->push([message, sends]() mutable { return on_stream(message.run(sends)); });
    return HCCL_SUCCESS;
}

}  // namespace

}  // namespace emu

using namespace emu;

EMU_API HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    return push(__func__, buffer, count, type, peer, comm, stream, true);
}

EMU_API HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    return push(__func__, buffer, count, type, peer, comm, stream, false);
}
