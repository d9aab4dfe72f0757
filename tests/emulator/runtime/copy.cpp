// Copies and their rules: which pointer may be which operand, when an asynchronous copy blocks, who may reach a peer.
#include "emulator.h"

#include <cstring>

namespace emu {

namespace {

// One end of a copy.
struct Place {
    const void* address = nullptr;
    size_t bytes = 0;
    char* data = nullptr;
    RegionRef region;     // null: plain host memory
    bool device = false;  // counts as device memory
    bool locked = true;   // page-locked, or device memory

    // Between the call and the copy nobody may have given the memory back.
    bool still_there() const {
        if (region) {
            auto now = find_region(address, region->device);
            return now == region;
        }
        return !locked || pinned(address, bytes);
    }
};

const char* names[] = {"H2H", "H2D", "D2H", "D2D", "DEFAULT"};

aclError place(Place& out, const void* address, size_t bytes, const char* who) {
    out.address = address;
    out.bytes = bytes;
    out.data = static_cast<char*>(const_cast<void*>(address));
    out.region = find_region(address);
    if (!out.region) {
        out.locked = pinned(address, bytes);
        return ACL_SUCCESS;
    }
    if (out.region->kind == Region::mapped_host && !out.region->unified)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is the device address of mapped host memory; it is no copy operand, "
                      "copy from the host address", who, address);
    if (!out.region->contains(reinterpret_cast<uintptr_t>(address), bytes))
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes at %p leave the allocation", who, bytes, address);
    out.data = out.region->alias + (reinterpret_cast<uintptr_t>(address) - out.region->address);
    out.device = out.region->kind != Region::mapped_host;
    return ACL_SUCCESS;
}

struct Copy {
    Place to, from;
    bool blocking = false;

    aclError check(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind, const char* who) {
        int device = current_device();
        if (device == no_device) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "%s: no device is set on this thread", who);
        if (!dst || !src || bytes > room)
            return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes from %p to %p with room for %zu", who, bytes, src, dst, room);
        if (kind > ACL_MEMCPY_DEFAULT) return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: kind %d is not emulated", who, kind);
        if (aclError bad = place(to, dst, bytes, who)) return bad;
        if (aclError bad = place(from, src, bytes, who)) return bad;
        bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
        bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
        // Memory with one address for both sides may stand on either.
        if (kind == ACL_MEMCPY_DEFAULT) to_device = to.device, from_device = from.device;
        bool to_fits = to.device == to_device || (to.region && to.region->unified);
        bool from_fits = from.device == from_device || (from.region && from.region->unified);
        if (!to_fits || !from_fits)
            return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %s, but %p is %s and %p is %s memory", who, names[kind], src,
                          from.device ? "device" : "host", dst, to.device ? "device" : "host");
        for (auto* end : {&to, &from}) {
            if (!end->device) continue;
            bool crosses_to_host = !to.device || !from.device;
            if (crosses_to_host && (end->region->kind == Region::imported || end->region->device != device))
                return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: memory of device %d is no operand of a host copy on device %d",
                              who, end->region->owner, device);
            if (end->region->owner != device && !peer_enabled(device, end->region->owner))
                return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: device %d has no access to device %d (enable it first)", who,
                              device, end->region->owner);
        }
        blocking = !to.locked || !from.locked;
        return ACL_SUCCESS;
    }

    aclError run(const char* who) const {
        for (auto* end : {&to, &from})
            if (end->device && lost(end->region->owner))
                return refuse(ACL_ERROR_RT_LOST_HEARTBEAT, "%s: device %d is lost", who, end->region->owner);
        if (!to.still_there() || !from.still_there())
            return refuse(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "%s: memory was freed before the copy ran", who);
        memmove(to.data, from.data, to.bytes);
        return ACL_SUCCESS;
    }
};

aclError copy_async(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind, aclrtStream handle,
                    const char* who) {
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    if (!bytes) return ACL_SUCCESS;
    Copy copy;
    if (aclError bad = copy.check(dst, room, src, bytes, kind, who)) return bad;
    stream->push([copy, who] { return copy.run(who); });
    return copy.blocking ? stream->wait() : ACL_SUCCESS;  // pageable memory: not asynchronous
}

aclError fill(void* dst, size_t room, int value, size_t bytes, StreamRef stream, const char* who) {
    if (current_device() == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    Place to;
    if (!dst || bytes > room) return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes, room for %zu", who, bytes, room);
    if (aclError bad = place(to, dst, bytes, who)) return bad;
    auto run = [to, value, who]() -> aclError {
        if (!to.still_there()) return refuse(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "%s: memory was freed before it ran", who);
        memset(to.data, value, to.bytes);
        return ACL_SUCCESS;
    };
    if (!stream) return run();
    stream->push(run);
    return ACL_SUCCESS;
}

}  // namespace

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind) {
    EMU_ENTER();
    if (!bytes) return ACL_SUCCESS;
    Copy copy;
    if (aclError bad = copy.check(dst, room, src, bytes, kind, "aclrtMemcpy")) return bad;
    return copy.run("aclrtMemcpy");
}

EMU_API aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind,
                                  aclrtStream stream) {
    EMU_ENTER();
    return copy_async(dst, room, src, bytes, kind, stream, "aclrtMemcpyAsync");
}

EMU_API aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind,
                                               aclrtStream stream) {
    EMU_ENTER();
    return copy_async(dst, room, src, bytes, kind, stream, "aclrtMemcpyAsyncWithCondition");
}

EMU_API aclError aclrtMemcpyBatchAsync(void** dsts, size_t* rooms, void** srcs, size_t* sizes, size_t batches,
                                       aclrtMemcpyBatchAttr* attributes, size_t* indexes, size_t count, size_t* fail_index,
                                       aclrtStream handle) {
    EMU_ENTER();
    const char* who = "aclrtMemcpyBatchAsync";
    *fail_index = SIZE_MAX;
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    if (!batches || !count || !attributes || !indexes || indexes[0] != 0)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: attributes must cover every copy", who);
    std::vector<Copy> copies(batches);
    bool up = attributes[0].dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE, blocking = false;
    for (size_t i = 0, a = 0; i < batches; ++i) {
        while (a + 1 < count && indexes[a + 1] <= i) ++a;
        bool to_device = attributes[a].dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
        bool from_device = attributes[a].srcLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
        *fail_index = i;
        if (to_device == from_device || to_device != up)
            return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: copy %zu does not go in the batch's one direction", who, i);
        auto kind = up ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
        if (aclError bad = copies[i].check(dsts[i], rooms[i], srcs[i], sizes[i], kind, who)) return bad;
        blocking |= copies[i].blocking;
    }
    *fail_index = SIZE_MAX;
    stream->push([copies, who] {
        for (auto& copy : copies)
            if (aclError bad = copy.run(who)) return bad;
        return (aclError)ACL_SUCCESS;
    });
    return blocking ? stream->wait() : ACL_SUCCESS;
}

EMU_API aclError aclrtMemset(void* dst, size_t room, int32_t value, size_t bytes) {
    EMU_ENTER();
    return fill(dst, room, value, bytes, nullptr, "aclrtMemset");
}

EMU_API aclError aclrtMemsetAsync(void* dst, size_t room, int32_t value, size_t bytes, aclrtStream handle) {
    EMU_ENTER();
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    return fill(dst, room, value, bytes, stream, "aclrtMemsetAsync");
}
