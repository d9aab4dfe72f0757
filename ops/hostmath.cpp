#include "hostmath.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace memferry {
namespace {

struct Kernels {
    const char* name;
    void (*adam[4])(const AdamRange&, const AdamScalars&);  // indexed by AdamSegment::kind
    void (*split)(const float*, uint16_t*, int16_t*, int64_t);
    void (*join)(const uint16_t*, const int16_t*, float*, int64_t);
    void (*accumulate_bf16)(float*, const uint16_t*, int64_t, bool, float);
    void (*accumulate_fp32)(float*, const float*, int64_t, bool, float);
    double (*sum_squares_bf16)(const uint16_t*, int64_t);
    double (*sum_squares_fp32)(const float*, int64_t);
};

#define MF_LEVEL(LEVEL, TARGET)                                                                                      \
    struct Level_##LEVEL {                                                                                           \
        template <class Grad, bool Split>                                                                            \
        TARGET static void adam(const AdamRange& r, const AdamScalars& k) {                                          \
            adam_body<Grad, Split>(r, k);                                                                            \
        }                                                                                                            \
        TARGET static void split(const float* master, uint16_t* hi, int16_t* lo, int64_t n) {                        \
            split_body(master, hi, lo, n);                                                                           \
        }                                                                                                            \
        TARGET static void join(const uint16_t* hi, const int16_t* lo, float* out, int64_t n) {                      \
            join_body(hi, lo, out, n);                                                                               \
        }                                                                                                            \
        template <class Grad>                                                                                        \
        TARGET static void accumulate(float* acc, const Grad* grad, int64_t n, bool first, float scale) {            \
            accumulate_body<Grad>(acc, grad, n, first, scale);                                                       \
        }                                                                                                            \
        template <class Grad>                                                                                        \
        TARGET static double sum_squares(const Grad* grad, int64_t n) {                                              \
            return sum_squares_body<Grad>(grad, n);                                                                  \
        }                                                                                                            \
    };                                                                                                               \
    const Kernels LEVEL##_kernels = {                                                                                \
        #LEVEL,                                                                                                      \
        {Level_##LEVEL::adam<float, false>, Level_##LEVEL::adam<uint16_t, false>, Level_##LEVEL::adam<float, true>,  \
         Level_##LEVEL::adam<uint16_t, true>},                                                                       \
        Level_##LEVEL::split,                                                                                        \
        Level_##LEVEL::join,                                                                                         \
        Level_##LEVEL::accumulate<uint16_t>,                                                                         \
        Level_##LEVEL::accumulate<float>,                                                                            \
        Level_##LEVEL::sum_squares<uint16_t>,                                                                        \
        Level_##LEVEL::sum_squares<float>,                                                                           \
    }

#if defined(__x86_64__)
MF_LEVEL(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))));
MF_LEVEL(avx2, __attribute__((target("avx2"))));
#endif
#if defined(__aarch64__)
MF_LEVEL(neon, );  // part of every aarch64 processor: the compiler's default
#else
MF_LEVEL(scalar, );  // whatever the compiler assumes without flags; SSE2 on x86-64
#endif

std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> levels;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        levels.push_back(&avx512_kernels);
    if (__builtin_cpu_supports("avx2")) levels.push_back(&avx2_kernels);
#endif
#if defined(__aarch64__)
    levels.push_back(&neon_kernels);
#else
    levels.push_back(&scalar_kernels);
#endif
    return levels;
}

const std::vector<const Kernels*>& levels() {
    static const std::vector<const Kernels*> all = supported();
    return all;
}

std::atomic<const Kernels*>& selected() {
    static std::atomic<const Kernels*> level{levels().front()};
    return level;
}

AdamScalars scalars(const AdamSegment& s) {
    const double step = static_cast<double>(s.step);
    const double bias1 = 1.0 - std::pow(s.beta1, step);
    const double bias2 = 1.0 - std::pow(s.beta2, step);
    const bool decoupled = s.flags & FLAG_DECOUPLED;
    const double weight = 1.0 - s.beta1;
    AdamScalars k;
    k.grad_scale = static_cast<float>(s.flags & FLAG_MAXIMIZE ? -s.grad_scale : s.grad_scale);
    k.decay = decoupled ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0f;
    k.use_l2 = !decoupled && s.weight_decay != 0.0;
    k.l2 = static_cast<float>(s.weight_decay);
    k.lerp_from_end = !(std::fabs(static_cast<float>(weight)) < 0.5f);
    k.lerp = k.lerp_from_end ? static_cast<float>(weight) - 1.0f : static_cast<float>(weight);
    k.beta2 = static_cast<float>(s.beta2);
    k.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
    k.bias2_sqrt = static_cast<float>(std::sqrt(bias2));
    k.eps = static_cast<float>(s.eps);
    k.neg_step = static_cast<float>(-(s.lr / bias1));
    return k;
}

// Elements per task: enough tasks for threads that run unevenly (copies share the memory they read), none so small that
// taking it costs more than doing it. Multiples of 64 keep two threads off one cache line of a 128-byte aligned array.
int64_t grain_for(int64_t total) {
    const int64_t even = total / (static_cast<int64_t>(Pool::instance().threads()) * 8);
    return std::clamp<int64_t>(even, 8192, 131072) / 64 * 64;
}

