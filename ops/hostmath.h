// Arithmetic on host memory: the optimizer's one pass over a transfer unit, and the few loops around it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memferry {

// One contiguous run of parameters with one set of hyperparameters. Written by Python as a numpy structured array of
// this layout (memferry_ascend/hostmath.py), so a call costs no conversion.
enum : uint32_t { KIND_GRAD_BF16 = 1, KIND_SPLIT = 2 };
enum : uint32_t { FLAG_ENABLED = 1, FLAG_DECOUPLED = 2, FLAG_MAXIMIZE = 4 };

struct AdamSegment {
    uint64_t grad;        // const bf16* or const float*
    uint64_t param;       // bf16* (the upper half of the master) or float*
    uint64_t lo;          // int16_t*, the master's remainder; 0 when param is float
    uint64_t exp_avg;     // float*
    uint64_t exp_avg_sq;  // float*
    int64_t numel;
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    int64_t step;    // counted from 1: this update's own number
    uint32_t kind;   // KIND_*
    uint32_t flags;  // FLAG_*

    uint64_t width() const { return kind & KIND_SPLIT ? 2 : 4; }  // bytes of an element of `param`
    AdamSegment from(int64_t n) const {                  // the elements from n on
        AdamSegment s = *this;
        s.grad += n * (kind & KIND_GRAD_BF16 ? 2 : 4);
        s.param += n * width();
        s.lo += lo ? n * 2 : 0;
        s.exp_avg += n * 4;
        s.exp_avg_sq += n * 4;
        s.numel -= n;
        return s;
    }
};
static_assert(sizeof(AdamSegment) == 112, "hostmath.py declares the same layout");

struct Squares {  // a tensor whose squares are summed
    const void* grad;
    int64_t numel;
    bool bf16;
};

void adam(const AdamSegment* segments, size_t count);
void split_master(const float* master, uint16_t* hi, int16_t* lo, int64_t n);
void join_master(const uint16_t* hi, const int16_t* lo, float* out, int64_t n);
void accumulate(float* acc, const void* grad, bool grad_bf16, int64_t n, bool first, float scale);
void sum_squares(const Squares* pieces, size_t count, double* sums);
void copy_bytes(void* dst, const void* src, int64_t n);
void zero_bytes(void* dst, int64_t n);

// The instruction sets this build has kernels for and this processor runs, best first.
const char* const* simd_levels();
const char* simd_level();
bool set_simd_level(const char* name);  // false when the level is not among simd_levels()

}  // namespace memferry
