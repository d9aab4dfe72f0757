"""The native pool of threads: its size, several callers at once, forks and the interpreter's exit."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from adam_cases import assert_same_bits, result, segment, state

from memferry_ascend import hostmath
from memferry_ascend.hostmath import AdamHyper, AdamProgram

pytestmark = pytest.mark.skipif(not hostmath.NATIVE, reason="the fallback runs on torch's threads")
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")

H = AdamHyper(lr=1e-3, weight_decay=0.01, step=7)
N = 100_003  # several tasks for every thread


@pytest.fixture(autouse=True)
def restore():
    before = hostmath.threads()
    yield
    hostmath.set_threads(before)


def os_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; its exit must be clean."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@linux
def test_the_pool_has_as_many_threads_as_asked_for():
    s = segment(state(N, seed=1))
    program = AdamProgram([s])
    hostmath.shutdown()
    outside = os_threads()
    for n in (4, 2, 3, 1):
        hostmath.set_threads(n)
        assert hostmath.threads() == n
        program.run([H])
        assert os_threads() == outside + n - 1  # the caller is one of them
    hostmath.set_threads(3)
    program.run([H])
    hostmath.shutdown()
    assert os_threads() == outside
    program.run([H])  # and starts again
    assert os_threads() == outside + 2


def test_small_work_takes_no_thread_and_any_count_is_fine():
    hostmath.set_threads(64)
    data = state(5, seed=1)
    s = segment(data)
    AdamProgram([s]).run([H])
    hostmath.set_threads(1)
    alone = segment(data)
    AdamProgram([alone]).run([H])
    assert_same_bits(result(s), result(alone))


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_a_thread_count_is_checked(n):
    with pytest.raises(ValueError, match="expected at least 1 thread"):
        hostmath.set_threads(n)


def test_several_callers_at_once_each_get_their_own_result():
    hostmath.set_threads(3)
    data = [state(30_011 + 7 * i, seed=10 * i) for i in range(4)]
    expected = []
    for d in data:
        s = segment(d, split=True)
        for step in range(1, 6):
            AdamProgram([s]).run([AdamHyper(lr=1e-3, step=step)])
        expected.append((result(s), hostmath.sum_squares(d["grad"])))

    start = threading.Barrier(len(data) + 1)
    found = [None] * len(data)

    def call(i):
        s = segment(data[i], split=True)
        program = AdamProgram([s])
        start.wait()
        for step in range(1, 6):
            program.run([AdamHyper(lr=1e-3, step=step)])
        found[i] = result(s), hostmath.sum_squares(data[i]["grad"])

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(data))]
    for c in callers:
        c.start()
    start.wait()
    for n in (1, 4, 2, 5):  # resizing the pool under them
        hostmath.set_threads(n)
    for c in callers:
        c.join()
    for (bits, squares), (expected_bits, expected_squares) in zip(found, expected, strict=True):
        assert_same_bits(bits, expected_bits)
        assert squares == expected_squares


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_on_a_pool_of_its_own():
    hostmath.set_threads(3)
    data = state(N, seed=5)
    expected = segment(data)
    AdamProgram([expected]).run([H])  # the parent's threads exist
    bits = result(expected)

    busy = segment(data)
    stop = threading.Event()

    def keep_the_pool_locked():
        program = AdamProgram([busy])
        while not stop.is_set():
            program.run([H])

    background = threading.Thread(target=keep_the_pool_locked)
    background.start()
    try:
        for _ in range(5):
            s = segment(data)
            program = AdamProgram([s])
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # a deadlock ends the child, not the test run
                code = 1
                try:
                    program.run([H])
                    assert_same_bits(result(s), bits)
                    started = not os.path.isdir("/proc/self/task") or os_threads() == hostmath.threads()
                    hostmath.shutdown()
                    code = 0 if hostmath.threads() == 3 and started else 2
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    finally:
        stop.set()
        background.join()
    again = segment(data)
    AdamProgram([again]).run([H])
    assert_same_bits(result(again), bits)


RUN_AND_COUNT = """
import os, torch
{before}
from memferry_ascend import hostmath
{after}
threads = len(os.listdir("/proc/self/task"))
z = [torch.zeros({n}) for _ in range(4)]
segment = hostmath.AdamSegment(z[0], z[1], None, z[2], z[3])
threads = len(os.listdir("/proc/self/task"))
hostmath.AdamProgram([segment]).run([hostmath.AdamHyper(lr=1e-3)])
print(hostmath.threads(), len(os.listdir("/proc/self/task")) - threads)
"""


@linux
def test_omp_num_threads_changes_nothing_and_exit_is_clean():
    code = RUN_AND_COUNT.format(before="", after="hostmath.set_threads(3)", n=N)
    assert python(code, OMP_NUM_THREADS="1") == "3 2"
    assert python(code, OMP_NUM_THREADS="4") == "3 2"


@linux
def test_the_default_is_the_affinity_of_the_process():
    cpu = min(os.sched_getaffinity(0))
    code = RUN_AND_COUNT.format(before=f"os.sched_setaffinity(0, {{{cpu}}})", after="", n=N)
    assert python(code) == "1 0"


@linux
def test_threads_that_cannot_start_are_an_error_before_anything_is_written():
    code = """
import resource, torch
from memferry_ascend import hostmath
z = [torch.ones(3_000_000) for _ in range(4)]
program = hostmath.AdamProgram([hostmath.AdamSegment(z[0], z[1], None, z[2], z[3])])
hypers = [hostmath.AdamHyper(lr=1e-3)]
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))  # stacks of 8 MiB each
hostmath.set_threads(200)
try:
    program.run(hypers)
except RuntimeError as error:
    print("expected to start 199 threads" in str(error), z[1].eq(1).all().item())
hostmath.set_threads(2)
program.run(hypers)
print(z[1].ne(1).all().item())
"""
    assert python(code).split() == ["True", "True", "True"]


def test_exit_is_clean_while_a_thread_still_updates():
    # a daemon thread of the user's is in the pool when the interpreter goes down
    code = """
import threading, torch
from memferry_ascend import hostmath
hostmath.set_threads(3)
z = [torch.zeros(300_000) for _ in range(4)]
program = hostmath.AdamProgram([hostmath.AdamSegment(z[0], z[1], None, z[2], z[3])])
entered = threading.Event()
def loop():
    while True:
        program.run([hostmath.AdamHyper(lr=1e-3)])
        entered.set()
threading.Thread(target=loop, daemon=True).start()
entered.wait()
print("done")
"""
    assert python(code) == "done"