template <class F>
void for_ranges(int64_t n, F f) {
    const int64_t grain = grain_for(n);
    auto task = [&](int64_t t) { f(t * grain, std::min(n, (t + 1) * grain)); };
    parallel((n + grain - 1) / grain, task);
}

}  // namespace

void adam(const AdamSegment* segments, size_t count) {
    // The enabled segments laid end to end; tasks are equal ranges of that line, so a large segment is split and small
    // ones are grouped. Every element is computed alone, so where a range begins changes no bit.
    std::vector<const AdamSegment*> active;
    std::vector<AdamScalars> coefficients;
    std::vector<int64_t> ends;
    int64_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        const AdamSegment& s = segments[i];
        if (!(s.flags & FLAG_ENABLED) || s.numel == 0) continue;
        active.push_back(&s);
        coefficients.push_back(scalars(s));
        ends.push_back(total += s.numel);
    }
    const Kernels& kernels = *selected().load();
    for_ranges(total, [&](int64_t begin, int64_t end) {
        size_t at = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
        for (; begin < end; ++at) {
            const AdamSegment& s = *active[at];
            const int64_t offset = begin - (ends[at] - s.numel);
            const int64_t n = std::min(end, ends[at]) - begin;
            const AdamSegment rest = s.from(offset);
            AdamRange r;
            r.grad = reinterpret_cast<const void*>(rest.grad);
            r.param = reinterpret_cast<void*>(rest.param);
            r.lo = s.kind & KIND_SPLIT ? reinterpret_cast<int16_t*>(rest.lo) : nullptr;
            r.exp_avg = reinterpret_cast<float*>(rest.exp_avg);
            r.exp_avg_sq = reinterpret_cast<float*>(rest.exp_avg_sq);
            r.n = n;
            kernels.adam[s.kind](r, coefficients[at]);
            begin += n;
        }
    });
}

void split_master(const float* master, uint16_t* hi, int16_t* lo, int64_t n) {
    const Kernels& kernels = *selected().load();
    for_ranges(n, [&](int64_t a, int64_t b) { kernels.split(master + a, hi + a, lo + a, b - a); });
}

void join_master(const uint16_t* hi, const int16_t* lo, float* out, int64_t n) {
    const Kernels& kernels = *selected().load();
    for_ranges(n, [&](int64_t a, int64_t b) { kernels.join(hi + a, lo + a, out + a, b - a); });
}

void accumulate(float* acc, const void* grad, bool grad_bf16, int64_t n, bool first, float scale) {
    const Kernels& kernels = *selected().load();
    for_ranges(n, [&](int64_t a, int64_t b) {
        if (grad_bf16)
            kernels.accumulate_bf16(acc + a, static_cast<const uint16_t*>(grad) + a, b - a, first, scale);
        else
            kernels.accumulate_fp32(acc + a, static_cast<const float*>(grad) + a, b - a, first, scale);
    });
}

void sum_squares(const Squares* pieces, size_t count, double* sums) {
    // Chunks of a fixed size, added in order: a sum depends on its values alone, not on the threads or the other pieces.
    // All pieces are one job of the pool: waking it for every small tensor costs more than summing it.
    constexpr int64_t CHUNK = 16384;
    const Kernels& kernels = *selected().load();
    std::vector<int64_t> ends;
    int64_t total = 0;
    for (size_t i = 0; i < count; ++i) ends.push_back(total += (pieces[i].numel + CHUNK - 1) / CHUNK);
    std::vector<double> partial(total);
    auto task = [&](int64_t t) {
        const size_t at = std::upper_bound(ends.begin(), ends.end(), t) - ends.begin();
        const Squares& p = pieces[at];
        const int64_t first = (t - (at ? ends[at - 1] : 0)) * CHUNK, length = std::min(CHUNK, p.numel - first);
        partial[t] = p.bf16 ? kernels.sum_squares_bf16(static_cast<const uint16_t*>(p.grad) + first, length)
                            : kernels.sum_squares_fp32(static_cast<const float*>(p.grad) + first, length);
    };
    parallel(total, task);
    int64_t t = 0;
    for (size_t i = 0; i < count; ++i) {
        sums[i] = 0.0;
        for (; t < ends[i]; ++t) sums[i] += partial[t];
    }
}

void copy_bytes(void* dst, const void* src, int64_t n) {
    constexpr int64_t CHUNK = 1 << 20;
    auto task = [&](int64_t t) {
        std::memcpy(static_cast<char*>(dst) + t * CHUNK, static_cast<const char*>(src) + t * CHUNK,
                    std::min(CHUNK, n - t * CHUNK));
    };
    parallel((n + CHUNK - 1) / CHUNK, task);
}

void zero_bytes(void* dst, int64_t n) {
    constexpr int64_t CHUNK = 1 << 20;
    auto task = [&](int64_t t) { std::memset(static_cast<char*>(dst) + t * CHUNK, 0, std::min(CHUNK, n - t * CHUNK)); };
    parallel((n + CHUNK - 1) / CHUNK, task);
}

const char* const* simd_levels() {
    static const std::vector<const char*> names = [] {
        std::vector<const char*> all;
        for (const Kernels* level : levels()) all.push_back(level->name);
        all.push_back(nullptr);
        return all;
    }();
    return names.data();
}

const char* simd_level() { return selected().load()->name; }

bool set_simd_level(const char* name) {
    for (const Kernels* level : levels()) {
        if (std::strcmp(level->name, name) == 0) {
            selected().store(level);
            return true;
        }
    }
    return false;
}

}  // namespace memferry
