// Peer access: one-directional, enabled by the device that will do the accessing.
#include "emulator.h"

#include <set>

namespace emu {

namespace {
std::mutex mutex;
std::set<std::pair<int, int>>& enabled() {
    static auto* pairs = new std::set<std::pair<int, int>>;
    return *pairs;
}
}  // namespace

bool connected(int device, int peer) {
    if (settings().peers == "all") return true;
    for (auto& pair : split(settings().peers, ',')) {
        auto ends = split(pair, '-');
        if (ends.size() != 2) continue;
        int a = atoi(ends[0].c_str()), b = atoi(ends[1].c_str());
        if ((a == device && b == peer) || (a == peer && b == device)) return true;
    }
    return false;
}

bool peer_enabled(int device, int peer) {
    if (device == peer) return true;
    std::lock_guard<std::mutex> guard(mutex);
    return enabled().count({device, peer});
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    EMU_ENTER();
    if (!valid_device(device) || !valid_device(peer)) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "no device %d or %d", device, peer);
    *can = device != peer && connected(device, peer);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    EMU_ENTER();
    int device = current_device();
    if (device == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    if (!valid_device(peer)) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtDeviceEnablePeerAccess: no device %d", peer);
    if (flags || peer == device)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDeviceEnablePeerAccess: from %d to %d, flags %u", device, peer, flags);
    if (!connected(device, peer))
        return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtDeviceEnablePeerAccess: %d cannot reach %d", device, peer);
    std::lock_guard<std::mutex> guard(mutex);
    enabled().insert({device, peer});
    return ACL_SUCCESS;
}

EMU_API aclError aclrtDeviceDisablePeerAccess(int32_t peer) {
    EMU_ENTER();
    std::lock_guard<std::mutex> guard(mutex);
    if (!enabled().erase({current_device(), peer}))
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDeviceDisablePeerAccess: %d was not enabled", peer);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtDevicePeerAccessStatus(int32_t device, int32_t peer, int32_t* status) {
    EMU_ENTER();
    if (!valid_device(device) || !valid_device(peer)) return ACL_ERROR_RT_INVALID_DEVICEID;
    *status = peer_enabled(device, peer);
    return ACL_SUCCESS;
}

// Two dies share a package (SIO), packages are joined by a switched HCCS fabric.
EMU_API aclError aclrtGetDevicesTopo(uint32_t device, uint32_t other, uint64_t* value) {
    EMU_ENTER();
    if (!valid_device(device) || !valid_device(other)) return ACL_ERROR_RT_INVALID_DEVICEID;
    if (!connected(device, other)) *value = ACL_RT_DEVS_TOPOLOGY_SYS;
    else *value = device / 2 == other / 2 ? ACL_RT_DEVS_TOPOLOGY_SIO : ACL_RT_DEVS_TOPOLOGY_HCCS_SW;
    return ACL_SUCCESS;
}
