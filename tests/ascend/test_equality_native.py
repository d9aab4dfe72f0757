"""The equality harness with TASK_QUEUE_ENABLE=0, where updates, events and uploads run in native code."""

from __future__ import annotations

from test_equality_ascend import (  # noqa: F401
    route,
    test_every_mode_has_the_bits_of_the_serial_plan,
    test_random_plans_with_delays,
    test_update_in_backward,
)
from test_placement_ascend import (  # noqa: F401
    test_a_staged_table_sends_the_touched_rows_alone,
    test_every_placement_has_the_bits_of_the_serial_plan,
    test_random_placements_with_delays,
    written,
)

from memferry_ascend import hostmath, runtime
from memferry_ascend.nativejobs import NativeJobs, make_jobs
from memferry_ascend.recorder import Recorder

EMULATED = {"devices": 2, "environ": {"TASK_QUEUE_ENABLE": "0"}}


def test_jobs_are_native() -> None:
    assert hostmath.NATIVE
    backend = runtime.current().backend
    jobs = make_jobs(backend, 1, Recorder(backend), True)
    assert isinstance(jobs, NativeJobs)
    jobs.close()
