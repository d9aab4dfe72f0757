// Devices and the calling thread's context. One context per device: its handle is the device's number, offset.
#include "emulator.h"

#include <cstdio>
#include <cstring>

namespace emu {

namespace {
thread_local int current = no_device;
constexpr uintptr_t context_base = 0x1000;
}  // namespace

int current_device() { return current; }
void adopt_device(int device) { current = device; }
bool valid_device(int64_t device) { return device >= 0 && device < settings().devices; }

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtGetDeviceCount(uint32_t* count) {
    EMU_ENTER();
    *count = settings().devices;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtSetDevice(int32_t device) {
    EMU_ENTER();
    if (!valid_device(device)) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice: no device %d", device);
    if (lost(device)) return refuse(ACL_ERROR_RT_LOST_HEARTBEAT, "aclrtSetDevice: device %d is lost", device);
    adopt_device(device);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtGetDevice(int32_t* device) {
    if (current_device() == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current_device();
    return ACL_SUCCESS;
}

EMU_API aclError aclrtResetDevice(int32_t device) {
    EMU_ENTER();
    if (!valid_device(device)) return ACL_ERROR_RT_INVALID_DEVICEID;
    for (auto& stream : streams_of(device)) stream->wait();
    return ACL_SUCCESS;
}

EMU_API aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (current_device() == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = reinterpret_cast<aclrtContext>(context_base + current_device());
    return ACL_SUCCESS;
}

EMU_API aclError aclrtSetCurrentContext(aclrtContext context) {
    int64_t device = static_cast<int64_t>(reinterpret_cast<uintptr_t>(context)) - static_cast<int64_t>(context_base);
    if (!valid_device(device)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetCurrentContext: no such context");
    adopt_device(static_cast<int>(device));
    return ACL_SUCCESS;
}

EMU_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
    if (!valid_device(device)) return ACL_ERROR_RT_INVALID_DEVICEID;
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

EMU_API const char* aclrtGetSocName() { return settings().soc.c_str(); }

// The numbers of an Atlas A3 die, as documented; nothing here computes with them.
EMU_API aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value) {
    if (!valid_device(device)) return ACL_ERROR_RT_INVALID_DEVICEID;
    switch (info) {
        case ACL_DEVICE_INFO_AI_CORE_NUM: *value = 24; return ACL_SUCCESS;
        case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = 48; return ACL_SUCCESS;
        case ACL_DEVICE_INFO_L2_SIZE: *value = 192 << 20; return ACL_SUCCESS;
        default: return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclGetDeviceCapability: %d is not emulated", (int)info);
    }
}

EMU_API aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
    if (!valid_device(device)) return ACL_ERROR_RT_INVALID_DEVICEID;
    memset(uuid, 0, sizeof *uuid);
    snprintf(uuid->bytes, sizeof uuid->bytes, "emulated-%04d", device);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logical) {
    if (!valid_device(user)) return ACL_ERROR_RT_INVALID_DEVICEID;
    *logical = user;
    return ACL_SUCCESS;
}
