// Python's side of the driver and the native worker. Tables come in as addresses of numpy arrays laid out as the structs.
#include "bind.h"

#include <pybind11/stl.h>

#include "relay.h"
#include "worker.h"

namespace py = pybind11;

namespace memferry {
namespace {

template <class T>
std::vector<T> rows(uintptr_t table, size_t count) {
    const T* first = reinterpret_cast<const T*>(table);
    return std::vector<T>(first, first + count);
}

}  // namespace

void bind_pipeline(py::module_& m) {
    m.attr("FOLD_BYTES") = sizeof(Fold);
    m.attr("PIECE_BYTES") = sizeof(Piece);

    py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver")
        .def(py::init<const std::string&, const std::string&, int>())
        .def_property_readonly("library", &Driver::library)
        .def("bind_thread", &Driver::bind_thread)
        .def("record", &Driver::record)
        .def("wait", &Driver::wait)
        .def("has_values", &Driver::has_values)
        .def("wait_value", &Driver::wait_value)
        .def("write_value", &Driver::write_value)
        .def("synchronize", [](const Driver& d, uint64_t event) { unlocked([&] { d.synchronize(event); }); })
        .def("copy",
             [](const Driver& d, uint64_t dst, uint64_t src, uint64_t nbytes, int direction, uint64_t stream) {
                 d.copy({dst, src, nbytes}, static_cast<Direction>(direction), stream);
             })
        // Wait for `ready` (recorded on `compute` first), copy every (dst, src, nbytes), record `done`: one call a unit.
        .def("batch", [](const Driver& d, const std::vector<std::array<uint64_t, 3>>& copies, int direction,
                         uint64_t stream, uint64_t compute, uint64_t ready, uint64_t done) {
            if (ready) {
                d.record(ready, compute);
                d.wait(stream, ready);
            }
            for (const auto& c : copies) d.copy({c[0], c[1], c[2]}, static_cast<Direction>(direction), stream);
            if (done) d.record(done, stream);
        });

    // slots: (buffer, filled event, freed event) of each staging buffer; first, second: the streams of the two legs, each
    // with the driver of its device (twice the same one where streams may be used from any device).
    py::class_<Relay>(m, "Relay")
        .def(py::init([](std::shared_ptr<Driver> first_driver, std::shared_ptr<Driver> second_driver,
                         const std::vector<std::array<uint64_t, 3>>& slots, uint64_t chunk, uint64_t first, uint64_t second) {
            std::vector<Relay::Slot> own;
            for (const auto& s : slots) own.push_back({s[0], s[1], s[2]});
            return std::make_unique<Relay>(std::move(first_driver), std::move(second_driver), std::move(own), chunk, first,
                                           second);
        }))
        .def("queue",
             [](Relay& r, uint64_t dst, uint64_t src, uint64_t nbytes, bool to_device, uint64_t after, uint64_t done,
                uint64_t step) { unlocked([&] { r.queue({dst, src, nbytes}, to_device, after, done, step); });
             })
        .def_property_readonly("chunks", &Relay::chunks);

    py::class_<Scale, std::shared_ptr<Scale>>(m, "Scale")
        .def(py::init<>())
        .def_readwrite("value", &Scale::value)
        .def_readwrite("norm", &Scale::norm);

    py::class_<Worker>(m, "Worker")
        .def(py::init<std::shared_ptr<Driver>, int>())
        .def("update",
             [](Worker& w, int64_t slot, int64_t priority, std::vector<uint64_t> waits, uintptr_t segments, size_t count,
                std::shared_ptr<Scale> scale, std::array<uint64_t, 8> upload, std::array<uint64_t, 3> flag,
                const std::vector<std::array<uint64_t, 2>>& clears) {
                 Job job;
                 job.slot = job.unit = slot;
                 job.priority = priority;
                 job.waits = std::move(waits);
                 job.segments = rows<AdamSegment>(segments, count);
                 job.scale = std::move(scale);
                 job.upload = {{upload[0], upload[1], upload[2]}, upload[3], upload[4], upload[5], upload[6], upload[7]};
                 job.flag = {flag[0], flag[1], static_cast<uint32_t>(flag[2])};
                 for (const auto& c : clears) job.clears.push_back({c[0], c[1]});
                 w.submit(std::move(job));
             })
        .def("fold",
             [](Worker& w, int64_t slot, int64_t unit, int64_t priority, std::vector<uint64_t> waits, uintptr_t table,
                size_t count) {
                 Job job;
                 job.slot = slot;
                 job.unit = unit;
                 job.priority = priority;
                 job.waits = std::move(waits);
                 job.folds = rows<Fold>(table, count);
                 w.submit(std::move(job));
             })
        .def("norm",
             [](Worker& w, int64_t slot, int64_t priority, std::vector<uint64_t> waits, uintptr_t table, size_t count,
                double limit, std::shared_ptr<Scale> scale) {
                 Job job;
                 job.slot = slot;
                 job.priority = priority;
                 job.waits = std::move(waits);
                 job.pieces = rows<Piece>(table, count);
                 job.limit = limit;
                 job.scale = std::move(scale);
                 w.submit(std::move(job));
             })
        .def("wait", [](Worker& w, int64_t slot) { unlocked([&] { w.wait(slot); }); })
        .def("wait_count",
             [](Worker& w, int64_t slot, int64_t count) { unlocked([&] { w.wait_count(slot, count); }); })
        .def("submitted", &Worker::submitted)
        .def("done", &Worker::done)
        .def("drain", [](Worker& w) { unlocked([&] { w.drain(); }); })
        .def("next_epoch", &Worker::next_epoch)
        .def("error", &Worker::error)
        .def("close", [](Worker& w) { unlocked([&] { w.close(); }); })
        .def("piece", &Worker::piece)
        .def("delay", &Worker::delay)
        .def("record", &Worker::record)
        .def("take_intervals", [](Worker& w) {
            std::vector<std::tuple<int64_t, int, double, double>> out;
            for (const Interval& i : w.take_intervals()) out.emplace_back(i.slot, i.kind, i.begin, i.end);
            return out;
        });
}

}  // namespace memferry
