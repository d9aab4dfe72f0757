// Host memory: page-locked allocations, and host ranges mapped into a device's address space.
#include "emulator.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace emu {

namespace {

constexpr size_t page = 4096;
// aclrtMallocHost promises 64-byte alignment, no more. Blocks start this far into a page, so that a program that counts
// on page alignment meets the error it would meet on other machines.
constexpr size_t only_aligned = 64;

struct Block {
    char* mapping;
    size_t mapped, size;
    bool unified;
};

struct Registration {
    uintptr_t address;
    size_t size;
    RegionRef region;  // null when the memory is pinned but not mapped
};

struct Table {
    std::mutex mutex;
    std::map<uintptr_t, Block> blocks;
    std::vector<std::map<uintptr_t, Registration>> registered;  // per device
    Table() : registered(settings().devices) {}
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

template <typename T>
const T* covering(const std::map<uintptr_t, T>& ranges, uintptr_t p, size_t bytes) {
    auto next = ranges.upper_bound(p);
    if (next == ranges.begin()) return nullptr;
    auto& range = *std::prev(next);
    return p - range.first + bytes <= range.second.size ? &range.second : nullptr;
}

template <typename T>
bool overlaps(const std::map<uintptr_t, T>& ranges, uintptr_t p, size_t bytes) {
    auto next = ranges.lower_bound(p + bytes);
    if (next == ranges.begin()) return false;
    auto& range = *std::prev(next);
    return range.first + range.second.size > p;
}

aclError allocate(void** out, size_t bytes, bool unified) {
    if (!out || !bytes) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocHost: %zu bytes", bytes);
    if (current_device() == no_device) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMallocHost: no device is set");
    size_t offset = unified ? 0 : only_aligned;
    size_t mapped = (bytes + offset + page - 1) / page * page;
    void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED)
        return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost: the host has no %zu bytes", bytes);
    char* start = static_cast<char*>(mapping) + offset;
    std::lock_guard<std::mutex> guard(table().mutex);
    table().blocks[reinterpret_cast<uintptr_t>(start)] = {static_cast<char*>(mapping), mapped, mapped - offset, unified};
    *out = start;
    return ACL_SUCCESS;
}

aclError enlist(void* host, size_t bytes, bool mapped, void** device_address, const char* who) {
    int device = current_device();
    auto p = reinterpret_cast<uintptr_t>(host);
    if (device == no_device) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "%s: no device is set on this thread", who);
    if (!host || !bytes || p % page)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes at %p; the address must be 4 KiB aligned", who, bytes, host);
    if (find_region(host) && !find_region(host)->unified)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%s: %p is device memory", who, host);
    std::lock_guard<std::mutex> guard(table().mutex);
    if (overlaps(table().registered[device], p, bytes))
        return refuse(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "%s: %p is registered on device %d already", who, host, device);
    auto* block = covering(table().blocks, p, bytes);
    if (!block && getenv("EMU_OLD_KERNEL"))
        return refuse(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "%s: on this kernel only aclrtMallocHost memory can be registered", who);
    if (settings().map_once)
        for (auto& others : table().registered)
            if (overlaps(others, p, bytes))
                return refuse(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "%s: %p is registered on another device", who, host);
    Registration entry{p, bytes, nullptr};
    if (mapped) {
        auto region = std::make_shared<Region>();
        region->kind = Region::mapped_host;
        region->device = device;
        region->owner = no_device;
        region->unified = block && block->unified;
        region->size = bytes;
        region->alias = static_cast<char*>(host);
        region->address = region->unified ? p : reinterpret_cast<uintptr_t>(reserve_address(bytes));
        if (settings().stale) region->shadow.assign(region->alias, region->alias + bytes);
        add_region(region);
        entry.region = region;
        if (device_address) *device_address = reinterpret_cast<void*>(region->address);
    }
    table().registered[device][p] = entry;
    return ACL_SUCCESS;
}

}  // namespace

bool pinned(const void* address, size_t bytes) {
    auto p = reinterpret_cast<uintptr_t>(address);
    std::lock_guard<std::mutex> guard(table().mutex);
    if (covering(table().blocks, p, bytes)) return true;
    for (auto& registered : table().registered)
        if (covering(registered, p, bytes)) return true;
    return false;
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtMallocHost(void** out, size_t bytes) {
    EMU_ENTER();
    return allocate(out, bytes, false);
}

EMU_API aclError aclrtMallocHostWithCfg(void** out, uint64_t bytes, aclrtMallocConfig* config) {
    EMU_ENTER();
    bool unified = false;
    for (size_t i = 0; config && i < config->numAttrs; ++i)
        if (config->attrs[i].attr == ACL_RT_MEM_ATTR_VA_FLAG) unified = config->attrs[i].value.vaFlag == 1;
    if (unified && !settings().unified)
        return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtMallocHostWithCfg: this driver has no VA_FLAG");
    return allocate(out, bytes, unified);
}

EMU_API aclError aclrtFreeHost(void* host) {
    EMU_ENTER();
    auto p = reinterpret_cast<uintptr_t>(host);
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().blocks.find(p);
    if (found == table().blocks.end())
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: %p is not the start of a host allocation", host);
    for (auto& registered : table().registered)
        if (overlaps(registered, p, found->second.size))
            return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: %p is still registered, unregister it first", host);
    munmap(found->second.mapping, found->second.mapped);
    table().blocks.erase(found);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtHostRegister(void* host, uint64_t bytes, aclrtHostRegisterType type, void** device_address) {
    EMU_ENTER();
    if (type != ACL_HOST_REGISTER_MAPPED || !device_address)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: type %d, only MAPPED is emulated", (int)type);
    return enlist(host, bytes, true, device_address, "aclrtHostRegister");
}

EMU_API aclError aclrtHostRegisterV2(void* host, uint64_t bytes, uint32_t flag) {
    EMU_ENTER();
    if (!flag || (flag & ~(ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED)))
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegisterV2: flag %#x, expected MAPPED | PINNED", flag);
    return enlist(host, bytes, flag & ACL_HOST_REG_MAPPED, nullptr, "aclrtHostRegisterV2");
}

EMU_API aclError aclrtHostGetDevicePointer(void* host, void** device_address, uint32_t flag) {
    EMU_ENTER();
    int device = current_device();
    if (device == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().registered[device].find(reinterpret_cast<uintptr_t>(host));
    if (flag || !device_address || found == table().registered[device].end() || !found->second.region)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostGetDevicePointer: %p is not mapped on device %d", host, device);
    *device_address = reinterpret_cast<void*>(found->second.region->address);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtHostUnregister(void* host) {
    EMU_ENTER();
    int device = current_device();
    if (device == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().registered[device].find(reinterpret_cast<uintptr_t>(host));
    if (found == table().registered[device].end())
        return refuse(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "aclrtHostUnregister: %p is not registered on device %d", host,
                      device);
    if (found->second.region) remove_region(*found->second.region);
    table().registered[device].erase(found);
    return ACL_SUCCESS;
}
