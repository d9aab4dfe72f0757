// memferry_ascend._ops. Addresses come in as integers: Python has checked the tensors behind them and keeps them alive.
#include "bind.h"

#include <string>

#include "hostmath.h"
#include "pool.h"

namespace py = pybind11;
using namespace memferry;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void bind_hostmath(py::module_& m) {
    m.attr("ADAM_SEGMENT_BYTES") = sizeof(AdamSegment);
    m.def("adam", [](uintptr_t segments, size_t count) {
        unlocked([&] { adam(at<const AdamSegment>(segments), count); });
    });
    m.def("split_master", [](uintptr_t master, uintptr_t hi, uintptr_t lo, int64_t n) {
        unlocked([&] { split_master(at<const float>(master), at<uint16_t>(hi), at<int16_t>(lo), n); });
    });
    m.def("join_master", [](uintptr_t hi, uintptr_t lo, uintptr_t out, int64_t n) {
        unlocked([&] { join_master(at<const uint16_t>(hi), at<const int16_t>(lo), at<float>(out), n); });
    });
    m.def("accumulate", [](uintptr_t acc, uintptr_t grad, bool bf16, int64_t n, bool first, double scale) {
        unlocked([&] {
            accumulate(at<float>(acc), at<const void>(grad), bf16, n, first, static_cast<float>(scale));
        });
    });
    m.def("sum_squares", [](uintptr_t grad, bool bf16, int64_t n) {
        return unlocked([&] {
            const Squares piece{at<const void>(grad), n, bf16};
            double sum = 0.0;
            sum_squares(&piece, 1, &sum);
            return sum;
        });
    });
    m.def("copy_bytes", [](uintptr_t dst, uintptr_t src, int64_t n) {
        unlocked([&] { copy_bytes(at<void>(dst), at<const void>(src), n); });
    });
    m.def("simd_level", [] { return std::string(simd_level()); });
    m.def("simd_levels", [] {
        py::list names;
        for (const char* const* name = simd_levels(); *name; ++name) names.append(std::string(*name));
        return names;
    });
    m.def("set_simd_level", [](const std::string& name) {
        if (!set_simd_level(name.c_str()))
            throw py::value_error("this processor and build have no SIMD level \"" + name + "\": see simd_levels()");
    });
    m.def("set_threads", [](int threads) { unlocked([&] { Pool::instance().set_threads(threads); }); });
    m.def("threads", [] { return Pool::instance().threads(); });
    m.def("start_threads", [] { unlocked([] { Pool::instance().start(); }); });
    m.def("shutdown", [] { unlocked([] { Pool::instance().shutdown(); }); });
    Pool::instance();  // created once, here, before any thread can ask for it
}

}  // namespace

PYBIND11_MODULE(_ops, m) {
    m.doc() = "Host arithmetic and transfer queues of memferry_ascend, without a torch, CUDA or CANN header.";
    bind_hostmath(m);
    bind_pipeline(m);
}
