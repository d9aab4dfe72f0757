// Device memory. Each allocation is one memfd, mapped twice: the address handed out has no access rights, the emulator's
// own alias has. A limit per device makes running out of memory real.
#include "emulator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace emu {

namespace {

constexpr size_t page = 4096;
// Fresh memory is filled with this: as float or bfloat16 it reads NaN, as an index -1. Real memory holds anything.
constexpr int poison = 0xff;

struct Table {
    std::mutex mutex;
    std::vector<std::map<uintptr_t, RegionRef>> spaces;  // one address space per device
    std::vector<size_t> used;
    Table() : spaces(settings().devices), used(settings().devices) {}
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

RegionRef find_locked(const std::map<uintptr_t, RegionRef>& space, uintptr_t p) {
    auto next = space.upper_bound(p);
    if (next == space.begin()) return nullptr;
    auto& region = std::prev(next)->second;
    return region->contains(p, 0) && p < region->address + region->size ? region : nullptr;
}

aclError allocate(void** out, size_t bytes) {
    int device = current_device();
    if (device == no_device) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc: no device is set on this thread");
    if (!out || !bytes) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: %zu bytes", bytes);
    size_t size = (bytes + page - 1) / page * page;
    {
        std::lock_guard<std::mutex> guard(table().mutex);
        if (size > settings().hbm - table().used[device])
            return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc: %zu bytes on device %d, %zu of %zu are free", size,
                          device, settings().hbm - table().used[device], settings().hbm);
        table().used[device] += size;
    }
    auto region = std::make_shared<Region>();
    region->kind = Region::hbm;
    region->device = region->owner = device;
    region->size = size;
    region->file = memfd_create("emulated-hbm", MFD_CLOEXEC);
    void* alias = MAP_FAILED;
    // One page more than asked: the control block that IPC importers share (ipc.cpp).
    if (region->file >= 0 && ftruncate(region->file, size + page) == 0)
        alias = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, region->file, 0);
    if (alias == MAP_FAILED) {
        std::lock_guard<std::mutex> guard(table().mutex);
        table().used[device] -= size;
        return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc: the host has no memory for %zu bytes", size);
    }
    region->alias = static_cast<char*>(alias);
    memset(region->alias, poison, size);
    region->address = reinterpret_cast<uintptr_t>(reserve_address(size));
    add_region(region);
    *out = reinterpret_cast<void*>(region->address);
    return ACL_SUCCESS;
}

}  // namespace

Region::~Region() {
    if (kind != mapped_host && alias) munmap(alias, size);
    if (!unified && address) munmap(reinterpret_cast<void*>(address), size);
    if (file >= 0) close(file);
}

void* reserve_address(size_t bytes) {
    void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? nullptr : address;
}

RegionRef find_region(const void* address) {
    std::lock_guard<std::mutex> guard(table().mutex);
    for (auto& space : table().spaces)
        if (auto region = find_locked(space, reinterpret_cast<uintptr_t>(address))) return region;
    return nullptr;
}

RegionRef find_region(const void* address, int device) {
    std::lock_guard<std::mutex> guard(table().mutex);
    return find_locked(table().spaces[device], reinterpret_cast<uintptr_t>(address));
}

void add_region(RegionRef region) {
    std::lock_guard<std::mutex> guard(table().mutex);
    table().spaces[region->device][region->address] = region;
}

bool remove_region(const Region& region) {
    std::lock_guard<std::mutex> guard(table().mutex);
    if (region.kind == Region::hbm) table().used[region.device] -= region.size;
    return table().spaces[region.device].erase(region.address) == 1;
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtMalloc(void** out, size_t bytes, aclrtMemMallocPolicy) {
    EMU_ENTER();
    return allocate(out, bytes);
}

EMU_API aclError aclrtMallocAlign32(void** out, size_t bytes, aclrtMemMallocPolicy) {
    EMU_ENTER();
    return allocate(out, bytes);
}

EMU_API aclError aclrtFree(void* address) {
    EMU_ENTER();
    auto region = find_region(address);
    if (!region || region->kind != Region::hbm || region->address != reinterpret_cast<uintptr_t>(address))
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: %p is not the start of device memory", address);
    remove_region(*region);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    EMU_ENTER();
    if (current_device() == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    std::lock_guard<std::mutex> guard(table().mutex);
    *total = settings().hbm;
    *free = settings().hbm - table().used[current_device()];
    return ACL_SUCCESS;
}

EMU_API aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
    EMU_ENTER();
    memset(attributes, 0, sizeof *attributes);
    auto region = find_region(address);
    if (region && !region->unified) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = region->device;
    } else {
        attributes->location.type = pinned(address, 1) ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    }
    attributes->pageSize = page;
    return ACL_SUCCESS;
}
