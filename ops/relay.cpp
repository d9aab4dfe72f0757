#include "relay.h"

#include <algorithm>
#include <stdexcept>

namespace memferry {

Relay::Relay(std::shared_ptr<Driver> first_driver, std::shared_ptr<Driver> second_driver, std::vector<Slot> slots,
             uint64_t chunk, uint64_t first, uint64_t second)
    : drivers_{std::move(first_driver), std::move(second_driver)},
      slots_(std::move(slots)),
      chunk_(chunk),
      first_(first),
      second_(second) {
    if (slots_.empty() || chunk_ == 0) throw std::runtime_error("relay: expected at least one slot and a chunk of bytes");
}

const Driver& Relay::on(const Driver& leg) const {
    if (drivers_[0] != drivers_[1]) leg.bind_thread();
    return leg;
}

void Relay::queue(const Copy& whole, bool to_device, uint64_t after, uint64_t done, uint64_t step) {
    if (step == 0 || step > chunk_) throw std::runtime_error("relay: expected a step of 1 byte to a whole buffer");
    std::lock_guard<std::mutex> lock(mutex_);
    const Driver& target = *drivers_[to_device ? 1 : 0];
    try {
        on_first().wait(first_, after);
        try {
            queue_chunks(whole, to_device, step);
        } catch (...) {
            on_second().record(done, second_);
            throw;
        }
        on_second().record(done, second_);
    } catch (...) {
        on(target);  // a caller on another device would go on in the wrong place
        throw;
    }
    on(target);
}

void Relay::queue_chunks(const Copy& whole, bool to_device, uint64_t step) {
    const Direction in = to_device ? Direction::HostToDevice : Direction::DeviceToDevice;
    const Direction out = to_device ? Direction::DeviceToDevice : Direction::DeviceToHost;
    for (uint64_t at = 0; at < whole.nbytes; at += step) {
        const uint64_t nbytes = std::min(step, whole.nbytes - at);
        const Slot& slot = slots_[queued_++ % slots_.size()];
        const Driver& filling = on_first();
        filling.wait(first_, slot.freed);  // an event that was never recorded is no wait
        filling.copy({slot.buffer, whole.src + at, nbytes}, in, first_);
        filling.record(slot.filled, first_);
        const Driver& emptying = on_second();
        emptying.wait(second_, slot.filled);
        emptying.copy({whole.dst + at, slot.buffer, nbytes}, out, second_);
        emptying.record(slot.freed, second_);
    }
}

}  // namespace memferry
