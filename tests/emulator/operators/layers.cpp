// Normalisations, softmax and losses, forward and backward.
#include "aclnn.h"

using namespace emu;

OPERATOR(aclnnSoftmax, (Tensor) self, (int64_t) dim, (Out) out) { put(out, at::softmax(self, dim)); }
OPERATOR(aclnnLogSoftmax, (Tensor) self, (int64_t) dim, (Out) out) { put(out, at::log_softmax(self, dim)); }
OPERATOR(aclnnSoftmaxBackward, (Tensor) grad, (Tensor) output, (int64_t) dim, (Out) out) {
    put(out, at::_softmax_backward_data(grad, output, dim, out.scalar_type()));
}
OPERATOR(aclnnLogSoftmaxBackward, (Tensor) grad, (Tensor) output, (int64_t) dim, (Out) out) {
    put(out, at::_log_softmax_backward_data(grad, output, dim, out.scalar_type()));
}

OPERATOR(aclnnLayerNorm, (Tensor) input, (Ints) shape, (Tensor) weight, (Tensor) bias, (double) epsilon, (Out) out, (Out) mean,
         (Out) rstd) {
    auto [normal, centre, scale] = at::native_layer_norm(input, *shape, weight, bias, epsilon);
    put(out, normal), put(mean, centre), put(rstd, scale);
}
OPERATOR(aclnnLayerNormBackward, (Tensor) grad, (Tensor) input, (Ints) shape, (Tensor) mean, (Tensor) rstd, (Tensor) weight,
         (Tensor) bias, (Bools) wanted, (Out) grad_input, (Out) grad_weight, (Out) grad_bias) {
    // The CPU keeps the statistics in the weight's type where torch_npu keeps them in float32.
    auto kept = input.scalar_type() == at::kDouble ? at::kDouble : weight.defined() ? weight.scalar_type() : at::kFloat;
    auto [for_input, for_weight, for_bias] = at::native_layer_norm_backward(
        grad, input, *shape, mean.to(kept), rstd.to(kept), weight, bias, {wanted[0], wanted[1], wanted[2]});
    if (wanted[0]) put(grad_input, for_input);
    if (wanted[1]) put(grad_weight, for_weight);
    if (wanted[2]) put(grad_bias, for_bias);
}

static at::Tensor scaled(const at::Tensor& gamma, const at::Tensor& normal) { return gamma.defined() ? gamma * normal : normal; }
OPERATOR(aclnnRmsNorm, (Tensor) self, (Tensor) gamma, (double) epsilon, (Out) out, (Out) rstd) {
    auto wide = self.to(at::kFloat);
    auto scale = at::rsqrt(wide.pow(2).mean(-1, true) + epsilon);
    put(out, scaled(gamma.to(at::kFloat), wide * scale)), put(rstd, scale);
}
OPERATOR(aclnnRmsNormGrad, (Tensor) grad, (Tensor) self, (Tensor) rstd, (Tensor) gamma, (Out) grad_input, (Out) grad_gamma) {
    auto wide = self.to(at::kFloat), normal = wide * rstd.to(at::kFloat);
    auto inner = grad.to(at::kFloat) * gamma.to(at::kFloat);
    put(grad_input, (inner - normal * (inner * normal).mean(-1, true)) * rstd.to(at::kFloat));
    put(grad_gamma, (grad.to(at::kFloat) * normal).reshape({-1, self.size(-1)}).sum(0));
}

OPERATOR(aclnnNLLLoss, (Tensor) self, (Tensor) target, (Tensor) weight, (int64_t) reduction, (int64_t) ignored, (Out) out,
         (Out) total) {
    auto [loss, sum] = at::nll_loss_forward(self, target, weight, reduction, ignored);
    put(out, loss), put(total, sum);
}
OPERATOR(aclnnNLLLossBackward, (Tensor) grad, (Tensor) self, (Tensor) target, (Tensor) weight, (int64_t) reduction,
         (int64_t) ignored, (Tensor) total, (Out) out) {
    put(out, at::nll_loss_backward(grad, self, target, weight, reduction, ignored, total.reshape({})));
}
OPERATOR(aclnnMseLoss, (Tensor) self, (Tensor) target, (int64_t) reduction, (Out) out) {
    put(out, at::mse_loss(self, target, reduction));
}
OPERATOR(aclnnMseLossBackward, (Tensor) grad, (Tensor) self, (Tensor) target, (int64_t) reduction, (Out) out) {
    put(out, at::mse_loss_backward(grad, self, target, reduction));
}

OPERATOR(aclnnSmoothL1Loss, (Tensor) self, (Tensor) target, (int64_t) reduction, (float) beta, (Out) out) {
    put(out, at::smooth_l1_loss(self, target, reduction, beta));
}
OPERATOR(aclnnL1Loss, (Tensor) self, (Tensor) target, (int64_t) reduction, (Out) out) {
    put(out, at::l1_loss(self, target, reduction));
}
OPERATOR(aclnnBinaryCrossEntropyWithLogits, (Tensor) self, (Tensor) target, (Tensor) weight, (Tensor) positive,
         (int64_t) reduction, (Out) out) {
    put(out, at::binary_cross_entropy_with_logits(self, target, weight, positive, reduction));
}
OPERATOR(aclnnApplyAdamWV2, (Out) parameter, (Out) mean, (Out) variance, (Out) largest, (Tensor) grad, (Tensor) step, (float) rate,
         (float) beta1, (float) beta2, (float) decay, (float) epsilon, (bool) amsgrad, (bool) maximize) {
    auto most = largest.defined() ? std::vector<at::Tensor>{largest} : std::vector<at::Tensor>{};
    auto steps = step.to(at::kFloat).reshape({}) + 1;  // torch_npu passes the number of steps before this one
    at::_fused_adamw_({parameter}, {grad}, {mean}, {variance}, most, {steps}, static_cast<double>(rate), beta1, beta2, decay,
                      epsilon, amsgrad, maximize);
}
