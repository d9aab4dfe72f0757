// Streams: a worker thread each, tasks in order. A failed task leaves its error on the stream, where synchronising finds
// it; the tasks behind it still run, so that nobody waits for ever on an event.
#include "emulator.h"

#include <chrono>
#include <cstdlib>

namespace emu {

namespace {

struct Table {
    std::mutex mutex;
    std::map<void*, StreamRef> streams;
    std::map<int, StreamRef> defaults;
    int next_id = 0;
};

Table& table() {
    static auto* all = new Table;
    return *all;
}

aclError create(aclrtStream* out) {
    int device = current_device();
    if (device == no_device) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "aclrtCreateStream: no device is set on this thread");
    std::lock_guard<std::mutex> guard(table().mutex);
    auto stream = std::make_shared<Stream>(device, table().next_id++);
    table().streams[stream.get()] = stream;
    *out = stream.get();
    return ACL_SUCCESS;
}

aclError destroy(aclrtStream handle) {
    StreamRef stream;
    {
        std::lock_guard<std::mutex> guard(table().mutex);
        auto found = table().streams.find(handle);
        if (found == table().streams.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyStream: no such stream");
        stream = found->second;
        table().streams.erase(found);
    }
    stream->wait();
    return ACL_SUCCESS;
}

}  // namespace

Stream::Stream(int device, int id)
    : device(device), id(id), random_(settings().jitter_seed * 7919u + id), worker_([this] { work(); }) {}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    if (worker_.get_id() == std::this_thread::get_id()) worker_.detach(); else worker_.join();
}

void Stream::work() {
    adopt_device(device);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return (stop_ && queue_.empty()) || (!queue_.empty() && !held_); });
        if (queue_.empty()) return;
        Task task = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        if (unsigned pause = delay()) std::this_thread::sleep_for(std::chrono::microseconds(pause));
        aclError result = task();
        task = nullptr;
        lock.lock();
        if (result && !error_) error_ = result;
        ++done_;
        progress_.notify_all();
    }
}

unsigned Stream::delay() {
    auto fixed = settings().delay_us.find(id);
    unsigned pause = fixed == settings().delay_us.end() ? 0 : fixed->second;
    bool struck = settings().jitter_us && rand_r(&random_) % 8 == 0;
    return pause + (struck ? rand_r(&random_) % (settings().jitter_us + 1) : 0);
}

void Stream::push(Task task) {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        queue_.push_back(std::move(task));
        ++pushed_;
    }
    wake_.notify_one();
}

aclError Stream::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [this, until = pushed_] { return done_ >= until; });
    return error_;
}

bool Stream::idle() {
    std::lock_guard<std::mutex> guard(mutex_);
    return done_ == pushed_;
}

aclError Stream::error() {
    std::lock_guard<std::mutex> guard(mutex_);
    return error_;
}

void Stream::hold(bool on) {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        held_ = on;
    }
    wake_.notify_all();
}

aclError find_stream(aclrtStream handle, StreamRef& out) {
    int device = current_device();
    if (device == no_device) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "no device is set on this thread");
    std::lock_guard<std::mutex> guard(table().mutex);
    if (!handle) {
        auto& stream = table().defaults[device];
        if (!stream) stream = std::make_shared<Stream>(device, table().next_id++);
        out = stream;
        return ACL_SUCCESS;
    }
    auto found = table().streams.find(handle);
    if (found == table().streams.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "no stream %p", handle);
    out = found->second;
    if (out->device != device)
        return refuse(ACL_ERROR_RT_STREAM_CONTEXT, "stream %d belongs to device %d, the thread's device is %d", out->id,
                      out->device, device);
    return ACL_SUCCESS;
}

std::vector<StreamRef> streams_of(int device) {
    std::lock_guard<std::mutex> guard(table().mutex);
    std::vector<StreamRef> found;
    for (auto& entry : table().streams)
        if (entry.second->device == device) found.push_back(entry.second);
    auto fallback = table().defaults.find(device);
    if (fallback != table().defaults.end()) found.push_back(fallback->second);
    return found;
}

}  // namespace emu

using namespace emu;

EMU_API aclError aclrtCreateStream(aclrtStream* stream) {
    EMU_ENTER();
    return create(stream);
}

EMU_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
    EMU_ENTER();
    return create(stream);
}

EMU_API aclError aclrtDestroyStream(aclrtStream stream) {
    EMU_ENTER();
    return destroy(stream);
}

EMU_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
    EMU_ENTER();
    return destroy(stream);
}

EMU_API aclError aclrtSynchronizeStream(aclrtStream handle) {
    EMU_ENTER();
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    return stream->wait();
}

EMU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t) {
    EMU_ENTER();
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    return stream->wait();
}

EMU_API aclError aclrtSynchronizeDevice() {
    EMU_ENTER();
    if (current_device() == no_device) return ACL_ERROR_RT_CONTEXT_NULL;
    aclError first = ACL_SUCCESS;
    for (auto& stream : streams_of(current_device())) {
        aclError error = stream->wait();
        if (!first) first = error;
    }
    return first;
}

EMU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

EMU_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
    EMU_ENTER();
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return stream->error();
}

EMU_API aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    *id = stream->id;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void* argument) {
    EMU_ENTER();
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    stream->push([=] { return function(argument), ACL_SUCCESS; });
    return ACL_SUCCESS;
}

// For tests: while a stream is held its worker starts no task, so "not yet done" is a state and not a race.
EMU_API aclError emuHoldStream(aclrtStream handle, int hold) {
    StreamRef stream;
    if (aclError bad = find_stream(handle, stream)) return bad;
    stream->hold(hold != 0);
    return ACL_SUCCESS;
}

// Every stream goes on, also those of a device that is lost and can no longer be set.
EMU_API void emuReleaseAll() {
    for (int device = 0; device < settings().devices; ++device)
        for (auto& stream : streams_of(device)) stream->hold(false);
}
