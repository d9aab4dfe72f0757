// Calls that may succeed without doing anything, each with its reason. What is neither here nor emulated elsewhere gets
// a generated function that names itself on stderr and fails (build.py).
#include "emulator.h"

#include <cstdarg>
#include <cstdio>
#include <thread>

using namespace emu;

// Start and end of the library: the state is made on first use, and the process ends soon after the last call.
EMU_API aclError aclInit(const char*) { EMU_ENTER(); return ACL_SUCCESS; }
EMU_API aclError aclFinalize() { return ACL_SUCCESS; }

EMU_API const char* aclGetRecentErrMsg() {
    static thread_local std::string line;
    line = recent_complaint();
    return line.c_str();
}

// Which CANN this claims to be: torch_npu asks before it uses what newer versions have (host memory with one address for
// both sides needs CANN 8.5.0 and driver 26.0.rc1).
EMU_API aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
    if (!version) return ACL_ERROR_RT_PARAM_INVALID;
    auto& text = name == ACL_PKG_NAME_DRIVER ? settings().driver : settings().cann;
    *version = {};
    snprintf(version->version, sizeof version->version, "%s", text.c_str());
    return ACL_SUCCESS;
}

// torch_npu's own log.
EMU_API void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t, const char* format, ...) {
    if (!settings().logs) return;
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "[torch_npu %d] %s: %s\n", static_cast<int>(level), function, line);
}

// Arithmetic modes: CPU kernels have the one mode torch_npu asks for on this SoC (infinities and NaNs kept). Nothing
// emulated reads the options, but what was set can be read back.
static int64_t options[64];
EMU_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    return mode == ACL_RT_OVERFLOW_MODE_INFNAN ? ACL_SUCCESS
                                               : refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "only the INFNAN mode is emulated");
}
EMU_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { options[option & 63] = value; return ACL_SUCCESS; }
EMU_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
EMU_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) { *value = options[option & 63]; return ACL_SUCCESS; }

// Time limits and compile options of kernels: an emulated kernel is a CPU function that ends.
EMU_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
EMU_API int aclSetCompileopt(int, const char*) { return ACL_SUCCESS; }

// The profiler registers itself at load and asks for the time; nothing is ever profiled.
EMU_API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
EMU_API uint64_t MsprofSysCycleTime() { return 0; }
EMU_API uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
EMU_API int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
EMU_API int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
EMU_API int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }

// Operators of the older kind, which torch_npu falls back to where an aclnn operator is missing.
EMU_API aclError aclopCompileAndExecute(const char* name, int, void*, void*, int, void*, void*, void*, int, int, const char*,
                                        aclrtStream) {
    return refuse(ACL_ERROR_OP_NOT_FOUND, "operator %s is not emulated (tests/emulator/operators has the aclnn ones)", name);
}
