// Collectives. Each is a task of the stream it is called with: ranks meet, compare what they were called with, show each
// other their bytes in rounds of `room`, and take what is theirs. What they were not called for alike, they all refuse.
#include "comm.h"

#include <algorithm>
#include <cstring>

namespace emu {

namespace {

// Part of a peer's contribution, and where in the output it goes. In a reduction all peers' are combined.
struct Piece {
    uint32_t peer;
    uint64_t from, bytes, to;
};

struct Task {
    CommRef comm;
    const char* who;
    Operation said{};
    const void* send = nullptr;
    void* receive = nullptr;
    bool reduces = false;
    bool asks_peers = false;    // where in the peers' contributions the pieces begin
    std::vector<Piece> pieces;  // empty: nothing comes out here

    HcclResult compare() const;
    HcclResult exchange(const char* mine, std::vector<char>& out);
    HcclResult run();
    uint64_t extent() const {
        uint64_t most = 0;
        for (auto& piece : pieces)
            if (piece.bytes) most = std::max(most, piece.to + piece.bytes);
        return most;
    }
};

// Every rank reads the same board, so all come to the same answer.
HcclResult Task::compare() const {
    auto* seats = comm->board->seats;
    auto& first = seats[0].operation;
    for (uint32_t r = 0; r < comm->ranks; ++r) {
        auto& other = seats[r].operation;
        if (strcmp(first.name, other.name) || first.number != other.number)
            return refuse_hccl(HCCL_E_PARA, "operation %lu of rank 0 is %s, operation %lu of rank %u is %s", first.number,
                               first.name, other.number, r, other.name);
        if (first.count != other.count || first.type != other.type || first.reduction != other.reduction ||
            first.root != other.root)
            return refuse_hccl(HCCL_E_PARA,
                               "%s: rank 0 has count %lu, type %d, reduction %d, root %u; rank %u has %lu, %d, %d, %u", who,
                               first.count, first.type, first.reduction, first.root, r, other.count, other.type,
                               other.reduction, other.root);
        for (uint32_t peer = 0; peer < comm->ranks; ++peer)
            if (other.receive_bytes[peer] != seats[peer].operation.send_bytes[r])
                return refuse_hccl(HCCL_E_PARA, "%s: rank %u sends %lu bytes to rank %u, which expects %lu", who, peer,
                                   seats[peer].operation.send_bytes[r], r, other.receive_bytes[peer]);
    }
    return HCCL_SUCCESS;
}

HcclResult Task::exchange(const char* mine, std::vector<char>& out) {
    auto* board = comm->board;
    if (HcclResult bad = comm->meet(who)) return bad;
    if (HcclResult bad = compare()) return comm->broken(bad);
    uint64_t most = 0;
    for (uint32_t r = 0; r < comm->ranks; ++r) most = std::max(most, board->seats[r].operation.bytes);
    if (asks_peers)
        for (auto& piece : pieces) piece.from = board->seats[piece.peer].operation.send_at[comm->rank];
    for (uint64_t begin = 0;; begin += room) {
        uint64_t end = begin + room;
        if (said.bytes > begin) memcpy(board->shown(comm->rank), mine + begin, std::min(said.bytes, end) - begin);
        if (HcclResult bad = comm->meet(who)) return bad;
        for (auto& piece : pieces) {
            uint64_t first = std::max(begin, piece.from), last = std::min(end, piece.from + piece.bytes);
            if (first >= last) continue;
            char* to = out.data() + piece.to + (first - piece.from);
            if (!reduces) {
                memcpy(to, board->shown(piece.peer) + (first - begin), last - first);
                continue;
            }
            std::vector<const char*> rows;
            for (uint32_t r = 0; r < comm->ranks; ++r) rows.push_back(board->shown(r) + (first - begin));
            auto type = static_cast<HcclDataType>(said.type);
            reduce(type, static_cast<HcclReduceOp>(said.reduction), rows, (last - first) / size_of(type), to);
        }
        if (end >= most) return HCCL_SUCCESS;
        if (HcclResult bad = comm->meet(who)) return bad;
    }
}

HcclResult Task::run() {
    std::lock_guard<std::mutex> guard(comm->order);
    if (comm->error) return static_cast<HcclResult>(comm->error.load());
    Access in, to;
    uint64_t room_needed = extent();
    if (said.bytes && in.open(comm->device, send, said.bytes, who)) return comm->broken(HCCL_E_RUNTIME);
    if (room_needed && to.open(comm->device, receive, room_needed, who)) return comm->broken(HCCL_E_RUNTIME);
    if (in.mapped() || to.mapped())
        return comm->broken(refuse_hccl(HCCL_E_PARA, "%s: an operand is host memory mapped on device %d, expected the device's",
                                        who, comm->device));
    comm->board->seats[comm->rank].operation = said;
    std::vector<char> out(room_needed);
    if (HcclResult bad = exchange(in.data(), out)) return bad;
    for (auto& piece : pieces)
        if (piece.bytes) memcpy(to.data() + piece.to, out.data() + piece.to, piece.bytes);
    return HCCL_SUCCESS;
}

// A call being put together: the checks that need no peer.
struct Call {
    HcclResult bad = HCCL_SUCCESS;
    Task task;
    StreamRef stream;
    uint64_t unit = 0;

