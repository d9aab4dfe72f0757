// The emulated operator library (libopapi.so): each aclnn operator is a few lines that call the ATen CPU kernel torch
// itself would run, on the operands' bytes, from the stream's worker thread.
//
//   OPERATOR(aclnnMul, (Tensor) self, (Tensor) other, (Out) out) { put(out, at::mul(self, other)); }
//
// defines the two C functions that torch_npu looks up, aclnnMulGetWorkspaceSize and aclnnMul. The types in parentheses
// are the tags below; an operand that torch_npu leaves out is an undefined tensor.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <deque>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "../runtime/emulator.h"

struct aclTensor {
    std::vector<int64_t> sizes, strides;
    at::ScalarType type;
    char* address;  // of the first element, in a device's address space
};
struct aclScalar { at::Scalar value; };
struct aclIntArray { std::vector<int64_t> values; };
struct aclBoolArray { std::vector<bool> values; };
struct aclFloatArray { std::vector<float> values; };
struct aclTensorList { std::vector<aclTensor*> tensors; };
struct aclScalarList { std::vector<aclScalar*> scalars; };

namespace emu {

at::ScalarType scalar_type(aclDataType type);

// One run of an operator: it opens the operands and remembers what went wrong.
class Kernel {
  public:
    Kernel(const char* name, int device) : name(name), device(device) {}
    at::Tensor open(const aclTensor& description, bool output);

    const char* const name;
    const int device;
    bool mapped = false;             // some operand lies in mapped host memory
    std::vector<at::Tensor> outputs;
    std::deque<Access> accesses;
};

struct DeviceError : std::runtime_error {
    explicit DeviceError(aclError code) : std::runtime_error("device error " + std::to_string(code)), code(code) {}
    aclError code;
};

// ---- tags: how a C argument is held until the operator runs, and what the operator's body receives ------------------

struct Tensor;   // const at::Tensor&
struct Out;      // the same, written by the operator
struct Tensors;  // std::vector<at::Tensor>
struct Outs;
struct Scalar;   // at::Scalar
struct MaybeScalar;  // std::optional<at::Scalar>
struct Scalars;  // std::vector<at::Scalar>
struct Ints;     // std::optional<std::vector<int64_t>>, nullopt where torch_npu passes none
struct Bools;    // std::vector<bool>
struct Floats;   // std::vector<float>
struct Resized;  // ResizedOut: an output whose shape the operator finds out; torch_npu waits and asks for it
struct DType;    // at::ScalarType
struct Text;     // std::string

template <typename T>
struct Arg {  // bool, int64_t, double, ...: as they are
    using C = T;
    using Held = T;
    using Body = T;
    static Held hold(C value) { return value; }
    static Body open(Kernel&, Held& value) { return value; }
};

template <bool output>
struct TensorArg {
    using C = const aclTensor*;
    using Held = std::optional<aclTensor>;
    using Body = at::Tensor;
    static Held hold(C tensor) { return tensor ? Held(*tensor) : std::nullopt; }
    static Body open(Kernel& kernel, Held& held) { return held ? kernel.open(*held, output) : at::Tensor(); }
};
template <> struct Arg<Tensor> : TensorArg<false> {};
template <> struct Arg<Out> : TensorArg<true> {};

struct ResizedOut {
    aclTensor* handle;
    at::Tensor room;  // as large as the result can be

    void set(const at::Tensor& result) {
        room.view({-1}).narrow(0, 0, result.numel()).copy_(result.reshape({-1}));
        handle->sizes = result.sizes().vec();
    }
};
template <> struct Arg<Resized> {
    using C = aclTensor*;
    using Held = aclTensor*;
    using Body = ResizedOut;
    static Held hold(C tensor) { return tensor; }
    static Body open(Kernel& kernel, Held& held) { return {held, kernel.open(*held, true)}; }
};

template <bool output>
struct TensorListArg {
    using C = const aclTensorList*;
    using Held = std::vector<aclTensor>;
    using Body = std::vector<at::Tensor>;
    static Held hold(C list) {
        Held held;
        if (list) for (auto* tensor : list->tensors) held.push_back(*tensor);
        return held;
    }
    static Body open(Kernel& kernel, Held& held) {
        Body tensors;
        for (auto& tensor : held) tensors.push_back(kernel.open(tensor, output));
        return tensors;
    }
};
template <> struct Arg<Tensors> : TensorListArg<false> {};
template <> struct Arg<Outs> : TensorListArg<true> {};

template <> struct Arg<Scalar> {
    using C = const aclScalar*;
    using Held = at::Scalar;
    using Body = at::Scalar;
    static Held hold(C scalar) { return scalar ? scalar->value : at::Scalar(); }
    static Body open(Kernel&, Held& held) { return held; }
};

template <> struct Arg<MaybeScalar> {
    using C = const aclScalar*;
    using Held = std::optional<at::Scalar>;
    using Body = Held;
    static Held hold(C scalar) { return scalar ? Held(scalar->value) : std::nullopt; }
    static Body open(Kernel&, Held& held) { return held; }
};

template <> struct Arg<Scalars> {
    using C = const aclScalarList*;
    using Held = std::vector<at::Scalar>;
    using Body = Held;
    static Held hold(C list) {
        Held held;
        if (list) for (auto* scalar : list->scalars) held.push_back(scalar->value);
        return held;
    }
    static Body open(Kernel&, Held& held) { return held; }
};

template <> struct Arg<Ints> {
    using C = const aclIntArray*;
    using Held = std::optional<std::vector<int64_t>>;
    using Body = Held;
    static Held hold(C array) { return array ? Held(array->values) : std::nullopt; }
    static Body open(Kernel&, Held& held) { return held; }
};

template <typename Array, typename T>
struct ArrayArg {
    using C = const Array*;
    using Held = std::vector<T>;
    using Body = Held;
    static Held hold(C array) { return array ? array->values : Held(); }
    static Body open(Kernel&, Held& held) { return held; }
};
template <> struct Arg<Bools> : ArrayArg<aclBoolArray, bool> {};
template <> struct Arg<Floats> : ArrayArg<aclFloatArray, float> {};

template <> struct Arg<DType> {
    using C = aclDataType;
    using Held = at::ScalarType;
    using Body = at::ScalarType;
    static Held hold(C type) { return scalar_type(type); }
    static Body open(Kernel&, Held& held) { return held; }
};

template <> struct Arg<Text> {
    using C = const char*;
    using Held = std::string;
    using Body = std::string;
    static Held hold(C text) { return text ? text : ""; }
    static Body open(Kernel&, Held& held) { return held; }
};

// ---- running ------------------------------------------------------------------------------------------------------

}  // namespace emu

