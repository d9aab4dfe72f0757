#include "worker.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <iterator>
#include <stdexcept>
#include <unordered_set>

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
        job.epoch = epoch_;
        ++submitted_.at(job.slot);
        ++unfinished_;
        handed_.push_back(std::move(job));
    }
    wake_.notify_one();
}

bool Worker::reached(Job& job) const {
    job.reached = job.reached || std::all_of(job.waits.begin(), job.waits.end(),
                                             [this](uint64_t event) { return driver_->reached(event); });
    return job.reached;
}

// The index in `waiting_` (not empty) of the job to run next: of those of the oldest epoch that may run and would not
// wait, the one needed first; of none, the one that was handed over first, because streams reach its events first.
size_t Worker::choose() {
    constexpr int LOOKS = 8;  // that find a job not ready, before later ones are taken to be so too
    constexpr size_t NONE = ~size_t(0);
    size_t best = NONE;
    int missed = 0;
    std::unordered_set<int64_t> units;  // that an earlier job is about
    for (size_t i = 0; i < waiting_.size() && waiting_[i].epoch == waiting_[0].epoch && missed < LOOKS; ++i) {
        Job& job = waiting_[i];
        if (job.unit == ALL && i > 0) break;
        if (!units.insert(job.unit).second) continue;
        if (!reached(job))
            ++missed;
        else if (best == NONE || job.priority < waiting_[best].priority)
            best = i;
        if (job.unit == ALL) break;
    }
    return best == NONE ? 0 : best;
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
    if (job.scale)
        for (AdamSegment& s : job.segments) s.grad_scale = job.scale->value;
    update(job);
    for (const Bytes& b : job.clears) zero_bytes(reinterpret_cast<void*>(b.address), b.nbytes);
    raise_flag(job, false);
    if (record_) {
        std::lock_guard<std::mutex> lock(mutex_);
        intervals_.push_back({job.slot, job.pieces.empty() ? (job.folds.empty() ? 0 : 1) : 2, begin, now()});
    }
}

// A large unit leaves in pieces, each as soon as it is updated. Every element is updated alone, so the cuts change no bit.
void Worker::update(const Job& job) const {
    const Upload& u = job.upload;
    uint64_t sent = 0;
    const auto send = [&](uint64_t end) {
        if (sent == 0) {
            if (u.after) driver_->wait(u.stream, u.after);
            if (u.begin) driver_->record(u.begin, u.stream);
        }
        driver_->copy({u.copy.dst + sent, u.copy.src + sent, end - sent}, Direction::HostToDevice, u.stream);
        sent = end;
    };
    // What lies below a cut leaves with it, so it must have been updated.
    const bool cuts = u.stream && std::is_sorted(job.segments.begin(), job.segments.end(), [](const auto& a, const auto& b) {
                          return a.param < b.param;
                      });
    std::vector<AdamSegment> piece;
    uint64_t gathered = 0;
    for (AdamSegment rest : job.segments) {
        while (cuts && gathered + rest.numel * rest.width() > piece_) {
            const int64_t n = (piece_ - std::min(gathered, piece_)) / rest.width() / 64 * 64;  // whole cache lines
            piece.push_back(rest);
            piece.back().numel = n;
            rest = rest.from(n);
            adam(piece.data(), piece.size());
            piece.clear();
            gathered = 0;
            if (rest.param > u.copy.src + sent) send(rest.param - u.copy.src);
        }
        piece.push_back(rest);
        gathered += rest.numel * rest.width();
    }
    if (!piece.empty()) adam(piece.data(), piece.size());
    if (!u.stream) return;
    send(u.copy.nbytes);
    if (u.end) driver_->record(u.end, u.stream);
    driver_->record(u.done, u.stream);
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
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (waiting_.empty()) wake_.wait(lock, [this] { return closing_ || !handed_.empty(); });
            std::move(handed_.begin(), handed_.end(), std::back_inserter(waiting_));
            handed_.clear();
        }
        if (waiting_.empty()) return;
        const auto next = waiting_.begin() + choose();
        Job job = std::move(*next);
        waiting_.erase(next);
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
            --unfinished_;
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
    progress_.wait(lock, [this] { return !error_.empty() || unfinished_ == 0; });
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
