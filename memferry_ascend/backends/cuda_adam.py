"""AdamW and Adam on a CUDA device in one kernel a segment, and the norm of a gradient in two.

The arithmetic is ops/kernels.h's, operation by operation, without fused multiply-adds and with correctly rounded
division and square root, so the bits are the host's. Each byte of a segment is read and written once.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch

from memferry_ascend.backends.cuda_kernels import compile_kernels

if TYPE_CHECKING:
    from memferry_ascend.backends.fused import AdamArrays
    from memferry_ascend.hostmath import AdamHyper

_THREADS, _EACH = 256, 4
_CHUNK = 1 << 14
"""Elements whose squares one block sums."""

SOURCE = (
    f"""
#define THREADS {_THREADS}
#define EACH {_EACH}
#define CHUNK {_CHUNK}
"""
    + """
struct Adam {
    const void* grad; void* param; short* lo; float* exp_avg; float* exp_avg_sq; long long n;
    float grad_scale, decay, l2, lerp, beta2, one_minus_beta2, bias2_sqrt, eps, neg_step;
    int use_l2, lerp_from_end;
};
struct Squares { const void* grad; double* partial; long long n; };
struct Norm { const double* partial; float* out; long long n; };

__device__ float to_float(unsigned short bf16) { return __uint_as_float((unsigned)bf16 << 16); }
__device__ float to_float(float x) { return x; }

template <class Grad, bool Split>
__device__ void adam(const Adam& k) {
    const Grad* __restrict__ grad = (const Grad*)k.grad;
    unsigned short* __restrict__ hi = (unsigned short*)k.param;
    float* __restrict__ param = (float*)k.param;
    short* __restrict__ lo = k.lo;
    float* __restrict__ exp_avg = k.exp_avg;
    float* __restrict__ exp_avg_sq = k.exp_avg_sq;
    const long long first = (long long)blockIdx.x * (THREADS * EACH) + threadIdx.x;
    float p[EACH], g[EACH], m[EACH], v[EACH];
    // All loads before the first store, so that they overlap.
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const long long i = first + j * THREADS;
        if (i >= k.n) break;
        p[j] = Split ? __uint_as_float(((unsigned)hi[i] << 16) + (unsigned)(int)lo[i]) : param[i];
        g[j] = to_float(grad[i]);
        m[j] = exp_avg[i];
        v[j] = exp_avg_sq[i];
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const long long i = first + j * THREADS;
        if (i >= k.n) break;
        float x = p[j];
        float d = g[j] * k.grad_scale;
        d = k.use_l2 ? d + k.l2 * x : d;
        x *= k.decay;
        const float a = (k.lerp_from_end ? d : m[j]) + k.lerp * (d - m[j]);
        const float b = v[j] * k.beta2 + k.one_minus_beta2 * d * d;
        exp_avg[i] = a;
        exp_avg_sq[i] = b;
        const float denom = sqrtf(b) / k.bias2_sqrt + k.eps;
        x += k.neg_step * a / denom;
        if (Split) {
            unsigned bits = __float_as_uint(x);
            if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
            hi[i] = (unsigned short)((bits + 0x8000u) >> 16);
            lo[i] = (short)(unsigned short)bits;
        } else {
            param[i] = x;
        }
    }
}

extern "C" __global__ void adam_fp32_fp32(Adam k) { adam<float, false>(k); }
extern "C" __global__ void adam_bf16_fp32(Adam k) { adam<unsigned short, false>(k); }
extern "C" __global__ void adam_fp32_split(Adam k) { adam<float, true>(k); }
extern "C" __global__ void adam_bf16_split(Adam k) { adam<unsigned short, true>(k); }

// Sums in an order that the values alone fix.
__device__ double total(double sum) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];
}

template <class Grad>
__device__ void squares(const Squares& k) {
    const Grad* __restrict__ grad = (const Grad*)k.grad;
    const long long first = (long long)blockIdx.x * CHUNK;
    const long long end = first + CHUNK < k.n ? first + CHUNK : k.n;
    double sum = 0.0;
    for (long long i = first + threadIdx.x; i < end; i += THREADS) {
        const double x = to_float(grad[i]);
        sum += x * x;
    }
    sum = total(sum);
    if (threadIdx.x == 0) k.partial[blockIdx.x] = sum;
}