struct aclOpExecutor {
    const char* name;
    std::function<void(emu::Kernel&)> body;
    bool blocking;  // the caller reads something that the operator finds out
};

namespace emu {

int launch(aclOpExecutor* executor, aclrtStream stream);

template <typename, typename... Tags>
int prepare(const char* name, void (*body)(typename Arg<Tags>::Body...), uint64_t* workspace, aclOpExecutor** executor,
            typename Arg<Tags>::C... arguments) {
    if (aclError fault = enter((std::string(name) + "GetWorkspaceSize").c_str())) return fault;
    *workspace = 0;
    auto held = std::make_tuple(Arg<Tags>::hold(arguments)...);
    *executor = new aclOpExecutor{name, [=](Kernel& kernel) mutable {
        std::apply([&](auto&... each) { body(Arg<Tags>::open(kernel, each)...); }, held);
    }, (std::is_same_v<Tags, Resized> || ...)};
    return ACL_SUCCESS;
}

// Store a result in an operand of the same shape (or the same number of elements, for kept and dropped dimensions).
inline void put(const at::Tensor& out, const at::Tensor& result) {
    if (!out.defined()) return;
    if (out.sizes() == result.sizes()) { out.copy_(result); return; }
    TORCH_CHECK(out.numel() == result.numel(), "result of shape ", result.sizes(), " for an output of shape ", out.sizes());
    out.copy_(result.reshape(out.sizes()));
}

}  // namespace emu

#define EMU_PARENS ()
#define EMU_EXPAND(...) EMU_EXPAND3(EMU_EXPAND3(EMU_EXPAND3(__VA_ARGS__)))
#define EMU_EXPAND3(...) EMU_EXPAND2(EMU_EXPAND2(EMU_EXPAND2(__VA_ARGS__)))
#define EMU_EXPAND2(...) EMU_EXPAND1(EMU_EXPAND1(EMU_EXPAND1(EMU_EXPAND1(__VA_ARGS__))))
#define EMU_EXPAND1(...) __VA_ARGS__
#define EMU_EACH(macro, ...) __VA_OPT__(EMU_EXPAND(EMU_EACH_STEP(macro, __VA_ARGS__)))
#define EMU_EACH_STEP(macro, first, ...) macro(first) __VA_OPT__(EMU_EACH_AGAIN EMU_PARENS(macro, __VA_ARGS__))
#define EMU_EACH_AGAIN() EMU_EACH_STEP
#define EMU_PAIR(...) __VA_ARGS__,
#define EMU_CALL(macro, ...) macro(__VA_ARGS__)
#define EMU_C_(tag, name) emu::Arg<tag>::C name,
#define EMU_C(argument) EMU_CALL(EMU_C_, EMU_PAIR argument)
#define EMU_TAG_(tag, name) , tag
#define EMU_TAG(argument) EMU_CALL(EMU_TAG_, EMU_PAIR argument)
#define EMU_NAME_(tag, name) , name
#define EMU_NAME(argument) EMU_CALL(EMU_NAME_, EMU_PAIR argument)
#define EMU_PARAMETER_(tag, name) , [[maybe_unused]] emu::Arg<tag>::Body name
#define EMU_PARAMETER(argument) EMU_CALL(EMU_PARAMETER_, EMU_PAIR argument)
#define EMU_DROP(first, ...) __VA_ARGS__
#define EMU_WITHOUT_FIRST(...) EMU_DROP(__VA_ARGS__)

#define OPERATOR(name, ...)                                                                                          \
    static void name##_body(EMU_WITHOUT_FIRST(EMU_EACH(EMU_PARAMETER, __VA_ARGS__)));                                \
    EMU_API int name##GetWorkspaceSize(EMU_EACH(EMU_C, __VA_ARGS__) uint64_t* workspace, aclOpExecutor** executor) { \
        return emu::prepare<void EMU_EACH(EMU_TAG, __VA_ARGS__)>(#name, name##_body, workspace, executor             \
                                                                 EMU_EACH(EMU_NAME, __VA_ARGS__));                   \
    }                                                                                                                \
    EMU_API int name(void*, uint64_t, aclOpExecutor* executor, const aclrtStream stream) {                           \
        return emu::launch(executor, stream);                                                                        \
    }                                                                                                                \
    static void name##_body(EMU_WITHOUT_FIRST(EMU_EACH(EMU_PARAMETER, __VA_ARGS__)))
