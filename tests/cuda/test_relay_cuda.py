"""Relays over two logical paths of one GPU (the staging buffers lie on the same device), and the probe."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import assert_same, make_model, plan_of, random_plan, train
from memferry_ascend.topology import Measured, MeasuredPath, PathSet, probe
from memferry_ascend.topology.measured import Figures

import memferry_ascend as mf
from memferry_ascend import assist, runtime
from memferry_ascend.backends.base import NotSupported
from memferry_ascend.planner import Mode
from memferry_ascend.transfers import Transfers


def needs_native() -> None:
    if runtime.current().backend.driver() is None:
        pytest.skip("needs the native extension")


def equal_paths() -> dict[str, PathSet]:
    """Two paths of equal figures, so that every copy is divided."""
    figures = Figures(0.0, 5e10)
    measured = Measured(
        "one",
        (
            MeasuredPath("direct", "host", "cuda:0", None, figures, figures),
            MeasuredPath("via cuda:0", "host", "cuda:0", "cuda:0", figures, figures),
        ),
    )
    return {d: measured.paths("cuda:0", direction=d) for d in ("h2d", "d2h")}


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [1, 512, 70_001, (8 << 20) + 13])
def test_relays_deliver_in_both_directions(nbytes: int, slots: int) -> None:
    needs_native()
    backend = runtime.current().backend
    slab = backend.alloc_host(nbytes, mapped=True)
    device = backend.alloc_device(nbytes)[:nbytes]
    up, down = backend.stream("upload"), backend.stream("download")
    done = backend.event()
    for _ in range(3):
        want = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        slab.host.copy_(want)
        device.zero_()
        backend.synchronize()
        backend.relay(up, device, slab.host, peer=0, chunk=64 << 10, slots=slots)
        backend.relays_done(up)
        up.record(done)
        done.synchronize()
        assert torch.equal(device.cpu(), want)
        slab.host.zero_()
        backend.relay(down, slab.host, device, peer=0, chunk=64 << 10, slots=slots)
        backend.relays_done(down)
        down.synchronize()
        assert torch.equal(slab.host, want)
    backend.free_host(slab)


def test_transfers_divide_copies_of_the_engines_streams() -> None:
    needs_native()
    backend = runtime.current().backend
    carried = Transfers(backend, equal_paths(), peers={"cuda:0": 0})
    carried.install()
    n = (16 << 20) + 77
    slab, device = backend.alloc_host(n, mapped=True), backend.alloc_device(n)[:n]
    want = torch.randint(0, 256, (n,), dtype=torch.uint8)
    slab.host.copy_(want)
    up, down = backend.stream("upload"), backend.stream("download")
    up.copy(device, slab.host)
    up.synchronize()
    assert torch.equal(device.cpu(), want)
    slab.host.zero_()
    ready, done = backend.event(), backend.event()
    down.copy_behind(backend.compute, [(slab.host, device)], ready, done)
    done.synchronize()
    assert torch.equal(slab.host, want)
    assert carried.moved["via cuda:0"] > n / 2 and carried.moved["direct"] > n / 2
    carried.close()
    backend.free_host(slab)


def test_a_peer_that_is_absent_is_left_out() -> None:
    needs_native()
    backend = runtime.current().backend
    carried = Transfers(backend, equal_paths(), peers={"cuda:0": 99})
    carried.install()
    n = 8 << 20
    slab, device = backend.alloc_host(n, mapped=True), backend.alloc_device(n)
    slab.host.copy_(torch.randint(0, 256, (n,), dtype=torch.uint8))
    with pytest.raises(NotSupported, match="device 99 is absent"):
        backend.relay(backend.stream("upload"), device, slab.host, peer=99, chunk=4096)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            backend.stream("upload").copy(device, slab.host)
            backend.stream("upload").synchronize()
            assert torch.equal(device.cpu(), slab.host)
    assert len([w for w in seen if w.category is RuntimeWarning]) == 1
    carried.close()
    backend.free_host(slab)


@pytest.mark.parametrize("seed", range(3))
def test_training_with_assistance_is_bit_identical(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_native()
    model = make_model(seed)
    want = train(model, plan_of(model, Mode.GFGB), serial=True)

    def for_engine(rt: runtime.Runtime, _config: mf.Config) -> Transfers:
        made = Transfers(rt.backend, equal_paths(), peers={"cuda:0": 0}, chunk=512)
        made.install()
        return made

    monkeypatch.setattr(assist, "for_engine", for_engine)
    model = make_model(seed)
    config = mf.Config(precision="fp32", assist_devices=(1,))
    assert_same(want, train(model, random_plan(model, seed), config=config))


def test_the_probe_measures_the_direct_path() -> None:
    found = probe(runtime.current().backend, sizes=[4 << 10, 1 << 20, 32 << 20], repeats=3)
    direct = found.measured[0]
    assert (direct.name, direct.device, direct.via) == ("direct", "cuda:0", None)
    assert direct.h2d is not None and direct.d2h is not None
    assert len(direct.h2d.samples) == len(direct.d2h.samples) == 9
