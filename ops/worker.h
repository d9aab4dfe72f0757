// The native worker: one thread that runs host updates and never touches the interpreter.
//
// A job waits for events, computes on the pool, may start an upload, and completes its slot. Slots are how Python waits:
// each has a number of jobs handed over and a number completed.
//
// Of the jobs that would not wait, the one that is needed first runs next. A backward pass hands units over last needed
// first, so the job that is needed first is nearly always the newest, whose gradient is still being computed: waiting for
// it would leave the thread idle for half of the backward pass while older gradients lie ready (on an H200 GPT-2 medium took
// 1.48 times its bound, now 1.25).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "hostmath.h"

namespace memferry {

struct Fold {  // acc = grad, or acc += grad; then grad = 0 where `clear`
    uint64_t acc, grad;
    int64_t numel;
    uint32_t bf16, first;
    uint64_t clear;
};

struct Piece {  // a gradient whose squares are summed; `index` orders parameters
    uint64_t grad;
    int64_t numel;
    int64_t index;
    uint64_t bf16;
};

// What one step's updates multiply their gradients by; written by its norm job before any of them runs.
struct Scale {
    double value = 1.0, norm = -1.0;
};

struct Bytes {  // host memory to fill with zeros
    uint64_t address, nbytes;
};

struct Upload {
    Copy copy{0, 0, 0};
    uint64_t stream = 0, after = 0, done = 0;
    uint64_t begin = 0, end = 0;  // timing events around the copy, while somebody records
};

// A word of mapped memory that says how many updates of a unit are complete, for streams to wait on.
struct Flag {
    uint64_t host = 0, device = 0;
    uint32_t value = 0;
};

constexpr int64_t ALL = -1;  // a norm: behind everything handed over before it, before everything after it

struct Job {
    // Jobs of an older epoch (step) come first whatever their priority: the device may be waiting for them before it can
    // produce what a newer job waits for.
    int64_t epoch = 0, priority = 0, slot = 0;
    int64_t unit = ALL;     // jobs of one unit run in the order they were handed over
    bool reached = false;   // what it waits for was reached when somebody looked
    std::vector<uint64_t> waits;
    std::vector<AdamSegment> segments;
    std::vector<Fold> folds;
    std::vector<Piece> pieces;
    std::vector<Bytes> clears;  // gradients that the update has consumed
    double limit = 0.0;  // of a norm job
    std::shared_ptr<Scale> scale;
    Upload upload;
    Flag flag;
};

struct Interval {  // CLOCK_MONOTONIC seconds
    int64_t slot;
    int kind;  // 0 update, 1 fold, 2 norm
    double begin, end;
};

class Worker {
public:
    Worker(std::shared_ptr<Driver> driver, int slots);
    ~Worker() { close(); }

    void submit(Job job);
    void wait(int64_t slot);  // until everything handed over to the slot is complete; throws what a job threw
    void wait_count(int64_t slot, int64_t count);  // until `count` jobs of the slot are complete
    int64_t submitted(int64_t slot);
    bool done(int64_t slot);
    void drain();
    void next_epoch();
    std::string error();
    void close();  // finishes queued jobs, or drops them after an error, and joins the thread

    void piece(uint64_t nbytes) { piece_ = nbytes; }  // of an upload that starts before the rest is updated (tests)
    void delay(double most, uint64_t seed);           // sleep up to `most` seconds before each job (tests)
    void record(bool on);
    std::vector<Interval> take_intervals();

private:
    void work();
    size_t choose();
    bool reached(Job& job) const;
    void run(Job& job);
    void update(const Job& job) const;
    void raise_flag(const Job& job, bool failed);

    std::shared_ptr<Driver> driver_;
    std::mutex mutex_;
    std::condition_variable wake_, progress_;
    std::vector<Job> handed_;   // not yet seen by the thread
    std::vector<Job> waiting_;  // the thread's own, in the order they were handed over
    std::vector<int64_t> submitted_, completed_;
    int64_t epoch_ = 0, unfinished_ = 0;
    bool closing_ = false, record_ = false;
    std::string error_;
    std::vector<Interval> intervals_;
    // Parameter bytes: enough that waking the pool for each piece costs little, few enough that the last piece of a large
    // embedding, which the next forward pass waits for, is on the device 0.3 ms after it was updated.
    uint64_t piece_ = 16 << 20;
    double delay_ = 0.0;
    uint64_t random_ = 0;
    std::thread thread_;
};

}  // namespace memferry
