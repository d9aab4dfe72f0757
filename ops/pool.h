// A persistent pool of threads for host arithmetic.
//
// The pool is our own so that OMP_NUM_THREADS, or a library that sets it, changes neither speed nor results, and so that
// updates issued from a background thread do not compete with torch's intra-op pool for its one team. Threads sleep on
// a condition variable between calls; the calling thread takes part in the work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace memferry {

class Pool {
public:
    // Runs body(context, task) for every task in [0, tasks) and returns when all have run. Callers on several threads
    // are served one after the other. `body` must not throw. Throws std::system_error, before any task has run, when a
    // thread cannot be started.
    using Body = void (*)(void* context, int64_t task);
    void run(Body body, void* context, int64_t tasks);

    // Threads that take part in a call, the calling one included. Started at the next call that needs them, or by start():
    // they may run on the cores of the thread that starts them.
    void set_threads(int threads);
    void start();
    int threads() const { return threads_.load(std::memory_order_relaxed); }

    // Joins the threads; a later run starts them again.
    void shutdown();

    static Pool& instance();

private:
    void start_workers(int64_t wanted);
    void stop_workers();
    void work(int index, uint64_t seen);
    void drain();

    std::mutex call_;  // held for the whole of a call: one job at a time
    std::mutex state_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    std::atomic<int> threads_{1};
    uint64_t generation_ = 0;  // counts jobs; guarded by state_, as are the fields below
    int engaged_ = 0;          // workers [0, engaged_) take part in this job
    int running_ = 0;          // engaged workers that have not finished it
    bool stopping_ = false;
    Body body_ = nullptr;
    void* context_ = nullptr;
    int64_t tasks_ = 0;
    std::atomic<int64_t> next_{0};
};

// parallel(tasks, f) calls f(task) for every task on the pool.
template <class F>
void parallel(int64_t tasks, F& f) {
    Pool::instance().run([](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &f, tasks);
}

}  // namespace memferry
