// Reductions, sorting and running sums.
#include "aclnn.h"

using namespace emu;

using Dims = std::optional<std::vector<int64_t>>;
static at::OptionalIntArrayRef some(const Dims& dims) { return dims ? at::OptionalIntArrayRef(*dims) : std::nullopt; }
static at::IntArrayRef every(const Dims& dims) { return dims ? at::IntArrayRef(*dims) : at::IntArrayRef(); }

OPERATOR(aclnnReduceSum, (Tensor) self, (Ints) dims, (bool) keep, (DType) type, (Out) out) {
    put(out, at::sum(self, some(dims), keep, type));
}
OPERATOR(aclnnMean, (Tensor) self, (Ints) dims, (bool) keep, (DType) type, (Out) out) {
    put(out, at::mean(self, some(dims), keep, type));
}
OPERATOR(aclnnProd, (Tensor) self, (DType) type, (Out) out) { put(out, at::prod(self, type)); }
OPERATOR(aclnnProdDim, (Tensor) self, (int64_t) dim, (bool) keep, (DType) type, (Out) out) {
    put(out, at::prod(self, dim, keep, type));
}
OPERATOR(aclnnLogSumExp, (Tensor) self, (Ints) dims, (bool) keep, (Out) out) { put(out, at::logsumexp(self, every(dims), keep)); }
OPERATOR(aclnnMax, (Tensor) self, (Out) out) { put(out, at::max(self)); }
OPERATOR(aclnnMin, (Tensor) self, (Out) out) { put(out, at::min(self)); }
OPERATOR(aclnnAmax, (Tensor) self, (Ints) dims, (bool) keep, (Out) out) { put(out, at::amax(self, every(dims), keep)); }
OPERATOR(aclnnAmin, (Tensor) self, (Ints) dims, (bool) keep, (Out) out) { put(out, at::amin(self, every(dims), keep)); }
OPERATOR(aclnnMaxDim, (Tensor) self, (int64_t) dim, (bool) keep, (Out) values, (Out) indices) {
    auto [found, where] = at::max(self, dim, keep);
    put(values, found), put(indices, where);
}
OPERATOR(aclnnMinDim, (Tensor) self, (int64_t) dim, (bool) keep, (Out) values, (Out) indices) {
    auto [found, where] = at::min(self, dim, keep);
    put(values, found), put(indices, where);
}
OPERATOR(aclnnArgMax, (Tensor) self, (int64_t) dim, (bool) keep, (Out) out) { put(out, at::argmax(self, dim, keep)); }
OPERATOR(aclnnArgMin, (Tensor) self, (int64_t) dim, (bool) keep, (Out) out) { put(out, at::argmin(self, dim, keep)); }
OPERATOR(aclnnAll, (Tensor) self, (Ints) dims, (bool) keep, (Out) out) { put(out, at::all(self, some(dims), keep)); }
OPERATOR(aclnnAny, (Tensor) self, (Ints) dims, (bool) keep, (Out) out) { put(out, at::any(self, some(dims), keep)); }
OPERATOR(aclnnNorm, (Tensor) self, (Scalar) p, (Ints) dims, (bool) keep, (Out) out) {
    put(out, at::norm(self, p, every(dims), keep));
}
OPERATOR(aclnnLinalgVectorNorm, (Tensor) self, (Scalar) order, (Ints) dims, (bool) keep, (DType) type, (Out) out) {
    put(out, at::linalg_vector_norm(self, order, dims && dims->empty() ? std::nullopt : some(dims), keep, type));
}
OPERATOR(aclnnStd, (Tensor) self, (Ints) dims, (int64_t) correction, (bool) keep, (Out) out) {
    put(out, at::std(self, some(dims), at::Scalar(correction), keep));
}
OPERATOR(aclnnVarCorrection, (Tensor) self, (Ints) dims, (int64_t) correction, (bool) keep, (Out) out) {
    put(out, at::var(self, some(dims), at::Scalar(correction), keep));
}
OPERATOR(aclnnVarMean, (Tensor) self, (Ints) dims, (int64_t) correction, (bool) keep, (Out) variance, (Out) mean) {
    auto [spread, centre] = at::var_mean(self, some(dims), at::Scalar(correction), keep);
    put(variance, spread), put(mean, centre);
}
OPERATOR(aclnnCumsum, (Tensor) self, (int64_t) dim, (DType) type, (Out) out) { put(out, at::cumsum(self, dim, type)); }
OPERATOR(aclnnTopk, (Tensor) self, (int64_t) k, (int64_t) dim, (bool) largest, (bool) sorted, (Out) values, (Out) indices) {
    auto [found, where] = at::topk(self, k, dim, largest, sorted);
    put(values, found), put(indices, where);
}
OPERATOR(aclnnSort, (Tensor) self, (bool) stable, (int64_t) dim, (bool) descending, (Out) values, (Out) indices) {
    auto [found, where] = at::sort(self, stable, dim, descending);
    put(values, found), put(indices, where);
}
