// Events: a count of recordings asked for and of recordings reached.
#include "emulator.h"

#include <algorithm>
#include <chrono>

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
    std::mutex mutex;
    std::condition_variable reached;
    uint64_t asked = 0, done = 0;
    bool timed;
    aclError error = ACL_SUCCESS;  // the recording stream's, when it got here
    Clock::time_point time;

    void wait(uint64_t until) {
        std::unique_lock<std::mutex> lock(mutex);
        reached.wait(lock, [&] { return done >= until; });
    }
    uint64_t latest() {
        std::lock_guard<std::mutex> guard(mutex);
        return asked;
    }
};
using EventRef = std::shared_ptr<Event>;

struct Table {
    std::mutex mutex;
    std::map<void*, EventRef> events;
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

aclError create(aclrtEvent* out, uint32_t flag) {
    if (emu::current_device() == emu::no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    auto event = std::make_shared<Event>();
    event->timed = flag & ACL_EVENT_TIME_LINE;
    std::lock_guard<std::mutex> guard(table().mutex);
    table().events[event.get()] = event;
    *out = event.get();
    return ACL_SUCCESS;
}

aclError find_event(aclrtEvent handle, EventRef& out) {
    std::lock_guard<std::mutex> guard(table().mutex);
    auto found = table().events.find(handle);
    if (found == table().events.end()) return emu::refuse(ACL_ERROR_RT_PARAM_INVALID, "no event %p", handle);
    out = found->second;
    return ACL_SUCCESS;
}

}  // namespace

using namespace emu;

EMU_API aclError aclrtCreateEvent(aclrtEvent* event) {
    EMU_ENTER();
    return create(event, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
}

EMU_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
    EMU_ENTER();
    return create(event, flag);
}

EMU_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
    EMU_ENTER();
    return create(event, flag);
}

EMU_API aclError aclrtDestroyEvent(aclrtEvent handle) {
    EMU_ENTER();
    std::lock_guard<std::mutex> guard(table().mutex);
    if (!table().events.erase(handle)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyEvent: no such event");
    return ACL_SUCCESS;
}

EMU_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    EMU_ENTER();
    EventRef event;
    StreamRef stream;
    if (aclError bad = find_event(handle, event)) return bad;
    if (aclError bad = find_stream(stream_handle, stream)) return bad;
    uint64_t turn;
    {
        std::lock_guard<std::mutex> guard(event->mutex);
        turn = ++event->asked;
    }
    stream->push([event, turn, from = stream.get()] {
        aclError error = from->error();
        std::lock_guard<std::mutex> guard(event->mutex);
        event->done = std::max(event->done, turn);
        event->time = Clock::now();
        event->error = error;
        event->reached.notify_all();
        return ACL_SUCCESS;
    });
    return ACL_SUCCESS;
}

EMU_API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream) {
    EMU_ENTER();
    EventRef event;
    return find_event(handle, event);  // a later recording counts anew anyway
}

EMU_API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    EMU_ENTER();
    EventRef event;
    StreamRef stream;
    if (aclError bad = find_event(handle, event)) return bad;
    if (aclError bad = find_stream(stream_handle, stream)) return bad;
    stream->push([event, until = event->latest()] { return event->wait(until), ACL_SUCCESS; });
    return ACL_SUCCESS;
}

EMU_API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    EMU_ENTER();
    EventRef event;
    if (aclError bad = find_event(handle, event)) return bad;
    event->wait(event->latest());
    return event->error;
}

EMU_API aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
    EMU_ENTER();
    EventRef event;
    if (aclError bad = find_event(handle, event)) return bad;
    std::lock_guard<std::mutex> guard(event->mutex);
    *status = event->done >= event->asked ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
    EMU_ENTER();
    EventRef event;
    if (aclError bad = find_event(handle, event)) return bad;
    std::lock_guard<std::mutex> guard(event->mutex);
    *status = event->done >= event->asked ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtEventElapsedTime(float* ms, aclrtEvent from, aclrtEvent to) {
    EMU_ENTER();
    EventRef first, second;
    if (aclError bad = find_event(from, first)) return bad;
    if (aclError bad = find_event(to, second)) return bad;
    if (first == second) return *ms = 0, ACL_SUCCESS;  // one mutex cannot be locked twice
    std::scoped_lock guard(first->mutex, second->mutex);
    if (!first->timed || !second->timed || !first->done || !second->done)
        return refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event has no time stamp");
    *ms = std::chrono::duration<float, std::milli>(second->time - first->time).count();
    return ACL_SUCCESS;
}