    Call(const char* who, HcclComm handle, aclrtStream stream_handle, HcclDataType type = HCCL_DATA_TYPE_UINT8) {
        task.who = who;
        if ((bad = find_comm(handle, task.comm, who))) return;
        if (find_stream(stream_handle, stream)) {
            bad = refuse_hccl(HCCL_E_PARA, "%s: not a stream of the current device", who);
            return;
        }
        if (stream->device != task.comm->device)
            bad = refuse_hccl(HCCL_E_PARA, "%s: a stream of device %d, the communicator is on device %d", who, stream->device,
                              task.comm->device);
        unit = size_of(type);
        if (!bad && !unit) bad = refuse_hccl(HCCL_E_NOT_SUPPORT, "%s: data type %d is not emulated", who, type);
        snprintf(task.said.name, sizeof task.said.name, "%s", who);
        task.said.type = type;
    }
    uint32_t ranks() const { return task.comm->ranks; }
    uint32_t rank() const { return task.comm->rank; }

    void operands(const void* send, void* receive) {
        task.send = send;
        task.receive = receive;
    }
    void reducing(HcclReduceOp op) {
        if (!bad && !can_reduce(static_cast<HcclDataType>(task.said.type), op))
            bad = refuse_hccl(HCCL_E_NOT_SUPPORT, "%s: reduction %d of data type %d is not emulated", task.who, op,
                              task.said.type);
        task.said.reduction = op;
        task.reduces = true;
    }
    void rooted(uint32_t root) {
        if (!bad && root >= ranks())
            bad = refuse_hccl(HCCL_E_PARA, "%s: root %u of %u ranks", task.who, root, ranks());
        task.said.root = root;
    }
    void need(const void* pointer, const char* what) {
        if (!bad && !pointer) bad = refuse_hccl(HCCL_E_PTR, "%s: %s is null", task.who, what);
    }
    HcclResult push() {
        if (task.said.bytes) need(task.send, "the send buffer");
        if (task.extent()) need(task.receive, "the receive buffer");
        if (bad) return bad;
        task.said.number = task.comm->asked++;
        stream->push([task = task]() mutable { return on_stream(task.run()); });
        return HCCL_SUCCESS;
    }
};

}  // namespace

}  // namespace emu

using namespace emu;

EMU_API HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                                 aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.reducing(op);
    call.task.said.count = count;
    call.task.said.bytes = count * call.unit;
    call.task.pieces = {{0, 0, count * call.unit, 0}};
    return call.push();
}

EMU_API HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                              HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.reducing(op);
    call.rooted(root);
    call.task.said.count = count;
    call.task.said.bytes = count * call.unit;
    if (call.rank() == root) call.task.pieces = {{0, 0, count * call.unit, 0}};
    return call.push();
}

EMU_API HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                                     HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.reducing(op);
    call.task.said.count = count;
    call.task.said.bytes = count * call.unit * call.ranks();
    call.task.pieces = {{0, count * call.unit * call.rank(), count * call.unit, 0}};
    return call.push();
}

