"""Gradients kept, staged and written by kernels on emulated NPUs whose tasks come late: the same bits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness import ALL_POINTS, Delays, assert_same, make_model, plan_of, poisoned, train
from placements import direct_model, placed_plan, tables
from test_equality_ascend import able, route  # noqa: F401
from torch import nn

import memferry_ascend as mf
from memferry_ascend import direct, runtime
from memferry_ascend.backends.base import DIRECT_KINDS
from memferry_ascend.gradients import Gradients
from memferry_ascend.planner import Grad, Mode, Plan

EMULATED = {"devices": 2, "jitter": "2000:1"}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parameters whose gradients kernels wrote to the host, one for each time."""
    names: list[str] = []
    before = Gradients.direct_written

    def note(gradients: Gradients, ug: object, s: object) -> None:
        names.append(s.p.name)  # type: ignore[attr-defined]
        before(gradients, ug, s)  # type: ignore[arg-type]

    monkeypatch.setattr(Gradients, "direct_written", note)
    return names


def placed(model: nn.Module, seed: int) -> Plan:
    """Random modes and placements, of which this device can do all but some modes."""
    plan = placed_plan(model, seed)
    modes = {x.name: x.mode for x in able(model, {x.name: x.mode for x in plan.layers}.__getitem__).layers}
    return Plan(tuple(replace(x, mode=modes[x.name]) for x in plan.layers))


def test_all_kinds_write_host_memory_here() -> None:
    assert runtime.current().backend.capabilities().direct_kinds == DIRECT_KINDS


@pytest.mark.pairwise
@pytest.mark.parametrize("grad", list(Grad))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_every_placement_has_the_bits_of_the_serial_plan(
    grad: Grad, precision: str, update: str, written: list[str]
) -> None:
    model = direct_model(3)
    want = train(
        model, plan_of(model, Mode.GFGB), config=mf.Config(precision=precision), steps=4, serial=True
    )
    assert not written or set(written) == {"tokens.weight"}  # a table of which a batch touches little
    written.clear()
    model = direct_model(3)
    config = mf.Config(precision=precision, update=update)
    with poisoned():
        got = train(model, plan_of(model, Mode.STREAM, grad=grad), config=config, steps=4)
    assert_same(want, got)
    if grad is Grad.DIRECT:
        # The first step shows who reads what; mix's input is not contiguous.
        assert sorted(written) == sorted(3 * [n for n, _ in model.named_parameters() if n != "mix.weight"])


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_random_placements_with_delays(seed: int, written: list[str]) -> None:
    make: Callable[[], nn.Module] = lambda: direct_model(seed) if seed % 2 else make_model(seed)  # noqa: E731
    micro = 1 + seed // 2
    config = mf.Config(precision="bf16" if seed < 2 else "fp32", accumulate=micro)
    model = make()
    want = train(model, plan_of(model, Mode.GFGB), config=config, micro=micro, steps=4, serial=True)
    written.clear()
    model = make()
    with poisoned():
        got = train(
            model,
            placed(model, seed + 1),
            config=config,
            micro=micro,
            steps=4,
            unit_bytes=1,
            disturb=Delays(ALL_POINTS, seed, most=0.0005),
        )
    assert_same(want, got)
    assert written


def test_a_staged_table_sends_the_touched_rows_alone(
    written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tables(1)
    with monkeypatch.context() as without:
        without.setattr(direct, "MOST_ROWS", -1.0)
        want = train(model, plan_of(model, Mode.GFGB), steps=4, serial=True)
    assert not written
    model = tables(1)
    got = train(model, plan_of(model, Mode.STREAM), steps=4)
    assert_same(want, got)
    assert set(written) == {"words.weight"}


def test_scattering_rows_does_not_wait_for_the_device() -> None:
    """The compute stream is stopped until the last kernel has been queued; who waits for it is let go much later."""
    backend = runtime.current().backend
    slab = backend.alloc_host(32 * 16 * 4, mapped=True)
    assert slab.device is not None
    alias, host = (side.view(torch.float32).view(32, 16) for side in (slab.device, slab.host))
    grad, indices = torch.randn(2, 3, 16), torch.tensor([[3, 1, 3], [0, 5, 1]])
    there = grad.to(backend.device), indices.to(backend.device)
    host.fill_(float("nan"))
    emulated, stream = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    waited = threading.Event()
    rescue = threading.Timer(20, lambda: (waited.set(), emulated.emuReleaseAll()))
    assert emulated.emuHoldStream(stream, 1) == 0
    rescue.start()
    direct._scatter_rows(*there, 3, alias)
    rescue.cancel()
    rescue.join()
    assert not waited.is_set()
    assert torch.isnan(host).all()
    assert emulated.emuHoldStream(stream, 0) == 0
    backend.synchronize()
    assert torch.equal(host, torch.ops.aten.embedding_dense_backward(grad, indices, 32, 3, False))
    backend.free_host(slab)