extern "C" __global__ void squares_fp32(Squares k) { squares<float>(k); }
extern "C" __global__ void squares_bf16(Squares k) { squares<unsigned short>(k); }

extern "C" __global__ void norm(Norm k) {
    double sum = 0.0;
    for (long long i = threadIdx.x; i < k.n; i += THREADS) sum += k.partial[i];
    sum = total(sum);
    if (threadIdx.x == 0) *k.out = (float)sqrt(sum);
}
"""
)
_NAMES = (
    "adam_fp32_fp32", "adam_bf16_fp32", "adam_fp32_split", "adam_bf16_split", "squares_fp32", "squares_bf16", "norm",
)  # fmt: skip


class _Adam(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "param", "lo", "exp_avg", "exp_avg_sq")),
        ("n", ctypes.c_longlong),
        *(
            (name, ctypes.c_float)
            for name in (
                "grad_scale", "decay", "l2", "lerp", "beta2", "one_minus_beta2", "bias2_sqrt", "eps", "neg_step",
            )
        ),
        ("use_l2", ctypes.c_int),
        ("lerp_from_end", ctypes.c_int),
    )  # fmt: skip


class _Squares(ctypes.Structure):
    _fields_ = (("grad", ctypes.c_void_p), ("partial", ctypes.c_void_p), ("n", ctypes.c_longlong))


class _Norm(ctypes.Structure):
    _fields_ = (("partial", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_longlong))


class CudaAdam:
    """The kernels of one device. Raises FerryError where they cannot be compiled."""

    def __init__(self, device: torch.device) -> None:
        self._kernels = compile_kernels(SOURCE, _NAMES, device, _THREADS)

    def update(self, arrays: AdamArrays, hyper: AdamHyper) -> None:
        """As `FusedAdam.update`."""
        if arrays.numel:
            self._kernels[kernel_of(arrays)](-(-arrays.numel // (_THREADS * _EACH)), argument(arrays, hyper))

    def norm_into(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """As `FusedAdam.norm_into`."""
        n = grad.numel()
        chunks = -(-n // _CHUNK)
        partial = torch.empty(max(1, chunks), dtype=torch.float64, device=grad.device)
        if chunks:
            self._kernels[f"squares_{_name(grad)}"](chunks, _Squares(grad.data_ptr(), partial.data_ptr(), n))
        self._kernels["norm"](1, _Norm(partial.data_ptr(), out.data_ptr(), chunks))


def kernel_of(arrays: AdamArrays) -> str:
    """The update kernel for these dtypes."""
    return f"adam_{_name(arrays.grad)}_{'fp32' if arrays.lo is None else 'split'}"


def argument(arrays: AdamArrays, h: AdamHyper) -> ctypes.Structure:
    """An update kernel's argument: addresses, and what the hyperparameters come to, each rounded to fp32 once."""
    weight = ctypes.c_float(1 - h.beta1).value
    from_end = weight >= 0.5  # torch.lerp's two forms
    return _Adam(
        grad=arrays.grad.data_ptr(),
        param=arrays.param.data_ptr(),
        lo=None if arrays.lo is None else arrays.lo.data_ptr(),
        exp_avg=arrays.exp_avg.data_ptr(),
        exp_avg_sq=arrays.exp_avg_sq.data_ptr(),
        n=arrays.numel,
        grad_scale=-h.grad_scale if h.maximize else h.grad_scale,
        decay=1 - h.lr * h.weight_decay if h.decoupled else 1.0,
        l2=h.weight_decay,
        lerp=weight - 1 if from_end else weight,
        beta2=h.beta2,
        one_minus_beta2=1 - h.beta2,
        bias2_sqrt=math.sqrt(1 - h.beta2**h.step),
        eps=h.eps,
        neg_step=-(h.lr / (1 - h.beta1**h.step)),
        use_l2=not h.decoupled and h.weight_decay != 0,
        lerp_from_end=from_end,
    )


def _name(grad: torch.Tensor) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[grad.dtype]
