// How an emulated kernel reaches an operand.
#include "emulator.h"

#include <cstring>

namespace emu {

aclError Access::open(int device, const void* address, size_t bytes, const char* who) {
    auto p = reinterpret_cast<uintptr_t>(address);
    region_ = find_region(address, device);
    if (!region_) {
        region_ = find_region(address);
        if (!region_)
            return refuse(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "%s: device %d has nothing mapped at %p (host memory that was "
                          "not registered, a host pointer instead of its device pointer, or freed memory)", who, device,
                          address);
        if (region_->kind == Region::mapped_host)
            return refuse(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "%s: host memory at %p is mapped on device %d, not on %d", who,
                          address, region_->device, device);
    }
    if (region_->owner != no_device && region_->owner != device && !peer_enabled(device, region_->owner))
        return refuse(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "%s: device %d has no access to device %d (enable it first)", who,
                      device, region_->owner);
    if (!region_->contains(p, bytes))
        return refuse(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, "%s: %zu bytes at %p leave the allocation", who, bytes, address);
    offset_ = p - region_->address;
    bytes_ = bytes;
    data_ = region_->alias + offset_;
    if (!region_->shadow.empty()) {  // the device sees its own old copy
        data_ = region_->shadow.data() + offset_;
        before_.assign(data_, data_ + bytes);
    }
    return ACL_SUCCESS;
}

void Access::close() {
    if (region_ && !region_->shadow.empty())  // what the kernel changed does reach the host
        for (size_t i = 0; i < bytes_; ++i)
            if (data_[i] != before_[i]) region_->alias[offset_ + i] = data_[i];
    region_.reset();
}

}  // namespace emu
