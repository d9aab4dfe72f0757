// A copy through a peer's memory: host -> staging buffer -> target (or back), in chunks, queued in one call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace memferry {

// The first leg fills a staging buffer on `first`, the second empties it on `second`; two events per buffer order them.
// Each event must belong to the device of the stream that records it: `filled` to first's, `freed` to second's.
// Where a stream may only be used with its device current (Ascend) each leg has a driver of its own, and the calling
// thread is left on the target's device. With one driver for both no device is switched.
class Relay {
public:
    struct Slot {
        uint64_t buffer, filled, freed;
    };

    // Throws std::runtime_error for no slots, or a chunk of no bytes.
    Relay(std::shared_ptr<Driver> first_driver, std::shared_ptr<Driver> second_driver, std::vector<Slot> slots,
          uint64_t chunk, uint64_t first, uint64_t second);

    // Queues `whole` in chunks of `step` bytes (at most the buffers') behind `after` (an event); records `done` on the second
    // stream behind its last chunk, also when a call fails halfway: what had been queued is then complete at `done`. Throws
    // what the runtime refused. May be called from any thread; the chunks of one call stay together.
    void queue(const Copy& whole, bool to_device, uint64_t after, uint64_t done, uint64_t step);

    uint64_t chunks() const { return queued_; }  // queued so far

private:
    void queue_chunks(const Copy& whole, bool to_device, uint64_t step);
    const Driver& on_first() const { return on(*drivers_[0]); }
    const Driver& on_second() const { return on(*drivers_[1]); }
    const Driver& on(const Driver& leg) const;  // with its device current

    std::shared_ptr<Driver> drivers_[2];
    std::vector<Slot> slots_;
    uint64_t chunk_, first_, second_;
    uint64_t queued_ = 0;
    std::mutex mutex_;
};

}  // namespace memferry
