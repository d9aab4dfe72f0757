#include "worker.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <stdexcept>

namespace memferry {
namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Norm of norms, each rounded to fp32 first, in registration order: as the Python worker does it.
double combine(const std::map<int64_t, double>& squares) {
    double total = 0.0;
    for (const auto& [index, square] : squares) {
        const double norm = static_cast<float>(std::sqrt(square));
        total += norm * norm;
    }
    return std::sqrt(total);
}

}  // namespace

Worker::Worker(std::shared_ptr<Driver> driver, int slots)
    : driver_(std::move(driver)), submitted_(slots, 0), completed_(slots, 0), thread_([this] { work(); }) {}

void Worker::submit(Job job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!error_.empty()) throw std::runtime_error(error_);
        if (closing_) throw std::runtime_error("the engine is closed");
        job.sequence = sequence_++;
        job.epoch = epoch_;
        ++submitted_.at(job.slot);
        jobs_.push(std::move(job));
    }
    wake_.notify_one();
}

void Worker::run(Job& job) {
    for (uint64_t event : job.waits) driver_->synchronize(event);
    if (delay_ > 0) {
        random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
        std::this_thread::sleep_for(std::chrono::duration<double>(delay_ * ((random_ >> 33) / 2147483648.0)));
    }
    const double begin = record_ ? now() : 0.0;
    for (const Fold& f : job.folds) {
        accumulate(reinterpret_cast<float*>(f.acc), reinterpret_cast<const void*>(f.grad), f.bf16, f.numel, f.first, 1.0f);
        if (f.clear) zero_bytes(reinterpret_cast<void*>(f.grad), f.numel * (f.bf16 ? 2 : 4));
    }
    if (!job.pieces.empty()) {
        std::vector<Squares> tensors;
        for (const Piece& p : job.pieces) tensors.push_back({reinterpret_cast<const void*>(p.grad), p.numel, p.bf16 != 0});
        std::vector<double> sums(tensors.size());
        sum_squares(tensors.data(), tensors.size(), sums.data());
        std::map<int64_t, double> squares;
        for (size_t i = 0; i < sums.size(); ++i) squares[job.pieces[i].index] = sums[i];
        const double norm = combine(squares), coefficient = job.limit / (norm + 1e-6);
        job.scale->value = coefficient > 1.0 ? 1.0 : coefficient;
        job.scale->norm = norm;
    }
    if (!job.segments.empty()) {
        if (job.scale)
            for (AdamSegment& s : job.segments) s.grad_scale = job.scale->value;
        adam(job.segments.data(), job.segments.size());
    }
    if (job.upload.stream) {
        const Upload& u = job.upload;
        if (u.after) driver_->wait(u.stream, u.after);
        if (u.begin) driver_->record(u.begin, u.stream);
        driver_->copy(u.copy, Direction::HostToDevice, u.stream);
        if (u.end) driver_->record(u.end, u.stream);
        driver_->record(u.done, u.stream);
    }
    for (const Bytes& b : job.clears) zero_bytes(reinterpret_cast<void*>(b.address), b.nbytes);
    raise_flag(job, false);
    if (record_) {
        std::lock_guard<std::mutex> lock(mutex_);
        intervals_.push_back({job.slot, job.pieces.empty() ? (job.folds.empty() ? 0 : 1) : 2, begin, now()});
    }
}

// The device may be waiting for this job: it must be let go also when the job failed. It then computes with old values
// and the user's next call raises; a device that waits for ever would take the machine with it.
void Worker::raise_flag(const Job& job, bool failed) {
    if (!job.flag.host) return;
    if (job.upload.stream && !failed)
        driver_->write_value(job.upload.stream, job.flag.device, job.flag.value);
    else
        __atomic_store_n(reinterpret_cast<uint32_t*>(job.flag.host), job.flag.value, __ATOMIC_RELEASE);
}

void Worker::work() {
    bool bound = false;
    for (;;) {
        Job job;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            job = jobs_.top();
            jobs_.pop();
            running_ = true;
        }
        std::string failed;
        try {
            if (!bound) driver_->bind_thread();
            bound = true;
            if (error().empty())
                run(job);
            else
                raise_flag(job, true);
        } catch (const std::exception& e) {
            failed = e.what();
            raise_flag(job, true);
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!failed.empty() && error_.empty()) error_ = failed;
            ++completed_.at(job.slot);
            running_ = false;
        }
        progress_.notify_all();
    }
}

void Worker::wait_count(int64_t slot, int64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [&] { return !error_.empty() || completed_.at(slot) >= count; });
    if (!error_.empty()) throw std::runtime_error(error_);
}

void Worker::wait(int64_t slot) { wait_count(slot, submitted(slot)); }

int64_t Worker::submitted(int64_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return submitted_.at(slot);
}

bool Worker::done(int64_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_.at(slot) >= submitted_.at(slot);
}

void Worker::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [this] { return !error_.empty() || (jobs_.empty() && !running_); });
    if (!error_.empty()) throw std::runtime_error(error_);
}

void Worker::next_epoch() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++epoch_;
}

std::string Worker::error() {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

void Worker::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Worker::delay(double most, uint64_t seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    delay_ = most;
    random_ = seed;
}

void Worker::record(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    record_ = on;
    intervals_.clear();
}

std::vector<Interval> Worker::take_intervals() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Interval> out;
    out.swap(intervals_);
    return out;
}

}  // namespace memferry
