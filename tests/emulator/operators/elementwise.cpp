// Elementwise arithmetic, comparisons and functions.
#include "aclnn.h"

using namespace emu;

OPERATOR(aclnnAdd, (Tensor) self, (Tensor) other, (Scalar) alpha, (Out) out) { put(out, at::add(self, other, alpha)); }
OPERATOR(aclnnInplaceAdd, (Out) self, (Tensor) other, (Scalar) alpha) { self.add_(other, alpha); }
OPERATOR(aclnnAdds, (Tensor) self, (Scalar) other, (Scalar) alpha, (Out) out) { put(out, at::add(self, other, alpha)); }
OPERATOR(aclnnInplaceAdds, (Out) self, (Scalar) other, (Scalar) alpha) { self.add_(other, alpha); }
OPERATOR(aclnnMul, (Tensor) self, (Tensor) other, (Out) out) { put(out, at::mul(self, other)); }
OPERATOR(aclnnMuls, (Tensor) self, (Scalar) other, (Out) out) { put(out, at::mul(self, other)); }
OPERATOR(aclnnInplaceCopy, (Out) self, (Tensor) source) { self.copy_(source); }
OPERATOR(aclnnInplaceZero, (Out) self) { self.zero_(); }
OPERATOR(aclnnInplaceOne, (Out) self) { self.fill_(1); }
OPERATOR(aclnnInplaceFillScalar, (Out) self, (Scalar) value) { self.fill_(value); }
OPERATOR(aclnnMatmul, (Tensor) self, (Tensor) other, (Out) out, (int8_t) cube_math) { put(out, at::matmul(self, other)); }
OPERATOR(aclnnMm, (Tensor) self, (Tensor) other, (Out) out, (int8_t) cube_math) { put(out, at::mm(self, other)); }
