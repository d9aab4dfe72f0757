"""When something breaks: who hears of it, how soon, and what is left. Nothing here waits by sleeping."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import batches, make_model, plan_of, random_plan, small_units
from torch import nn

import memferry_ascend as mf
from memferry_ascend import arming, checkpoint, hostupdate, reads, runtime, shadow
from memferry_ascend import engine as engine_module
from memferry_ascend.backends.base import DeviceOutOfMemory
from memferry_ascend.backends.cpu import CpuBackend, CpuStream
from memferry_ascend.errors import FerryError
from memferry_ascend.gradients import Gradients
from memferry_ascend.planner import Mode

pytestmark = pytest.mark.usefixtures("cpu")

MODES = list(Mode)
SECOND = 1.0

HAND_OVERS = [(point, mode) for point in ("update", "fold", "copy:download") for mode in MODES]
HAND_OVERS += [("copy:upload", Mode.GFGB), ("copy:upload", Mode.STREAM)]  # the modes that make these copies
HAND_OVERS += [("copy:reload", Mode.DFGB), ("copy:reload", Mode.STREAM)]


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    yield
    current = runtime.current()
    current.backend.disturb = None


def ferry(model: nn.Module, plan: Any = None, **kwargs: Any) -> mf.Engine:
    config = mf.Config(**{"precision": "fp32", **kwargs})
    with small_units():
        return mf.ferry(model, torch.optim.AdamW(model.parameters()), config=config, plan=plan)


class Break:
    """Raises at the named hand-over, from the `first`-th time on."""

    def __init__(self, point: str, error: Callable[[], BaseException], first: int = 1) -> None:
        self.point, self.error, self.left = point, error, first

    def __call__(self, point: str) -> None:
        if point.startswith(self.point):
            self.left -= 1
            if self.left <= 0:
                raise self.error()


def train_until_error(engine: mf.Engine, steps: int = 6) -> tuple[FerryError, float]:
    """The error that training ends in and when it came (monotonic seconds)."""

    def train() -> None:
        for x in batches(steps):
            engine.model(x).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.synchronize()

    with pytest.raises(FerryError) as caught:
        train()
    return caught.value, time.monotonic()


def causes(error: BaseException) -> list[str]:
    out = []
    here: BaseException | None = error
    while here is not None:
        out.append(f"{type(here).__name__}: {here}")
        here = here.__cause__
    return out


@pytest.mark.pairwise
@pytest.mark.parametrize(("point", "mode"), HAND_OVERS)
@pytest.mark.parametrize("first", [1, 4])
def test_a_failure_anywhere_reaches_the_user_with_its_cause(point: str, mode: Mode, first: int) -> None:
    """Then close() tidies up and says it again, and the model can be ferried and trained anew on the same backend."""
    model = make_model(5)
    engine = ferry(model, plan_of(model, mode), accumulate=2 if point == "fold" else 1)
    threads = threading.active_count()
    moment: list[float] = []

    def error() -> BaseException:
        moment.append(time.monotonic())
        return ValueError("the link fell off")

    runtime.current().backend.disturb = Break(point, error, first)
    found, heard = train_until_error(engine)
    runtime.current().backend.disturb = None
    assert any(line.startswith("ValueError: the link fell off") for line in causes(found)), causes(found)
    assert heard - moment[0] < 30  # not a timing: a hang would be caught here
    with pytest.raises(FerryError, match="the link fell off"):
        engine.close()
    engine.close()  # idempotent
    assert threading.active_count() == threads - 1
    model(batches(1)[0]).backward()
    assert all(p.device.type == "cpu" and torch.isfinite(p).all() for p in model.parameters())
    model.zero_grad()
    with ferry(model, plan_of(model, mode)) as engine:
        engine.model(batches(1)[0]).backward()
        engine.optimizer.step()


def test_a_waiting_user_is_woken() -> None:
    """The user's thread is blocked in the forward pass, waiting for the update that then fails."""
    model = make_model(5)
    engine = ferry(model, plan_of(model, Mode.GFGB))
    waiting = threading.Event()
    wait_ticket = engine._jobs.wait_ticket

    def announce(unit: int, ticket: int) -> None:
        waiting.set()
        wait_ticket(unit, ticket)

    engine._jobs.wait_ticket = announce  # type: ignore[method-assign]
    moment: list[float] = []

    def fail(point: str) -> None:
        if point == "update":
            assert waiting.wait(30)
            moment.append(time.monotonic())
            raise MemoryError("no more")

    runtime.current().backend.disturb = fail
    error, heard = train_until_error(engine)
    assert "MemoryError: no more" in causes(error)
    assert heard - moment[0] < SECOND
    with pytest.raises(FerryError):
        engine.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_job_that_ends_the_thread_is_no_hang(kind: type[BaseException]) -> None:
    model = make_model(5)
    engine = ferry(model, plan_of(model, Mode.STREAM))
    runtime.current().backend.disturb = Break("update", lambda: kind("stop"))
    train_until_error(engine)
    with pytest.raises(FerryError):
        engine.close()


