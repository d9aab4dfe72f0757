// Notifies: one bit. A stream waits until it is set and clears it; any stream of the device sets it, before or after.
#include "emulator.h"

namespace {

struct Notify {
    int device;
    std::mutex mutex;
    std::condition_variable recorded;
    bool set = false;
    int waiting = 0;
};
using NotifyRef = std::shared_ptr<Notify>;

struct Table {
    std::mutex mutex;
    std::map<void*, NotifyRef> notifies;
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

aclError find(aclrtNotify handle, aclrtStream stream_handle, NotifyRef& notify, emu::StreamRef& stream) {
    if (aclError bad = emu::find_stream(stream_handle, stream)) return bad;
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().notifies.find(handle);
    if (found == table().notifies.end()) return emu::refuse(ACL_ERROR_RT_PARAM_INVALID, "no notify %p", handle);
    notify = found->second;
    if (notify->device != stream->device)
        return emu::refuse(ACL_ERROR_RT_PARAM_INVALID, "a notify of device %d on a stream of device %d", notify->device,
                           stream->device);
    return ACL_SUCCESS;
}

}  // namespace

using namespace emu;

EMU_API aclError aclrtCreateNotify(aclrtNotify* out, uint64_t flag) {
    EMU_ENTER();
    if (current_device() == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    if (flag != ACL_NOTIFY_DEFAULT) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtCreateNotify: only ACL_NOTIFY_DEFAULT is emulated");
    auto notify = std::make_shared<Notify>();
    notify->device = current_device();
    std::lock_guard<std::mutex> guard(table().mutex);
    table().notifies[notify.get()] = notify;
    *out = notify.get();
    return ACL_SUCCESS;
}

EMU_API aclError aclrtDestroyNotify(aclrtNotify handle) {
    EMU_ENTER();
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().notifies.find(handle);
    if (found == table().notifies.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyNotify: no such notify");
    {
        std::lock_guard<std::mutex> waiters(found->second->mutex);
        if (found->second->waiting)
            return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyNotify: %d tasks still wait for it", found->second->waiting);
    }
    table().notifies.erase(found);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtRecordNotify(aclrtNotify handle, aclrtStream stream_handle) {
    EMU_ENTER();
    NotifyRef notify;
    StreamRef stream;
    if (aclError bad = find(handle, stream_handle, notify, stream)) return bad;
    stream->push([notify] {
        std::lock_guard<std::mutex> guard(notify->mutex);
        notify->set = true;
        notify->recorded.notify_one();
        return ACL_SUCCESS;
    });
    return ACL_SUCCESS;
}

EMU_API aclError aclrtWaitAndResetNotify(aclrtNotify handle, aclrtStream stream_handle, uint32_t timeout) {
    EMU_ENTER();
    NotifyRef notify;
    StreamRef stream;
    if (aclError bad = find(handle, stream_handle, notify, stream)) return bad;
    if (timeout) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtWaitAndResetNotify: only waiting for ever (0) is emulated");
    {
        std::lock_guard<std::mutex> guard(notify->mutex);
        ++notify->waiting;
    }
    stream->push([notify] {
        std::unique_lock<std::mutex> lock(notify->mutex);
        notify->recorded.wait(lock, [&] { return notify->set; });
        notify->set = false;
        --notify->waiting;
        return ACL_SUCCESS;
    });
    return ACL_SUCCESS;
}
