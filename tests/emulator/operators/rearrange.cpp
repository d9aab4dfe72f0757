// Gathering, scattering, joining and splitting.
#include "aclnn.h"

using namespace emu;

OPERATOR(aclnnCat, (Tensors) tensors, (int64_t) dim, (Out) out) { put(out, at::cat(tensors, dim)); }
OPERATOR(aclnnStack, (Tensors) tensors, (int64_t) dim, (Out) out) { put(out, at::stack(tensors, dim)); }
OPERATOR(aclnnSplitWithSize, (Tensor) self, (Ints) sizes, (int64_t) dim, (Outs) outs) {
    auto parts = at::split_with_sizes(self, *sizes, dim);
    for (size_t i = 0; i < outs.size(); ++i) put(outs[i], parts[i]);
}
OPERATOR(aclnnRepeat, (Tensor) self, (Ints) repeats, (Out) out) { put(out, self.repeat(*repeats)); }
OPERATOR(aclnnFlip, (Tensor) self, (Ints) dims, (Out) out) { put(out, at::flip(self, *dims)); }
OPERATOR(aclnnRoll, (Tensor) self, (Ints) shifts, (Ints) dims, (Out) out) { put(out, at::roll(self, *shifts, *dims)); }
OPERATOR(aclnnConstantPadNd, (Tensor) self, (Ints) pad, (Scalar) value, (Out) out) {
    put(out, at::constant_pad_nd(self, *pad, value));
}
OPERATOR(aclnnEmbedding, (Tensor) weight, (Tensor) indices, (Out) out) { put(out, at::embedding(weight, indices)); }
OPERATOR(aclnnEmbeddingDenseBackward, (Tensor) grad, (Tensor) indices, (uint64_t) rows, (uint64_t) padding, (bool) by_frequency,
         (Out) out) {
    put(out, at::embedding_dense_backward(grad, indices, rows, static_cast<int64_t>(padding), by_frequency));
}
OPERATOR(aclnnGather, (Tensor) self, (int64_t) dim, (Tensor) index, (Out) out) { put(out, at::gather(self, dim, index)); }
OPERATOR(aclnnIndexSelect, (Tensor) self, (int64_t) dim, (Tensor) index, (Out) out) {
    put(out, at::index_select(self, dim, index));
}
OPERATOR(aclnnIndexAdd, (Tensor) self, (int64_t) dim, (Tensor) index, (Tensor) source, (Scalar) alpha, (Out) out) {
    put(out, at::index_add(self, dim, index, source, alpha));
}
OPERATOR(aclnnIndexFillTensor, (Tensor) self, (int64_t) dim, (Ints) index, (Scalar) value, (Out) out) {
    put(out, at::index_fill(self, dim, at::tensor(*index), value));
}
OPERATOR(aclnnInplaceIndexFillTensor, (Out) self, (int64_t) dim, (Ints) index, (Scalar) value) {
    self.index_fill_(dim, at::tensor(*index), value);
}
OPERATOR(aclnnScatterAdd, (Tensor) self, (int64_t) dim, (Tensor) index, (Tensor) source, (Out) out) {
    put(out, at::scatter_add(self, dim, index, source));
}
OPERATOR(aclnnScatter, (Tensor) self, (int64_t) dim, (Tensor) index, (Tensor) source, (int64_t) reduction, (Out) out) {
    TORCH_CHECK(reduction == 0, "reduction ", reduction, " is not emulated");
    put(out, at::scatter(self, dim, index, source));
}
OPERATOR(aclnnScatterValue, (Tensor) self, (int64_t) dim, (Tensor) index, (Scalar) value, (int64_t) reduction, (Out) out) {
    TORCH_CHECK(reduction == 0, "reduction ", reduction, " is not emulated");
    put(out, at::scatter(self, dim, index, value));
}
OPERATOR(aclnnInplaceScatterValue, (Out) self, (int64_t) dim, (Tensor) index, (Scalar) value, (int64_t) reduction) {
    TORCH_CHECK(reduction == 0, "reduction ", reduction, " is not emulated");
    self.scatter_(dim, index, value);
}
OPERATOR(aclnnInplaceMaskedFillScalar, (Out) self, (Tensor) mask, (Scalar) value) { self.masked_fill_(mask, value); }
OPERATOR(aclnnInplaceMaskedFillTensor, (Out) self, (Tensor) mask, (Tensor) value) {
    self.masked_fill_(mask, value.reshape({}));
}

// An index that torch_npu leaves out comes as a tensor without elements.
static c10::List<std::optional<at::Tensor>> index_list(const std::vector<at::Tensor>& indices) {
    c10::List<std::optional<at::Tensor>> list;
    for (auto& index : indices) list.push_back(index.numel() ? std::optional(index) : std::nullopt);
    return list;
}
OPERATOR(aclnnIndex, (Tensor) self, (Tensors) indices, (Out) out) { put(out, at::index(self, index_list(indices))); }
OPERATOR(aclnnIndexPutImpl, (Out) self, (Tensors) indices, (Tensor) values, (bool) accumulate, (bool) unsafe) {
    self.index_put_(index_list(indices), values, accumulate);
}

OPERATOR(aclnnOneHot, (Tensor) self, (int64_t) classes, (Tensor) on, (Tensor) off, (int64_t) axis, (Out) out) {
    TORCH_CHECK(axis == -1, "one-hot along axis ", axis, " is not emulated");
    auto hot = self.unsqueeze(-1) == at::arange(classes, self.options());
    put(out, at::where(hot, on.reshape({}), off.reshape({})));
}
OPERATOR(aclnnNonzero, (Tensor) self, (Resized) out) { out.set(at::nonzero(self)); }
OPERATOR(aclnnNonzeroV2, (Tensor) self, (Resized) out) { out.set(at::nonzero(self).t()); }
OPERATOR(aclnnMaskedSelect, (Tensor) self, (Tensor) mask, (Resized) out) { out.set(at::masked_select(self, mask)); }
