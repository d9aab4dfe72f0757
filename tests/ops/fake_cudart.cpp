// A CUDA runtime of a few calls over threads: streams are queues, events are counters, a stream can wait for a word. Only
// what the native driver uses, so that its ordering can be tested where there is no GPU.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace {
// One lock for everything: this is a test. Never destroyed: streams still wait on them when the process ends, and a
// condition variable's destructor waits for its waiters.
std::mutex& m = *new std::mutex;
std::condition_variable& cv = *new std::condition_variable;

struct Event {
    int64_t recorded = 0, reached = 0;
};

struct Stream {
    std::deque<std::function<void()>> queue;
    bool busy = false, stop = false;
    std::thread thread{[this] {
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock<std::mutex> lock(m);
                busy = false;
                cv.notify_all();
                cv.wait(lock, [this] { return stop || !queue.empty(); });
                if (queue.empty()) return;
                task = std::move(queue.front());
                queue.pop_front();
                busy = true;
            }
            task();
        }
    }};
};

void push(void* stream, std::function<void()> task) {
    std::lock_guard<std::mutex> lock(m);
    static_cast<Stream*>(stream)->queue.push_back(std::move(task));
    cv.notify_all();
}

std::atomic<void*> failing{nullptr};
std::atomic<int> copies{0};
std::atomic<int> copies_left{-1};  // until copies fail; below zero: for ever
}  // namespace

extern "C" {
void* fake_stream() { return new Stream; }
void* fake_event() { return new Event; }
void fake_fail_copies(void* stream) { failing = stream; }
int fake_copies() { return copies; }
void fake_fail_after(int copies) { copies_left = copies; }
// Holds a stream until the word is not zero.
void fake_hold(void* stream, int* word) {
    push(stream, [word] {
        while (!__atomic_load_n(word, __ATOMIC_ACQUIRE)) std::this_thread::yield();
    });
}
void fake_synchronize(void* stream) {
    auto* s = static_cast<Stream*>(stream);
    std::unique_lock<std::mutex> lock(m);
    cv.wait(lock, [s] { return s->queue.empty() && !s->busy; });
}
int fake_idle(void* stream, double seconds) {
    auto* s = static_cast<Stream*>(stream);
    std::unique_lock<std::mutex> lock(m);
    return cv.wait_for(lock, std::chrono::duration<double>(seconds), [s] { return s->queue.empty() && !s->busy; });
}
int cudaSetDevice(int) { return 0; }
int cudaEventRecord(void* event, void* stream) {
    auto* e = static_cast<Event*>(event);
    int64_t number;
    {
        std::lock_guard<std::mutex> lock(m);
        number = ++e->recorded;
    }
    push(stream, [e, number] {
        std::lock_guard<std::mutex> lock(m);
        e->reached = number;
        cv.notify_all();
    });
    return 0;
}
int cudaEventSynchronize(void* event) {
    auto* e = static_cast<Event*>(event);
    std::unique_lock<std::mutex> lock(m);
    const int64_t number = e->recorded;
    cv.wait(lock, [&] { return e->reached >= number; });
    return 0;
}
int cudaEventQuery(void* event) {
    auto* e = static_cast<Event*>(event);
    std::lock_guard<std::mutex> lock(m);
    return e->reached >= e->recorded ? 0 : 600;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
    auto* e = static_cast<Event*>(event);
    int64_t number;
    {
        std::lock_guard<std::mutex> lock(m);
        number = e->recorded;
    }
    push(stream, [e, number] {
        std::unique_lock<std::mutex> lock(m);
        cv.wait(lock, [&] { return e->reached >= number; });
    });
    return 0;
}
int cudaMemcpyAsync(void* dst, const void* src, size_t n, int, void* stream) {
    ++copies;
    if (stream == failing || copies_left == 0) return 700;
    if (copies_left > 0) --copies_left;
    push(stream, [=] { std::memcpy(dst, src, n); });
    return 0;
}
int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
    push(stream, [=] {
        auto* word = reinterpret_cast<uint32_t*>(address);
        while (static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0)
            std::this_thread::yield();  // as the device polls
    });
    return 0;
}
int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
    push(stream, [=] { __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE); });
    return 0;
}
}
