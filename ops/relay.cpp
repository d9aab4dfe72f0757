#include "relay.h"

#include <algorithm>
#include <stdexcept>

namespace memferry {

Relay::Relay(std::shared_ptr<Driver> driver, std::vector<Slot> slots, uint64_t chunk, uint64_t first, uint64_t second)
    : driver_(std::move(driver)), slots_(std::move(slots)), chunk_(chunk), first_(first), second_(second) {
    if (slots_.empty() || chunk_ == 0) throw std::runtime_error("relay: expected at least one slot and a chunk of bytes");
}

void Relay::queue(const Copy& whole, bool to_device, uint64_t after, uint64_t done) {
    std::lock_guard<std::mutex> lock(mutex_);
    driver_->wait(first_, after);
    try {
        queue_chunks(whole, to_device);
    } catch (...) {
        driver_->record(done, second_);
        throw;
    }
    driver_->record(done, second_);
}

void Relay::queue_chunks(const Copy& whole, bool to_device) {
    const Direction in = to_device ? Direction::HostToDevice : Direction::DeviceToDevice;
    const Direction out = to_device ? Direction::DeviceToDevice : Direction::DeviceToHost;
    for (uint64_t at = 0; at < whole.nbytes; at += chunk_) {
        const uint64_t nbytes = std::min(chunk_, whole.nbytes - at);
        const Slot& slot = slots_[queued_++ % slots_.size()];
        driver_->wait(first_, slot.freed);  // an event that was never recorded is no wait
        driver_->copy({slot.buffer, whole.src + at, nbytes}, in, first_);
        driver_->record(slot.filled, first_);
        driver_->wait(second_, slot.filled);
        driver_->copy({whole.dst + at, slot.buffer, nbytes}, out, second_);
        driver_->record(slot.freed, second_);
    }
}

}  // namespace memferry