EMU_API HcclResult HcclReduceScatterV(void* send, const void* counts, const void* places, void* receive, uint64_t count,
                                      HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.need(counts, "sendCounts");
    call.need(places, "sendDispls");
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.reducing(op);
    auto *n = static_cast<const uint64_t*>(counts), *at = static_cast<const uint64_t*>(places);
    for (uint32_t r = 0; r < call.ranks(); ++r) {
        call.task.said.send_bytes[r] = n[r] * call.unit;
        call.task.said.receive_bytes[r] = count * call.unit;
        if (n[r]) call.task.said.bytes = std::max(call.task.said.bytes, (at[r] + n[r]) * call.unit);
    }
    call.task.pieces = {{0, at[call.rank()] * call.unit, count * call.unit, 0}};
    return call.push();
}

EMU_API HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm,
                                 aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.task.said.count = count;
    call.task.said.bytes = count * call.unit;
    for (uint32_t r = 0; r < call.ranks(); ++r)
        call.task.pieces.push_back({r, 0, count * call.unit, r * count * call.unit});
    return call.push();
}

EMU_API HcclResult HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* places,
                                  HcclDataType type, HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.need(counts, "recvCounts");
    call.need(places, "recvDispls");
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.task.said.bytes = count * call.unit;
    auto *n = static_cast<const uint64_t*>(counts), *at = static_cast<const uint64_t*>(places);
    for (uint32_t r = 0; r < call.ranks(); ++r) {
        call.task.said.send_bytes[r] = count * call.unit;
        call.task.said.receive_bytes[r] = n[r] * call.unit;
        call.task.pieces.push_back({r, 0, n[r] * call.unit, at[r] * call.unit});
    }
    return call.push();
}

EMU_API HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                                 aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.operands(buffer, buffer);
    call.rooted(root);
    call.task.said.count = count;
    if (call.rank() == root)
        call.task.said.bytes = count * call.unit;
    else
        call.task.pieces = {{root, 0, count * call.unit, 0}};
    return call.push();
}

EMU_API HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                               aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    call.operands(send, receive);
    call.rooted(root);
    call.task.said.count = count;
    if (call.rank() == root) call.task.said.bytes = count * call.unit * call.ranks();
    call.task.pieces = {{root, count * call.unit * call.rank(), count * call.unit, 0}};
    return call.push();
}

EMU_API HcclResult HcclAlltoAllV(const void* send, const void* counts, const void* places, HcclDataType type,
                                 const void* receive, const void* receive_counts, const void* receive_places,
                                 HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream, type);
    if (call.bad) return call.bad;
    if (type != receive_type)
        return refuse_hccl(HCCL_E_PARA, "%s: sends type %d and receives type %d", __func__, type, receive_type);
    call.need(counts, "sendCounts");
    call.need(places, "sdispls");
    call.need(receive_counts, "recvCounts");
    call.need(receive_places, "rdispls");
    if (call.bad) return call.bad;
    call.operands(send, const_cast<void*>(receive));
    auto& said = call.task.said;
    auto words = [](const void* array) { return static_cast<const uint64_t*>(array); };
    for (uint32_t r = 0; r < call.ranks(); ++r) {
        said.send_at[r] = words(places)[r] * call.unit;
        said.send_bytes[r] = words(counts)[r] * call.unit;
        said.receive_bytes[r] = words(receive_counts)[r] * call.unit;
        if (said.send_bytes[r]) said.bytes = std::max(said.bytes, said.send_at[r] + said.send_bytes[r]);
        call.task.pieces.push_back({r, 0, said.receive_bytes[r], words(receive_places)[r] * call.unit});
    }
    call.task.asks_peers = true;
    return call.push();
}

EMU_API HcclResult HcclAlltoAll(const void* send, uint64_t count, HcclDataType type, const void* receive,
                                uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    CommRef found;
    if (HcclResult bad = find_comm(comm, found, __func__)) return bad;
    std::vector<uint64_t> counts(found->ranks, count), receive_counts(found->ranks, receive_count);
    std::vector<uint64_t> places, receive_places;
    for (uint64_t r = 0; r < found->ranks; ++r) places.push_back(r * count), receive_places.push_back(r * receive_count);
    return HcclAlltoAllV(send, counts.data(), places.data(), type, receive, receive_counts.data(), receive_places.data(),
                         receive_type, comm, stream);
}

EMU_API HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    HCCL_ENTER();
    Call call(__func__, comm, stream);
    return call.bad ? call.bad : call.push();
}
