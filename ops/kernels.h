// The loops, written once in portable C++ and compiled for every instruction set below.
//
// Equal bits everywhere: each output element is the same sequence of IEEE operations whether it falls in a vector body,
// in a tail, or on another instruction set. That rests on -ffp-contract=off (no fused multiply-add where the processor
// has one) and on never using -ffast-math.
//
// One inlined body per loop, wrapped once per instruction set and picked at run time, rather than target_clones: that
// attribute needs ifunc support in the loader, cannot name a combination such as avx512f + avx512bw, and leaves no way to
// compare one level with another on one machine.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __FAST_MATH__
#error "the host update promises equal bits in vector bodies and tails: compile without -ffast-math"
#endif

#define MF_INLINE static inline __attribute__((always_inline))

namespace memferry {

MF_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}
MF_INLINE float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}
MF_INLINE float to_float(uint16_t bf16) { return float_of(static_cast<uint32_t>(bf16) << 16); }
MF_INLINE float to_float(float x) { return x; }

// The remainder arithmetic. Every pattern but a NaN's comes back exactly: a finite value within half a bf16 step of
// 2^128 has the bf16 infinity as its upper half and a negative remainder. A NaN becomes 0x7fc00000 first, because adding
// 0x8000 to an arbitrary one may carry into the sign.
MF_INLINE uint32_t canonical(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits; }
MF_INLINE uint16_t upper(uint32_t bits) { return static_cast<uint16_t>((bits + 0x8000u) >> 16); }
MF_INLINE int16_t remainder(uint32_t bits) { return static_cast<int16_t>(static_cast<uint16_t>(bits)); }
MF_INLINE float joined(uint16_t hi, int16_t lo) {
    return float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo)));
}

// What a segment's hyperparameters come to, each rounded to float once, where torch rounds its Python scalars.
struct AdamScalars {
    float grad_scale;  // negative when maximizing
    float decay;       // 1 - lr * weight_decay, or 1
    float l2;          // weight_decay of plain Adam, added to the gradient
    bool use_l2;
    float lerp;  // 1 - beta1 below a half, otherwise -beta1 (torch.lerp's two forms)
    bool lerp_from_end;
    float beta2, one_minus_beta2;
    float bias2_sqrt, eps;
    float neg_step;  // -lr / bias correction 1
};

struct AdamRange {
    const void* grad;
    void* param;
    int16_t* lo;
    float* exp_avg;
    float* exp_avg_sq;
    int64_t n;
};

// torch.optim.AdamW's single-tensor operations, in their order: mul, lerp, mul + addcmul, sqrt, div, add, addcdiv.
template <class Grad, bool Split>
MF_INLINE void adam_body(const AdamRange& r, const AdamScalars& k) {
    const Grad* __restrict grad = static_cast<const Grad*>(r.grad);
    uint16_t* __restrict hi = static_cast<uint16_t*>(r.param);
    float* __restrict param = static_cast<float*>(r.param);
    int16_t* __restrict lo = r.lo;
    float* __restrict exp_avg = r.exp_avg;
    float* __restrict exp_avg_sq = r.exp_avg_sq;
    const float grad_scale = k.grad_scale, decay = k.decay, l2 = k.l2, lerp = k.lerp;
    const float beta2 = k.beta2, one_minus_beta2 = k.one_minus_beta2;
    const float bias2_sqrt = k.bias2_sqrt, eps = k.eps, neg_step = k.neg_step;
    const bool use_l2 = k.use_l2, lerp_from_end = k.lerp_from_end;
    const int64_t n = r.n;
    // GCC forgets __restrict where an inlined body meets one pointer under two types; distinct arrays all the same.
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        float p = Split ? joined(hi[i], lo[i]) : param[i];
        float g = to_float(grad[i]) * grad_scale;
        g = use_l2 ? g + l2 * p : g;
        p *= decay;
        float m = exp_avg[i];
        m = (lerp_from_end ? g : m) + lerp * (g - m);
        const float v = exp_avg_sq[i] * beta2 + one_minus_beta2 * g * g;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        const float denom = __builtin_sqrtf(v) / bias2_sqrt + eps;
        p += neg_step * m / denom;
        if (Split) {
            const uint32_t bits = canonical(bits_of(p));
            hi[i] = upper(bits);
            lo[i] = remainder(bits);
        } else {
            param[i] = p;
        }
    }
}

MF_INLINE void split_body(const float* __restrict master, uint16_t* __restrict hi, int16_t* __restrict lo, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = canonical(bits_of(master[i]));
        hi[i] = upper(bits);
        lo[i] = remainder(bits);
    }
}

MF_INLINE void join_body(const uint16_t* __restrict hi, const int16_t* __restrict lo, float* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = joined(hi[i], lo[i]);
}

template <class Grad>
MF_INLINE void accumulate_body(float* __restrict acc, const Grad* __restrict grad, int64_t n, bool first, float scale) {
    if (first) {
        for (int64_t i = 0; i < n; ++i) acc[i] = to_float(grad[i]) * scale;
    } else {
        for (int64_t i = 0; i < n; ++i) acc[i] += to_float(grad[i]) * scale;
    }
}

// Sixteen running sums in double, element i in sum i % 16: an order that no vector width changes. A float squared is
// exact in double.
template <class Grad>
MF_INLINE double sum_squares_body(const Grad* __restrict grad, int64_t n) {
    constexpr int LANES = 16;
    double sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            const double x = to_float(grad[i + j]);
            sums[j] += x * x;
        }
    }
    for (int j = 0; i + j < n; ++j) {
        const double x = to_float(grad[i + j]);
        sums[j] += x * x;
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    }
    return sums[0];
}

}  // namespace memferry
