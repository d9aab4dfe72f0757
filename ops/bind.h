// What the binding files share.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <type_traits>

namespace memferry {

// Calls f without the interpreter lock. Unlike py::gil_scoped_release this takes the lock back outside of a destructor:
// while the interpreter goes down, a daemon thread that asks for the lock is ended by unwinding its stack (CPython up to
// 3.13), and unwinding out of a destructor would abort the whole process.
template <class F>
auto unlocked(F f) {
    PyThreadState* const state = PyEval_SaveThread();
    try {
        if constexpr (std::is_void_v<decltype(f())>) {
            f();
        } else {
            auto result = f();
            PyEval_RestoreThread(state);
            return result;
        }
    } catch (const std::exception&) {  // ours, not the unwinding of a thread that is being ended
        PyEval_RestoreThread(state);
        throw;
    }
    PyEval_RestoreThread(state);
}

void bind_pipeline(pybind11::module_& m);

}  // namespace memferry
