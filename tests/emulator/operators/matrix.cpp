// Matrix products and convolutions. The cube unit's arithmetic mode is ignored: CPU kernels have one.
#include "aclnn.h"

using namespace emu;

OPERATOR(aclnnMatmul, (Tensor) self, (Tensor) other, (Out) out, (int8_t) mode) { put(out, at::matmul(self, other)); }
OPERATOR(aclnnMm, (Tensor) self, (Tensor) other, (Out) out, (int8_t) mode) { put(out, at::mm(self, other)); }
OPERATOR(aclnnBatchMatMul, (Tensor) self, (Tensor) other, (Out) out, (int8_t) mode) { put(out, at::bmm(self, other)); }
OPERATOR(aclnnMv, (Tensor) self, (Tensor) vector, (Out) out, (int8_t) mode) { put(out, at::mv(self, vector)); }
OPERATOR(aclnnDot, (Tensor) self, (Tensor) other, (Out) out) { put(out, at::dot(self, other)); }
OPERATOR(aclnnAddmm, (Tensor) self, (Tensor) a, (Tensor) b, (Scalar) beta, (Scalar) alpha, (Out) out, (int8_t) mode) {
    put(out, at::addmm(self, a, b, beta, alpha));
}
OPERATOR(aclnnInplaceAddmm, (Out) self, (Tensor) a, (Tensor) b, (Scalar) beta, (Scalar) alpha, (int8_t) mode) {
    self.addmm_(a, b, beta, alpha);
}
OPERATOR(aclnnAddbmm, (Tensor) self, (Tensor) a, (Tensor) b, (Scalar) beta, (Scalar) alpha, (Out) out, (int8_t) mode) {
    put(out, at::addbmm(self, a, b, beta, alpha));
}
OPERATOR(aclnnBaddbmm, (Tensor) self, (Tensor) a, (Tensor) b, (Scalar) beta, (Scalar) alpha, (Out) out, (int8_t) mode) {
    put(out, at::baddbmm(self, a, b, beta, alpha));
}
OPERATOR(aclnnAddmv, (Tensor) self, (Tensor) matrix, (Tensor) vector, (Scalar) alpha, (Scalar) beta, (Out) out, (int8_t) mode) {
    put(out, at::addmv(self, matrix, vector, beta, alpha));
}

OPERATOR(aclnnConvolution, (Tensor) input, (Tensor) weight, (Tensor) bias, (Ints) stride, (Ints) padding, (Ints) dilation,
         (bool) transposed, (Ints) output_padding, (int64_t) groups, (Out) out, (int8_t) mode) {
    put(out, at::convolution(input, weight, bias, *stride, *padding, *dilation, transposed, *output_padding, groups));
}
OPERATOR(aclnnConvolutionBackward, (Tensor) grad, (Tensor) input, (Tensor) weight, (Ints) bias_sizes, (Ints) stride,
         (Ints) padding, (Ints) dilation, (bool) transposed, (Ints) output_padding, (int64_t) groups, (Bools) wanted,
         (int8_t) mode, (Out) grad_input, (Out) grad_weight, (Out) grad_bias) {
    auto sizes = bias_sizes ? at::OptionalIntArrayRef(*bias_sizes) : std::nullopt;
    auto [for_input, for_weight, for_bias] =
        at::convolution_backward(grad, input, weight, sizes, *stride, *padding, *dilation, transposed, *output_padding, groups,
                                 {wanted[0], wanted[1], wanted[2]});
    if (wanted[0]) put(grad_input, for_input);
    if (wanted[1]) put(grad_weight, for_weight);
    if (wanted[2]) put(grad_bias, for_bias);
}
