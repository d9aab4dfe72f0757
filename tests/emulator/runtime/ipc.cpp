// Device memory shared between processes. The page behind an allocation's memfd is a control block that exporter and
// importers all map: who may import, and how many imports are open. A key names the exporter's file descriptor.
#include "emulator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace emu {

namespace {

constexpr size_t page = 4096;

struct Control {
    std::atomic<int> imports;
    int anyone;       // exported without validation of process ids
    int count;
    int allowed[64];  // process ids
};

struct Key {
    int process, file, device;
    size_t offset, bytes;

    bool parse(const char* text) {
        return text && sscanf(text, "emu:%d:%d:%d:%zu:%zu", &process, &file, &device, &offset, &bytes) == 5;
    }
    std::string text() const {
        char line[128];
        snprintf(line, sizeof line, "emu:%d:%d:%d:%zu:%zu", process, file, device, offset, bytes);
        return line;
    }
};

struct Share {
    Control* control;
    RegionRef region;  // of an import; null for an export
};

struct Table {
    std::mutex mutex;
    std::map<std::string, Share> exports, imports;
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

Control* map_control(int file, size_t memory) {
    void* block = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file, memory);
    return block == MAP_FAILED ? nullptr : static_cast<Control*>(block);
}

bool permitted(const Control& control) {
    auto* end = control.allowed + control.count;
    return control.anyone || std::find(control.allowed, end, getpid()) != end;
}

}  // namespace

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtDeviceGetBareTgid(int32_t* process) {
    EMU_ENTER();
    *process = getpid();
    return ACL_SUCCESS;
}

EMU_API aclError aclrtIpcMemGetExportKey(void* address, size_t bytes, char* key, size_t room, uint64_t flags) {
    EMU_ENTER();
    auto region = find_region(address, std::max(current_device(), 0));
    if (!region || region->kind != Region::hbm || !region->contains(reinterpret_cast<uintptr_t>(address), bytes))
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: %zu bytes at %p are not this device's memory",
                      bytes, address);
    Key made{getpid(), region->file, region->device, reinterpret_cast<uintptr_t>(address) - region->address, bytes};
    auto text = made.text();
    if (text.size() >= room) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: a key takes 65 bytes");
    Control* control = map_control(region->file, region->size);
    if (!control) return ACL_ERROR_RT_DRV_INTERNAL_ERROR;
    control->anyone |= (flags & ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0;
    strcpy(key, text.c_str());
    std::lock_guard<std::mutex> guard(table().mutex);
    table().exports[text] = {control, region};
    return ACL_SUCCESS;
}

EMU_API aclError aclrtIpcMemSetImportPid(const char* key, int32_t* processes, size_t count) {
    EMU_ENTER();
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().exports.find(key ? key : "");
    if (found == table().exports.end() || !processes || !count)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemSetImportPid: not a key that this process exported");
    auto& control = *found->second.control;
    for (size_t i = 0; i < count && control.count < 64; ++i) control.allowed[control.count++] = processes[i];
    return ACL_SUCCESS;
}

EMU_API aclError aclrtIpcMemImportByKey(void** address, const char* text, uint64_t flags) {
    EMU_ENTER();
    int device = current_device();
    if (device == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    Key key;
    if (!address || !key.parse(text)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemImportByKey: malformed key");
    std::lock_guard<std::mutex> guard(table().mutex);
    if (table().imports.count(text)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemImportByKey: imported already");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", key.process, key.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status) < 0)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemImportByKey: the exporter's memory is gone");
    size_t memory = status.st_size - page;
    Control* control = map_control(file, memory);
    if (!control || !permitted(*control)) {
        close(file);
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemImportByKey: process %d was not named by SetImportPid", getpid());
    }
    auto region = std::make_shared<Region>();
    region->kind = Region::imported;
    region->device = device;
    region->owner = key.device;
    region->size = memory;
    region->file = file;
    region->alias = static_cast<char*>(mmap(nullptr, memory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    region->address = reinterpret_cast<uintptr_t>(reserve_address(memory));
    if (region->alias == MAP_FAILED || !region->address) {
        region->alias = nullptr;
        return refuse(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "aclrtIpcMemImportByKey: cannot map %zu bytes", memory);
    }
    if (flags & ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS && key.device != device)
        aclrtDeviceEnablePeerAccess(key.device, 0);
    add_region(region);
    ++control->imports;
    table().imports[text] = {control, region};
    *address = reinterpret_cast<void*>(region->address + key.offset);
    return ACL_SUCCESS;
}

EMU_API aclError aclrtIpcMemClose(const char* text) {
    EMU_ENTER();
    std::lock_guard<std::mutex> guard(table().mutex);
    auto import = table().imports.find(text ? text : "");
    if (import != table().imports.end()) {
        remove_region(*import->second.region);
        --import->second.control->imports;
        munmap(import->second.control, page);
        table().imports.erase(import);
        return ACL_SUCCESS;
    }
    auto exported = table().exports.find(text ? text : "");
    if (exported == table().exports.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemClose: unknown key");
    if (exported->second.control->imports > 0)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemClose: %d importers must close first",
                      exported->second.control->imports.load());
    munmap(exported->second.control, page);
    table().exports.erase(exported);
    return ACL_SUCCESS;
}
