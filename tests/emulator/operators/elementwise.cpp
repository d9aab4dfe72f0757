// Arithmetic, comparisons and functions of one element at a time.
#include "aclnn.h"

using namespace emu;

// An operator of one operand, and its form that overwrites the operand.
#define UNARY(Name, function)                                                           \
    OPERATOR(aclnn##Name, (Tensor) self, (Out) out) { put(out, at::function(self)); }   \
    OPERATOR(aclnnInplace##Name, (Out) self) { put(self, at::function(self)); }

UNARY(Abs, abs)
UNARY(BitwiseNot, bitwise_not)
UNARY(Ceil, ceil)
UNARY(Cos, cos)
UNARY(Erf, erf)
UNARY(Exp, exp)
UNARY(Expm1, expm1)
UNARY(Floor, floor)
UNARY(IsFinite, isfinite)
UNARY(IsInf, isinf)
UNARY(IsNegInf, isneginf)
UNARY(IsPosInf, isposinf)
UNARY(Log, log)
UNARY(Log1p, log1p)
UNARY(Log2, log2)
UNARY(LogicalNot, logical_not)
UNARY(Neg, neg)
UNARY(Reciprocal, reciprocal)
UNARY(Relu, relu)
UNARY(Round, round)
UNARY(Rsqrt, rsqrt)
UNARY(Sigmoid, sigmoid)
UNARY(Sign, sign)
UNARY(Silu, silu)
UNARY(Sin, sin)
UNARY(Sqrt, sqrt)
UNARY(Tanh, tanh)
UNARY(Trunc, trunc)

// An operator of two operands, and its form that overwrites the first. Where torch_npu distinguishes a second operand
// that is a number by an `s` or a `Scalar` in the name, the pair of names is given.
#define BINARY(Name, Kind, function)                                                                            \
    OPERATOR(aclnn##Name, (Tensor) self, (Kind) other, (Out) out) { put(out, at::function(self, other)); }      \
    OPERATOR(aclnnInplace##Name, (Out) self, (Kind) other) { put(self, at::function(self, other)); }
#define BINARIES(Tensors, Numbers, function) \
    BINARY(Tensors, Tensor, function)        \
    BINARY(Numbers, Scalar, function)

BINARIES(Mul, Muls, mul)
BINARIES(Div, Divs, div)
BINARIES(FloorDivide, FloorDivides, floor_divide)
BINARIES(EqTensor, EqScalar, eq)
BINARIES(NeTensor, NeScalar, ne)
BINARIES(LtTensor, LtScalar, lt)
BINARIES(LeTensor, LeScalar, le)
BINARIES(GtTensor, GtScalar, gt)
BINARIES(GeTensor, GeScalar, ge)
BINARIES(BitwiseAndTensor, BitwiseAndScalar, bitwise_and)
BINARIES(BitwiseOrTensor, BitwiseOrScalar, bitwise_or)
BINARIES(BitwiseXorTensor, BitwiseXorScalar, bitwise_xor)
BINARIES(PowTensorTensor, PowTensorScalar, pow)
BINARIES(RemainderTensorTensor, RemainderTensorScalar, remainder)
BINARIES(FmodTensor, FmodScalar, fmod)
BINARY(LogicalAnd, Tensor, logical_and)
BINARY(LogicalOr, Tensor, logical_or)
BINARY(LogicalXor, Tensor, logical_xor)
BINARY(Maximum, Tensor, maximum)
BINARY(Minimum, Tensor, minimum)
BINARY(ClampMin, Scalar, clamp_min)
BINARY(ClampMax, Scalar, clamp_max)
BINARY(ClampMinTensor, Tensor, clamp_min)
BINARY(ClampMaxTensor, Tensor, clamp_max)

OPERATOR(aclnnPowScalarTensor, (Scalar) self, (Tensor) exponent, (Out) out) { put(out, at::pow(self, exponent)); }
OPERATOR(aclnnClamp, (Tensor) self, (MaybeScalar) min, (MaybeScalar) max, (Out) out) { put(out, at::clamp(self, min, max)); }
OPERATOR(aclnnClampTensor, (Tensor) self, (Tensor) min, (Tensor) max, (Out) out) { put(out, at::clamp(self, min, max)); }

OPERATOR(aclnnAdd, (Tensor) self, (Tensor) other, (Scalar) alpha, (Out) out) { put(out, at::add(self, other, alpha)); }
OPERATOR(aclnnAdds, (Tensor) self, (Scalar) other, (Scalar) alpha, (Out) out) { put(out, at::add(self, other, alpha)); }
OPERATOR(aclnnInplaceAdd, (Out) self, (Tensor) other, (Scalar) alpha) { self.add_(other, alpha); }
OPERATOR(aclnnInplaceAdds, (Out) self, (Scalar) other, (Scalar) alpha) { self.add_(other, alpha); }
OPERATOR(aclnnSub, (Tensor) self, (Tensor) other, (Scalar) alpha, (Out) out) { put(out, at::sub(self, other, alpha)); }
OPERATOR(aclnnSubs, (Tensor) self, (Scalar) other, (Scalar) alpha, (Out) out) { put(out, at::sub(self, other, alpha)); }
OPERATOR(aclnnInplaceSub, (Out) self, (Tensor) other, (Scalar) alpha) { self.sub_(other, alpha); }
OPERATOR(aclnnInplaceSubs, (Out) self, (Scalar) other, (Scalar) alpha) { self.sub_(other, alpha); }
OPERATOR(aclnnRsub, (Tensor) self, (Tensor) other, (Scalar) alpha, (Out) out) { put(out, at::rsub(self, other, alpha)); }
OPERATOR(aclnnRsubs, (Tensor) self, (Scalar) other, (Scalar) alpha, (Out) out) { put(out, at::rsub(self, other, alpha)); }

// Rounding of a quotient: 1 towards zero, 2 down.
static at::Tensor divide(const at::Tensor& self, const at::Tensor& other, int mode) {
    TORCH_CHECK(mode >= 0 && mode <= 2, "rounding mode ", mode);
    if (mode == 0) return at::div(self, other);
    return at::div(self, other, mode == 1 ? "trunc" : "floor");
}
OPERATOR(aclnnDivMod, (Tensor) self, (Tensor) other, (int) mode, (Out) out) { put(out, divide(self, other, mode)); }
OPERATOR(aclnnInplaceDivMod, (Out) self, (Tensor) other, (int) mode) { put(self, divide(self, other, mode)); }
OPERATOR(aclnnDivMods, (Tensor) self, (Scalar) other, (int) mode, (Out) out) {
    put(out, divide(self, at::scalar_tensor(other), mode));
}
OPERATOR(aclnnInplaceDivMods, (Out) self, (Scalar) other, (int) mode) {
    put(self, divide(self, at::scalar_tensor(other), mode));
}

OPERATOR(aclnnAddcmul, (Tensor) self, (Tensor) a, (Tensor) b, (Scalar) value, (Out) out) {
    put(out, at::addcmul(self, a, b, value));
}
OPERATOR(aclnnAddcdiv, (Tensor) self, (Tensor) a, (Tensor) b, (Scalar) value, (Out) out) {
    put(out, at::addcdiv(self, a, b, value));
}
OPERATOR(aclnnInplaceAddcmul, (Out) self, (Tensor) a, (Tensor) b, (Scalar) value) { self.addcmul_(a, b, value); }
OPERATOR(aclnnInplaceAddcdiv, (Out) self, (Tensor) a, (Tensor) b, (Scalar) value) { self.addcdiv_(a, b, value); }
OPERATOR(aclnnLerp, (Tensor) self, (Tensor) end, (Tensor) weight, (Out) out) { put(out, at::lerp(self, end, weight)); }
OPERATOR(aclnnLerps, (Tensor) self, (Tensor) end, (Scalar) weight, (Out) out) { put(out, at::lerp(self, end, weight)); }
OPERATOR(aclnnInplaceLerp, (Out) self, (Tensor) end, (Tensor) weight) { self.lerp_(end, weight); }
OPERATOR(aclnnInplaceLerps, (Out) self, (Tensor) end, (Scalar) weight) { self.lerp_(end, weight); }
OPERATOR(aclnnSWhere, (Tensor) condition, (Tensor) self, (Tensor) other, (Out) out) {
    put(out, at::where(condition, self, other));
}
OPERATOR(aclnnIsClose, (Tensor) self, (Tensor) other, (double) relative, (double) absolute, (bool) equal_nan, (Out) out) {
    put(out, at::isclose(self, other, relative, absolute, equal_nan));
}
OPERATOR(aclnnEqual, (Tensor) self, (Tensor) other, (Out) out) { out.fill_(at::equal(self, other)); }

OPERATOR(aclnnThresholdBackward, (Tensor) grad, (Tensor) self, (Scalar) threshold, (Out) out) {
    put(out, at::threshold_backward(grad, self, threshold));
}
OPERATOR(aclnnTanhBackward, (Tensor) grad, (Tensor) output, (Out) out) { put(out, at::tanh_backward(grad, output)); }
OPERATOR(aclnnSigmoidBackward, (Tensor) grad, (Tensor) output, (Out) out) { put(out, at::sigmoid_backward(grad, output)); }
OPERATOR(aclnnSiluBackward, (Tensor) grad, (Tensor) self, (Out) out) { put(out, at::silu_backward(grad, self)); }

OPERATOR(aclnnLeakyRelu, (Tensor) self, (Scalar) slope, (Out) out) { put(out, at::leaky_relu(self, slope)); }
OPERATOR(aclnnSoftplus, (Tensor) self, (Scalar) beta, (Scalar) threshold, (Out) out) {
    put(out, at::softplus(self, beta, threshold));
}

static const char* approximation(int64_t number) { return number == 1 ? "tanh" : "none"; }
OPERATOR(aclnnGelu, (Tensor) self, (Out) out) { put(out, at::gelu(self)); }
OPERATOR(aclnnGeluV2, (Tensor) self, (int64_t) approximate, (Out) out) { put(out, at::gelu(self, approximation(approximate))); }
OPERATOR(aclnnGeluBackward, (Tensor) grad, (Tensor) self, (Out) out) { put(out, at::gelu_backward(grad, self)); }
OPERATOR(aclnnGeluBackwardV2, (Tensor) grad, (Tensor) self, (Text) approximate, (Out) out) {
    put(out, at::gelu_backward(grad, self, approximate));
}