def test_a_worker_killed_between_jobs_is_no_hang() -> None:
    """As `PyThreadState_SetAsyncExc` does it: the exception hits wherever the thread is."""
    model = make_model(5)
    engine = ferry(model, plan_of(model, Mode.GFGB))
    thread = engine._jobs.worker._thread  # type: ignore[attr-defined]
    assert (
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        == 1
    )
    engine._jobs.worker.notify()  # type: ignore[attr-defined]
    thread.join(30)
    assert not thread.is_alive()
    error, _ = train_until_error(engine)
    assert "SystemExit" in str(causes(error))
    with pytest.raises(FerryError):
        engine.close()
    model(batches(1)[0])


@pytest.mark.parametrize("mode", MODES)
def test_device_out_of_memory_in_the_middle_of_a_pass_can_be_retried(mode: Mode) -> None:
    """The user's own allocations fail (activations, a workspace): the step is skipped, the numbers stay right."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    def run(fail: bool) -> list[float]:
        model = make_model(6)
        losses = []
        with ferry(model, plan_of(model, mode)) as engine:
            for k, x in enumerate(batches(5)):
                if fail:
                    at = model.blocks[0]
                    hook = at.register_forward_hook(full) if k % 2 else at.norm.weight.register_hook(full)
                    with pytest.raises(torch.OutOfMemoryError):
                        engine.model(x).backward()
                    hook.remove()
                    engine.optimizer.zero_grad()
                loss = engine.model(x)
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses + [float(p.detach().sum()) for p in model.parameters()]

    assert run(True) == run(False)


def test_host_memory_refused_in_the_middle_of_a_backward_pass() -> None:
    """The fp32 sums of an undeclared second backward do not fit: the parameters stay, and training with one goes on."""
    model = make_model(6)
    probe = ferry(model, plan_of(model, Mode.GFGB))
    need = probe._arena.nbytes
    probe.close()
    with ferry(model, plan_of(model, Mode.GFGB), host_memory=need) as engine:
        engine.model(batches(1)[0]).backward()
        before = engine.state_dict()
        with pytest.raises(FerryError, match="over the limit"):
            engine.model(batches(1)[0]).backward()
        engine.optimizer.zero_grad()
        assert all(torch.equal(v, before["model"][k]) for k, v in engine.state_dict()["model"].items())
        engine.model(batches(1)[0]).backward()
        engine.optimizer.step()


PLACES: dict[str, tuple[Any, str]] = {
    "the first region": (arming, "set_master"),
    "buffers": (arming, "move_buffers"),
    "the ring": (arming, "make_ring"),
    "device memory": (shadow, "Resident"),
    "updates": (arming, "make_updates"),
    "binding": (shadow.Resident, "bind_rest"),
    "gradient hooks": (Gradients, "install"),
    "windows": (reads, "Window"),
    "the optimizer": (engine_module, "FerryOptimizer"),
    "state dict hooks": (checkpoint, "install_state_dict_hooks"),
    "native updates": (hostupdate.NativeUpdate, "_program"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_ferry_that_fails_gives_the_model_back_untouched(
    place: str, nth: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make_model(6), nn.BatchNorm1d(4))
    model[1].requires_grad_(False)
    model[1].weight.data.fill_(1 / 3)  # frozen: under bf16 the arena holds it rounded
    model[0](batches(1)[0]).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    want = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    moments = {k: dict(v) for k, v in optimizer.state_dict()["state"].items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    threads = threading.active_count()
    if place == "device memory":
        owner, name = engine_module, "Resident"
    else:
        owner, name = PLACES[place]
    original = getattr(owner, name)
    count = [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] >= nth:
            raise OSError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    config = mf.Config(precision=precision)
    with small_units():
        try:
            engine = mf.ferry(model, optimizer, config=config, plan=random_plan(model, 3))
        except OSError:
            engine = None
    if engine is not None:  # called less often than that
        assert count[0] < nth
        monkeypatch.undo()
        engine.close()
        return
    monkeypatch.undo()
    assert {k: torch.equal(v, want[k]) for k, v in model.state_dict().items()} == dict.fromkeys(want, True)
    for n, p in model.named_parameters():
        assert (p.grad is None) == (grads[n] is None)
        assert p.grad is None or torch.equal(p.grad, grads[n])
    for k, v in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, moments[k][s]) for s, x in v.items())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert threading.active_count() <= threads + 3  # the backend's streams, which live until runtime.reset()
    assert runtime.current().backend.memory_stats().allocated == 0
    model.zero_grad()
    model[0](batches(1)[0]).backward()
    optimizer.step()
    with small_units(), mf.ferry(model, optimizer, config=config, plan=random_plan(model, 3)):
        pass


def test_device_memory_refused_while_arming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took it after the check."""
    model = make_model(6)
    want = {k: v.clone() for k, v in model.state_dict().items()}
    allocate = CpuBackend.alloc_device
    calls = [0]

    def full(self: CpuBackend, nbytes: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise DeviceOutOfMemory("device memory: somebody took it")
        return allocate(self, nbytes)

    monkeypatch.setattr(CpuBackend, "alloc_device", full)
    with pytest.raises(DeviceOutOfMemory):
        ferry(model, plan_of(model, Mode.GFGB))
    assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())
    assert runtime.current().backend.memory_stats().allocated == 0


