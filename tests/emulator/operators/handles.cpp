// The handles that describe operands, and the launch of an operator on a stream.
#include "aclnn.h"

namespace emu {

at::ScalarType scalar_type(aclDataType type) {
    switch (type) {
        case ACL_FLOAT: return at::kFloat;
        case ACL_FLOAT16: return at::kHalf;
        case ACL_BF16: return at::kBFloat16;
        case ACL_DOUBLE: return at::kDouble;
        case ACL_INT8: return at::kChar;
        case ACL_INT16: return at::kShort;
        case ACL_INT32: return at::kInt;
        case ACL_INT64: return at::kLong;
        case ACL_UINT8: return at::kByte;
        case ACL_BOOL: return at::kBool;
        default: return at::ScalarType::Undefined;
    }
}

at::Tensor Kernel::open(const aclTensor& description, bool output) {
    auto options = at::TensorOptions().dtype(description.type);
    int64_t reach = 1;  // elements from the first to behind the last
    for (size_t i = 0; i < description.sizes.size(); ++i) {
        if (description.sizes[i] == 0) return at::empty_strided(description.sizes, description.strides, options);
        reach += (description.sizes[i] - 1) * description.strides[i];
    }
    accesses.emplace_back();
    auto& access = accesses.back();
    size_t bytes = reach * c10::elementSize(description.type);
    if (aclError bad = access.open(device, description.address, bytes, name)) throw DeviceError(bad);
    mapped |= access.mapped();
    auto tensor = at::from_blob(access.data(), description.sizes, description.strides, options);
    if (output) outputs.push_back(tensor);
    return tensor;
}

namespace {

aclError run(aclOpExecutor& executor, int device) {
    thread_local bool ready = false;
    if (!ready) at::init_num_threads(), ready = true;  // the thread count that torch's own threads use
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    Kernel kernel(executor.name, device);
    try {
        executor.body(kernel);
    } catch (DeviceError& error) {
        return error.code;
    } catch (std::exception& error) {
        std::string line = error.what();
        return refuse(ACL_ERROR_RT_AICORE_EXCEPTION, "%s: %s", executor.name, line.substr(0, line.find('\n')).c_str());
    }
    switch (operator_fault(executor.name, kernel.mapped)) {
        case OperatorFault::none: break;
        case OperatorFault::crash: complain("%s crashes on request", executor.name); abort();
        case OperatorFault::error: return refuse(ACL_ERROR_RT_AICORE_EXCEPTION, "%s fails on request", executor.name);
        case OperatorFault::wrong:
            for (auto& out : kernel.outputs) out.scalar_type() == at::kBool ? out.logical_not_() : out.add_(1);
    }
    for (auto& access : kernel.accesses) access.close();
    return ACL_SUCCESS;
}

}  // namespace

int launch(aclOpExecutor* executor, aclrtStream handle) {
    std::shared_ptr<aclOpExecutor> owned(executor);
    if (aclError fault = enter(executor->name)) return fault;
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    stream->push([owned, device = stream->device] { return run(*owned, device); });
    return owned->blocking ? stream->wait() : ACL_SUCCESS;
}

}  // namespace emu

EMU_API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type, const int64_t* strides,
                                   int64_t offset, aclFormat, const int64_t*, uint64_t, void* address) {
    auto scalar = emu::scalar_type(type);
    if (scalar == at::ScalarType::Undefined) {
        emu::complain("aclCreateTensor: data type %d is not emulated", static_cast<int>(type));
        return nullptr;
    }
    auto* start = static_cast<char*>(address) + offset * static_cast<int64_t>(c10::elementSize(scalar));
    return new aclTensor{{sizes, sizes + dims}, {strides, strides + dims}, scalar, start};
}

EMU_API aclScalar* aclCreateScalar(void* value, aclDataType type) {
    switch (type) {
        case ACL_FLOAT: return new aclScalar{*static_cast<float*>(value)};
        case ACL_DOUBLE: return new aclScalar{*static_cast<double*>(value)};
        case ACL_INT64: return new aclScalar{*static_cast<int64_t*>(value)};
        case ACL_INT32: return new aclScalar{*static_cast<int32_t*>(value)};
        case ACL_BOOL: return new aclScalar{*static_cast<bool*>(value)};
        case ACL_FLOAT16: return new aclScalar{static_cast<float>(*static_cast<at::Half*>(value))};
        case ACL_BF16: return new aclScalar{static_cast<float>(*static_cast<at::BFloat16*>(value))};
        default: emu::complain("aclCreateScalar: data type %d is not emulated", static_cast<int>(type)); return nullptr;
    }
}

EMU_API aclIntArray* aclCreateIntArray(const int64_t* v, uint64_t n) { return new aclIntArray{{v, v + n}}; }
EMU_API aclFloatArray* aclCreateFloatArray(const float* v, uint64_t n) { return new aclFloatArray{{v, v + n}}; }
EMU_API aclBoolArray* aclCreateBoolArray(const bool* v, uint64_t n) { return new aclBoolArray{std::vector<bool>(v, v + n)}; }
EMU_API aclTensorList* aclCreateTensorList(aclTensor* const* v, uint64_t n) { return new aclTensorList{{v, v + n}}; }
EMU_API aclScalarList* aclCreateScalarList(aclScalar* const* v, uint64_t n) { return new aclScalarList{{v, v + n}}; }

EMU_API int aclGetViewShape(const aclTensor* handle, int64_t** sizes, uint64_t* dims) {  // the caller deletes the array
    *dims = handle->sizes.size();
    *sizes = new int64_t[*dims];
    std::copy(handle->sizes.begin(), handle->sizes.end(), *sizes);
    return ACL_SUCCESS;
}

EMU_API int aclDestroyTensor(const aclTensor* handle) { delete handle; return ACL_SUCCESS; }
EMU_API int aclDestroyScalar(const aclScalar* handle) { delete handle; return ACL_SUCCESS; }
EMU_API int aclDestroyIntArray(const aclIntArray* handle) { delete handle; return ACL_SUCCESS; }
EMU_API int aclDestroyFloatArray(const aclFloatArray* handle) { delete handle; return ACL_SUCCESS; }
EMU_API int aclDestroyBoolArray(const aclBoolArray* handle) { delete handle; return ACL_SUCCESS; }
EMU_API int aclDestroyTensorList(const aclTensorList* handle) {  // a list owns its elements
    for (auto* tensor : handle->tensors) delete tensor;
    delete handle;
    return ACL_SUCCESS;
}
EMU_API int aclDestroyScalarList(const aclScalarList* handle) {
    for (auto* scalar : handle->scalars) delete scalar;
    delete handle;
    return ACL_SUCCESS;
}
