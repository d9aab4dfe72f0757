// Operators over lists of tensors, as torch's foreach optimizers call them: element by element, as on the CPU.
#include "aclnn.h"

using namespace emu;

using List = std::vector<at::Tensor>;

template <typename Function>
static void each(const List& outs, Function result) {
    for (size_t i = 0; i < outs.size(); ++i) put(outs[i], result(i));
}
static at::Scalar number(const at::Tensor& tensor) { return tensor.item(); }

#define FOREACH(Name, function) \
    OPERATOR(aclnnForeach##Name, (Tensors) a, (Outs) outs) { each(outs, [&](size_t i) { return at::function(a[i]); }); }
FOREACH(Abs, abs)
FOREACH(Exp, exp)
FOREACH(Log, log)
FOREACH(Neg, neg)
FOREACH(Reciprocal, reciprocal)
FOREACH(Sigmoid, sigmoid)
FOREACH(Sign, sign)
FOREACH(Sqrt, sqrt)
FOREACH(Tanh, tanh)

// With one number for all tensors (in device memory, or as a scalar), with a number each, and with a tensor each.
#define FOREACH_NUMBER(Name, function)                                                                 \
    OPERATOR(aclnnForeach##Name##Scalar, (Tensors) a, (Tensor) value, (Outs) outs) {                   \
        each(outs, [&](size_t i) { return at::function(a[i], number(value)); });                       \
    }                                                                                                  \
    OPERATOR(aclnnForeach##Name##ScalarV2, (Tensors) a, (Scalar) value, (Outs) outs) {                 \
        each(outs, [&](size_t i) { return at::function(a[i], value); });                               \
    }                                                                                                  \
    OPERATOR(aclnnForeach##Name##ScalarList, (Tensors) a, (Scalars) values, (Outs) outs) {             \
        each(outs, [&](size_t i) { return at::function(a[i], values[i]); });                           \
    }
FOREACH_NUMBER(Add, add)
FOREACH_NUMBER(Sub, sub)
FOREACH_NUMBER(Mul, mul)
FOREACH_NUMBER(Div, div)
FOREACH_NUMBER(Pow, pow)
FOREACH_NUMBER(Maximum, clamp_min)
FOREACH_NUMBER(Minimum, clamp_max)

#define FOREACH_LIST(Name, function)                                                                             \
    OPERATOR(aclnnForeach##Name##List, (Tensors) a, (Tensors) b, (Outs) outs) {                                  \
        each(outs, [&](size_t i) { return at::function(a[i], b[i]); });                                          \
    }
FOREACH_LIST(Mul, mul)
FOREACH_LIST(Div, div)
FOREACH_LIST(Pow, pow)
FOREACH_LIST(Maximum, maximum)
FOREACH_LIST(Minimum, minimum)

#define FOREACH_SCALED_LIST(Name, function)                                                                      \
    OPERATOR(aclnnForeach##Name##List, (Tensors) a, (Tensors) b, (Tensor) alpha, (Outs) outs) {                  \
        each(outs, [&](size_t i) { return at::function(a[i], b[i], number(alpha)); });                           \
    }                                                                                                            \
    OPERATOR(aclnnForeach##Name##ListV2, (Tensors) a, (Tensors) b, (Scalar) alpha, (Outs) outs) {                \
        each(outs, [&](size_t i) { return at::function(a[i], b[i], alpha); });                                   \
    }
FOREACH_SCALED_LIST(Add, add)
FOREACH_SCALED_LIST(Sub, sub)

#define FOREACH_TERNARY(Name, function)                                                                          \
    OPERATOR(aclnnForeach##Name##Scalar, (Tensors) a, (Tensors) b, (Tensors) c, (Tensor) value, (Outs) outs) {   \
        each(outs, [&](size_t i) { return at::function(a[i], b[i], c[i], number(value)); });                     \
    }                                                                                                            \
    OPERATOR(aclnnForeach##Name##ScalarV2, (Tensors) a, (Tensors) b, (Tensors) c, (Scalar) value, (Outs) outs) { \
        each(outs, [&](size_t i) { return at::function(a[i], b[i], c[i], value); });                             \
    }                                                                                                            \
    OPERATOR(aclnnForeach##Name##ScalarList, (Tensors) a, (Tensors) b, (Tensors) c, (Scalars) values, (Outs) outs) { \
        each(outs, [&](size_t i) { return at::function(a[i], b[i], c[i], values[i]); });                         \
    }                                                                                                            \
    OPERATOR(aclnnForeach##Name##List, (Tensors) a, (Tensors) b, (Tensors) c, (Tensor) values, (Outs) outs) {    \
        each(outs, [&](size_t i) { return at::function(a[i], b[i], c[i], values[i].item()); });                  \
    }
FOREACH_TERNARY(Addcmul, addcmul)
FOREACH_TERNARY(Addcdiv, addcdiv)

OPERATOR(aclnnForeachLerpScalar, (Tensors) a, (Tensors) b, (Scalar) weight, (Outs) outs) {
    each(outs, [&](size_t i) { return at::lerp(a[i], b[i], weight); });
}
OPERATOR(aclnnForeachLerpList, (Tensors) a, (Tensors) b, (Tensors) weights, (Outs) outs) {
    each(outs, [&](size_t i) { return at::lerp(a[i], b[i], weights[i]); });
}
OPERATOR(aclnnForeachNorm, (Tensors) a, (Scalar) order, (Outs) outs) {
    each(outs, [&](size_t i) { return at::linalg_vector_norm(a[i], order); });
}
OPERATOR(aclnnForeachCopy, (Tensors) a, (Outs) outs) {
    each(outs, [&](size_t i) { return a[i]; });
}
OPERATOR(aclnnForeachZeroInplace, (Outs) outs) {
    for (auto& out : outs) out.zero_();
}
