#include "pool.h"

#include <cfenv>
#include <csignal>
#include <pthread.h>
#include <string>
#include <system_error>

namespace memferry {
namespace {

// Never destroyed: threads may still sleep on it while static destructors run.
Pool* pool = nullptr;

// A forked child has none of the parent's threads, and may have copied its locks while they were held. The old object
// cannot be repaired or destroyed, so the child leaves it behind and starts a new one.
void replace_in_child() {
    if (!pool) return;
    const int threads = pool->threads();
    pool = new Pool;
    pool->set_threads(threads);
}

// Flush-to-zero and the rounding mode belong to a thread. Every thread computes in the default environment, or bits
// would depend on which thread took which task after torch.set_flush_denormal(True).
class DefaultArithmetic {
public:
    DefaultArithmetic() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&saved_); }

private:
    std::fenv_t saved_;
};

}  // namespace

Pool& Pool::instance() {
    // Called first at import, under the interpreter's import lock.
    if (!pool) {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, replace_in_child);
    }
    return *pool;
}

void Pool::drain() {
    DefaultArithmetic guard;
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) body_(context_, task);
}

void Pool::work(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
        wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
        if (index >= engaged_) continue;
        lock.unlock();
        drain();
        lock.lock();
        if (--running_ == 0) done_.notify_one();
    }
}

void Pool::run(Body body, void* context, int64_t tasks) {
    if (tasks <= 0) return;
    std::lock_guard<std::mutex> call(call_);
    int64_t helpers = threads() - 1;
    if (helpers > tasks - 1) helpers = tasks - 1;
    if (helpers > 0) start_workers(threads() - 1);
    {
        std::lock_guard<std::mutex> lock(state_);
        body_ = body;
        context_ = context;
        tasks_ = tasks;
        next_.store(0, std::memory_order_relaxed);
        engaged_ = running_ = static_cast<int>(helpers);
        if (helpers > 0) ++generation_;
    }
    if (helpers > 0) wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(state_);
    done_.wait(lock, [&] { return running_ == 0; });
}

void Pool::start_workers(int64_t wanted) {
    // Signals belong to the interpreter's own threads: one delivered here would not interrupt a blocking Python call.
    sigset_t all, saved;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    try {
        while (static_cast<int64_t>(workers_.size()) < wanted) {
            const int index = static_cast<int>(workers_.size());
            // generation_ changes only under call_, which this thread holds
            workers_.emplace_back([this, index, seen = generation_] { work(index, seen); });
        }
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &saved, nullptr);
        throw std::system_error(error.code(), "expected to start " + std::to_string(wanted) +
                                                  " threads for host arithmetic, the system started " +
                                                  std::to_string(workers_.size()) +
                                                  ": lower the number of threads, or raise the process's limits");
    }
    pthread_sigmask(SIG_SETMASK, &saved, nullptr);
}

void Pool::stop_workers() {
    {
        std::lock_guard<std::mutex> lock(state_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
}

void Pool::set_threads(int threads) {
    std::lock_guard<std::mutex> call(call_);
    stop_workers();  // all of them: they may have been started for other cores
    threads_.store(threads, std::memory_order_relaxed);
}

void Pool::start() {
    std::lock_guard<std::mutex> call(call_);
    start_workers(threads() - 1);
}

void Pool::shutdown() {
    std::lock_guard<std::mutex> call(call_);
    stop_workers();
}

}  // namespace memferry
