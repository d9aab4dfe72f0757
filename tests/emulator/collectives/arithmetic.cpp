// Reductions, in rank order. Optimised, unlike the rest: every element passes here.
#pragma GCC optimize("O2")
#include "comm.h"

#include <algorithm>
#include <cstring>

namespace emu {

namespace {

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct BFloat16 {
    uint16_t bits;
    operator float() const { return float_of(uint32_t(bits) << 16); }
    BFloat16(float value) {
        uint32_t b = bits_of(value);
        // To the nearest, ties to even; NaN stays NaN.
        bits = value != value ? 0x7fc0 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    }
};

template <typename T>
T combine(HcclReduceOp op, T a, T b) {
    switch (op) {
        case HCCL_REDUCE_SUM: return a + b;
        case HCCL_REDUCE_PROD: return a * b;
        case HCCL_REDUCE_MAX: return a != a || a > b ? a : b;  // NaN wins
        default: return a != a || a < b ? a : b;
    }
}

// Stored as T, computed as A.
template <typename T, typename A>
void reduce_as(HcclReduceOp op, const std::vector<const char*>& rows, size_t count, char* out) {
    for (size_t i = 0; i < count; ++i) {
        auto at = [&](size_t r) { return static_cast<A>(reinterpret_cast<const T*>(rows[r])[i]); };
        A total = at(0);
        for (size_t r = 1; r < rows.size(); ++r) total = combine<A>(op, total, at(r));
        reinterpret_cast<T*>(out)[i] = static_cast<T>(total);
    }
}

}  // namespace

size_t size_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: return 1;
        case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
        default: return 0;
    }
}

// What the header's comments name for this SoC; torch_npu adds int64.
bool can_reduce(HcclDataType type, HcclReduceOp op) {
    bool types = type == HCCL_DATA_TYPE_INT8 || type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_INT32 ||
                 type == HCCL_DATA_TYPE_INT64 || type == HCCL_DATA_TYPE_FP16 || type == HCCL_DATA_TYPE_FP32 ||
                 type == HCCL_DATA_TYPE_BFP16;
    return types && op >= HCCL_REDUCE_SUM && op <= HCCL_REDUCE_MIN;
}

void reduce(HcclDataType type, HcclReduceOp op, const std::vector<const char*>& rows, size_t count, char* out) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t, int8_t>(op, rows, count, out);
        case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t, int16_t>(op, rows, count, out);
        case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t, int32_t>(op, rows, count, out);
        case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t, int64_t>(op, rows, count, out);
        case HCCL_DATA_TYPE_FP16: return reduce_as<_Float16, float>(op, rows, count, out);
        case HCCL_DATA_TYPE_BFP16: return reduce_as<BFloat16, float>(op, rows, count, out);
        case HCCL_DATA_TYPE_FP32: return reduce_as<float, float>(op, rows, count, out);
        default: return;
    }
}

}  // namespace emu