# -- the end -----------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_fifty_rounds_of_ferry_and_close_leave_nothing(optimizer: Any) -> None:
    """Each round takes about 13 MB of arena and 2 MB of device memory: what one forgot would show."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    x = torch.randn(2, 256)
    marks, threads = [], []
    before = set(threading.enumerate())  # other tests' backends may still have theirs
    for k in range(50):
        plan = plan_of(model, MODES[k % 4])
        engine = mf.ferry(model, optimizer(model.parameters()), config=mf.Config(precision="fp32"), plan=plan)
        for _ in range(2):
            engine.model(x).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.close()
        assert engine._arena.nbytes == 0 and runtime.current().backend.memory_stats().allocated == 0
        marks.append(resident_bytes())
        threads.append(threading.active_count())
    arena = sum(p.numel() for p in model.parameters()) * 16
    growth = marks[-1] - marks[9]
    assert growth < arena, f"grew by {growth} bytes over 40 rounds; one arena is {arena}"
    assert max(threads[4:]) == threads[4]
    model(x).sum().backward()
    runtime.reset()
    assert not [t for t in threading.enumerate() if t.name.startswith("memferry") and t not in before]


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_from_before_close_raises(mode: Mode) -> None:
    model = make_model(6)
    engine = ferry(model, plan_of(model, mode))
    loss = engine.model(batches(1)[0])
    engine.close()
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation|before the last optimizer step"
    ):
        loss.backward()
    with pytest.raises(FerryError, match="closed"):
        engine.edit().__enter__()


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    """Ctrl-C inside the model: torch runs no hook then."""
    for mode in MODES:
        model = make_model(6)
        plain = make_model(6)
        want = float(plain(batches(1)[0]))
        handle = model.blocks[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        engine = ferry(model, plan_of(model, mode))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                engine.model(batches(1)[0])
        handle.remove()
        loss = engine.model(batches(1)[0])
        loss.backward()
        assert float(loss) == pytest.approx(want, rel=1e-6)
        engine.optimizer.step()
        handle = model.blocks[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.model(batches(1)[0])
        engine.close()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert torch._C._len_torch_function_stack() == 0


LOOP = """
import sys, time, torch, memferry_ascend as mf
from memferry_ascend.planner import Plan, LayerPlan, Mode
torch.set_num_threads(1)
mf.init(backend="cpu")
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
plan = Plan(tuple(LayerPlan(str(i), list(Mode)[i % 4]) for i in range(6)))
x = torch.randn(4, 64)
try:
    with mf.ferry(model, torch.optim.AdamW(model.parameters()), config=mf.Config(precision="fp32"), plan=plan) as engine:
        print("go", flush=True)
        while True:
            engine.model(x).sum().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
except KeyboardInterrupt:
    assert all(torch.isfinite(p).all() for p in model.parameters())
    model(x).sum().backward()
    print("clean", flush=True)
    sys.exit(130)
"""


def test_ctrl_c_ends_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "clean\n"), err
    assert err == ""


def test_stream_threads_restart_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream keeps its error until somebody has heard it, and only until then."""
    backend = runtime.current().backend
    stream = backend.stream("upload")
    assert isinstance(stream, CpuStream)
    backend.disturb = Break("copy", lambda: OSError("torn"))
    a, b = torch.zeros(4), torch.ones(4)
    stream.copy(a, b)
    with pytest.raises(FerryError, match="torn"):
        backend.synchronize()
    backend.disturb = None
    stream.copy(a, b)
    backend.synchronize()
    assert torch.equal(a, b)
