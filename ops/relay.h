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
class Relay {
public:
    struct Slot {
        uint64_t buffer, filled, freed;
    };

    // Throws std::runtime_error for no slots, or a chunk of no bytes.
    Relay(std::shared_ptr<Driver> driver, std::vector<Slot> slots, uint64_t chunk, uint64_t first, uint64_t second);

    // Queues `whole` behind `after` (an event); records `done` on the second stream behind its last chunk, also when a
    // call fails halfway: what had been queued is then complete at `done`. Throws what the runtime refused. May be called
    // from any thread; the chunks of one call stay together.
    void queue(const Copy& whole, bool to_device, uint64_t after, uint64_t done);

    uint64_t chunks() const { return queued_; }  // queued so far

private:
    void queue_chunks(const Copy& whole, bool to_device);

    std::shared_ptr<Driver> driver_;
    std::vector<Slot> slots_;
    uint64_t chunk_, first_, second_;
    uint64_t queued_ = 0;
    std::mutex mutex_;
};

}  // namespace memferry
