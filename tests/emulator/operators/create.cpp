// Making, filling, converting and copying tensors, and random numbers.
#include "aclnn.h"

#include <ATen/CPUGeneratorImpl.h>

using namespace emu;

OPERATOR(aclnnInplaceCopy, (Out) self, (Tensor) source) { self.copy_(source); }
OPERATOR(aclnnCast, (Tensor) self, (DType) type, (Out) out) { put(out, self.to(type)); }
OPERATOR(aclnnInplaceZero, (Out) self) { self.zero_(); }
OPERATOR(aclnnInplaceOne, (Out) self) { self.fill_(1); }
OPERATOR(aclnnInplaceFillScalar, (Out) self, (Scalar) value) { self.fill_(value); }
OPERATOR(aclnnInplaceFillTensor, (Out) self, (Tensor) value) { self.fill_(value.reshape({})); }
OPERATOR(aclnnArange, (Scalar) start, (Scalar) end, (Scalar) step, (Out) out) {
    put(out, at::arange(start, end, step, out.options()));
}
OPERATOR(aclnnRange, (Scalar) start, (Scalar) end, (Scalar) step, (Out) out) {
    put(out, at::range(start, end, step, out.options()));
}
OPERATOR(aclnnLinspace, (Scalar) start, (Scalar) end, (int64_t) steps, (Out) out) {
    put(out, at::linspace(start, end, steps, out.options()));
}
OPERATOR(aclnnEye, (int64_t) n, (int64_t) m, (Out) out) { put(out, at::eye(n, m, out.options())); }
OPERATOR(aclnnTril, (Tensor) self, (int64_t) diagonal, (Out) out) { put(out, at::tril(self, diagonal)); }
OPERATOR(aclnnTriu, (Tensor) self, (int64_t) diagonal, (Out) out) { put(out, at::triu(self, diagonal)); }
OPERATOR(aclnnInplaceTril, (Out) self, (int64_t) diagonal) { self.tril_(diagonal); }
OPERATOR(aclnnInplaceTriu, (Out) self, (int64_t) diagonal) { self.triu_(diagonal); }

// Random numbers depend on torch_npu's seed and offset alone: the same program draws the same numbers again, though not
// those that the CPU or a real NPU would draw.
static at::Generator generator(int64_t seed, int64_t offset) {
    return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15u + offset);
}

OPERATOR(aclnnInplaceUniform, (Out) self, (double) from, (double) to, (uint64_t) seed, (uint64_t) offset) {
    self.uniform_(from, to, generator(seed, offset));
}
OPERATOR(aclnnInplaceNormal, (Out) self, (float) mean, (float) deviation, (int64_t) seed, (int64_t) offset) {
    self.normal_(mean, deviation, generator(seed, offset));
}
OPERATOR(aclnnNormalFloatFloat, (float) mean, (float) deviation, (int64_t) seed, (int64_t) offset, (Out) out) {
    out.normal_(mean, deviation, generator(seed, offset));
}
OPERATOR(aclnnInplaceRandom, (Out) self, (int64_t) from, (int64_t) to, (int64_t) seed, (int64_t) offset) {
    self.random_(from, to, generator(seed, offset));
}
OPERATOR(aclnnInplaceBernoulli, (Out) self, (Scalar) probability, (int64_t) seed, (int64_t) offset) {
    self.bernoulli_(probability.to<double>(), generator(seed, offset));
}
OPERATOR(aclnnRandperm, (int64_t) count, (int64_t) seed, (int64_t) offset, (Out) out) {
    put(out, at::randperm(count, generator(seed, offset), out.options()));
}

OPERATOR(aclnnMultinomial, (Tensor) self, (int64_t) count, (bool) replacement, (int64_t) seed, (int64_t) offset, (Out) out) {
    put(out, at::multinomial(self, count, replacement, generator(seed, offset)));
}

// A dropout mask holds one bit per element, the lowest first; 1 keeps the element.
static at::Tensor keep_bits(int64_t count, double drop, int64_t seed, int64_t offset) {
    return at::empty({count}, at::kBool).bernoulli_(1.0 - drop, generator(seed, offset));
}

static void pack(const at::Tensor& mask, const at::Tensor& keep) {
    mask.zero_();
    auto* bytes = mask.data_ptr<uint8_t>();
    auto* bits = keep.data_ptr<bool>();
    TORCH_CHECK(mask.is_contiguous() && mask.numel() * 8 >= keep.numel(), "dropout mask of ", mask.numel(), " bytes");
    for (int64_t i = 0; i < keep.numel(); ++i) bytes[i / 8] |= bits[i] << (i % 8);
}

static at::Tensor unpack(const at::Tensor& mask, int64_t count) {
    auto keep = at::empty({count}, at::kBool);
    auto* bytes = mask.data_ptr<uint8_t>();
    auto* bits = keep.data_ptr<bool>();
    for (int64_t i = 0; i < count; ++i) bits[i] = bytes[i / 8] >> (i % 8) & 1;
    return keep;
}

static int64_t product(const std::optional<std::vector<int64_t>>& sizes) {
    int64_t count = 1;
    for (auto size : sizes.value()) count *= size;
    return count;
}

static at::Tensor drop(const at::Tensor& self, const at::Tensor& keep, double probability) {
    auto scale = probability == 1.0 ? 0.0 : 1.0 / (1.0 - probability);
    return at::mul(self, keep.view(self.sizes())).mul(scale);
}

OPERATOR(aclnnDropoutGenMask, (Ints) shape, (double) probability, (int64_t) seed, (int64_t) offset, (Out) mask) {
    pack(mask, keep_bits(product(shape), probability, seed, offset));
}
OPERATOR(aclnnDropoutGenMaskV2, (Ints) shape, (double) probability, (int64_t) seed, (int64_t) offset, (DType) type,
         (Out) mask) {
    pack(mask, keep_bits(product(shape), probability, seed, offset));
}
OPERATOR(aclnnDropoutDoMask, (Tensor) self, (Tensor) mask, (double) probability, (Out) out) {
    put(out, drop(self, unpack(mask, self.numel()), probability));
}
OPERATOR(aclnnDropoutV3, (Tensor) self, (Tensor) noise_shape, (double) probability, (int64_t) seed, (int64_t) offset,
         (Out) out, (Out) mask) {
    auto keep = keep_bits(self.numel(), probability, seed, offset);
    pack(mask, keep);
    put(out, drop(self, keep, probability));
}
