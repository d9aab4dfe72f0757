"""The profiler leaves no trace, knows every kind of layer, and marks what it must not use."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import BATCH, LENGTH, VOCAB, WIDTH, batches, make_model
from torch import nn
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend import arming, profile_cache, profile_table, profiler, runtime
from memferry_ascend.backends.base import Capabilities, HostSlab
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.layers import collect
from memferry_ascend.marks import ancestors, attribute
from memferry_ascend.planner import Profile
from memferry_ascend.updateprobe import HostUpdates

FP32 = mf.Config(precision="fp32")


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not what these tests are about."""
    monkeypatch.setattr(profiler, "PASSES", 2)
    monkeypatch.setattr(profiler, "DHA_PASSES", 2)
    monkeypatch.setattr(profiler, "MORE_PASSES", 2)
    monkeypatch.setattr("memferry_ascend.linkprobe.LARGE", 1 << 20)
    monkeypatch.setattr("memferry_ascend.linkprobe.REPEATS", 2)
    monkeypatch.setenv("MEMFERRY_CACHE", "")


class Everything(nn.Module):
    """Batch norm, dropout, a frozen layer, a tie, a layer called twice, a nested parameter, a module never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.frozen(self.norm(x.flatten(0, 1)).view_as(x))
        x = self.mix(x, x, x, need_weights=False)[0] * self.gain
        x = F.dropout(self.twice(F.relu(self.twice(x))), 0.2, self.training)
        random.random(), np.random.rand()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def run(model: nn.Module, batch: Any = None, config: mf.Config = FP32, backend: Any = None, **kw: Any) -> Any:
    rt = runtime.current() if backend is None else fake_runtime(backend)
    batch = batches(1)[0] if batch is None else batch
    optimizer = kw.pop("optimizer", None) or torch.optim.AdamW(model.parameters())
    return profiler.profile(model, optimizer, batch, rt, config, **kw)


def fake_runtime(backend: CpuBackend) -> runtime.Runtime:
    return runtime.Runtime(backend, "auto", None, 0, 1, 0, 1)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "params": [(id(p), p.data_ptr(), p.detach().clone(), p.dtype) for p in model.parameters()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "buffers": [(n, id(b), b.clone()) for n, b in model.named_buffers()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "param_hooks": [
            (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ()))
            for p in model.parameters()
        ],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "training": [m.training for m in model.modules()],
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_everything_is_left_as_it_was(precision: str) -> None:
    model = Everything()
    model(batches(1)[0]).backward()
    model.mix.out_proj.bias.grad = None
    before = snapshot(model)
    run(model, config=mf.Config(precision=precision, keep_fp32=("BatchNorm1d",)))
    after = snapshot(model)
    for name, value in before.items():
        assert equal(value, after[name]), name


@pytest.mark.usefixtures("cpu")
def test_a_failing_forward_is_an_error_and_leaves_everything() -> None:
    model, detached, ones = Everything(), nn.Sequential(nn.Linear(3, 3), Detach()), torch.ones(2, 3)
    before = snapshot(model)
    with pytest.raises(
        mf.FerryError, match=r"sample_batch: the model's forward failed with TypeError.*a tuple"
    ):
        run(model, {"wrong": batches(1)[0]})
    with pytest.raises(mf.FerryError, match="nothing in the model's output requires a gradient"):
        run(detached, ones)
    after = snapshot(model)
    for name, value in before.items():
        assert equal(value, after[name]), name


class Detach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


@pytest.mark.usefixtures("cpu")
def test_every_kind_of_layer_is_described() -> None:
    measured = run(Everything())
    profile: Profile = measured.profile
    names = [x.name for x in profile.layers]
    assert set(names) == {"", "embed", "norm", "frozen", "mix", "mix.out_proj", "twice", "head"}
    # the root owns `gain`; order is that of the first calls, a module that is never called stands behind its neighbour
    assert names == ["", "embed", "norm", "frozen", "mix", "mix.out_proj", "twice", "head"]
    assert profile["head"].shares == "embed"
    assert profile["head"].bytes == profile["embed"].bytes == VOCAB * WIDTH * 4
    assert not profile["frozen"].trainable and profile["twice"].trainable
    assert not profile["mix.out_proj"].dha_usable and profile["mix.out_proj"].t_fp == 0
    assert profile["mix"].dha_usable and profile["twice"].dha_usable
    assert profile["embed"].dha_bytes == min(BATCH * LENGTH * WIDTH * 4, profile["embed"].bytes)
    assert profile["frozen"].t_update == 0 < profile["mix"].t_update
    assert all(
        x.t_trans > 0 and math.isfinite(x.t_fp + x.t_bp + x.t_gap_fp + x.t_gap_bp) for x in profile.layers
    )
    assert profile.link.h2d > 0 and profile.link.duplex >= max(profile.link.h2d, profile.link.d2h)
    assert profile.base_bytes == 0
    notes = " ".join(measured.notes)
    assert "base_bytes is 0" in notes and "estimated" in notes
    assert Profile.from_json(profile.to_json()) == profile
    assert "mix.out_proj" in profile_table.describe(measured)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_recomputed_layers_are_marked(kind: str) -> None:
    profile = run(make_model(3, checkpoint=kind)).profile
    inside = [x for x in profile.layers if x.name.startswith("blocks.") and x.t_fp + x.t_bp > 0]
    assert inside
    assert all(
        x.recompute for x in profile.layers if x.name.startswith("blocks.") and "out_proj" not in x.name
    )
    assert not any(x.recompute for x in profile.layers if not x.name.startswith("blocks."))


@pytest.mark.usefixtures("cpu")
def test_a_parameter_read_elsewhere_is_no_candidate_for_host_reads() -> None:
    seed = next(s for s in range(50) if make_model(s).head_style == "functional")
    profile = run(make_model(seed)).profile
    assert not profile["embed"].dha_usable
    assert math.isfinite(profile["final"].t_fp_dha)


class RecordingBackend(CpuBackend):
    """Knows where mapped memory is, and may be told that some kinds cannot read it."""

    kinds: frozenset[str] = frozenset({"*"})

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.mapped: list[HostSlab] = []

    def alloc_host(self, nbytes: int, *, mapped: bool, shared: str | None = None) -> HostSlab:
        slab = super().alloc_host(nbytes, mapped=mapped, shared=shared)
        if mapped:
            self.mapped.append(slab)
        return slab

    def free_host(self, slab: HostSlab) -> None:
        self.mapped = [s for s in self.mapped if s is not slab]
        super().free_host(slab)

    def holds(self, t: torch.Tensor) -> bool:
        return any(s.host.data_ptr() <= t.data_ptr() < s.host.data_ptr() + s.nbytes for s in self.mapped)

    def capabilities(self) -> Capabilities:
        return Capabilities(dha_kinds=self.kinds, direct_kinds=frozenset())


class Fragile(nn.Linear):
    """A kernel that goes wrong on host memory."""

    backend: RecordingBackend
    fault = "wrong"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.backend.holds(self.weight):
            if self.fault == "crash":
                raise RuntimeError("illegal access")
            if self.fault == "nan":
                return out * float("nan")
            return out + 0.01
        return out


@pytest.fixture
def backend() -> Iterator[RecordingBackend]:
    made = RecordingBackend()
    yield made
    made.close()


@pytest.mark.parametrize("fault", ["wrong", "nan", "crash"])
def test_a_kind_with_wrong_results_from_host_memory_is_unusable(
    backend: RecordingBackend, fault: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fragile(4, 4), nn.LayerNorm(4), Fragile(4, 2))
    for m in (model[1], model[3]):
        m.backend, m.fault = backend, fault
    measured = run(model, torch.randn(3, 4), backend=backend)
    usable = {x.name: x.dha_usable for x in measured.profile.layers}
    assert usable == {"0": True, "1": False, "2": True, "3": False}
    assert all(x.dha_usable == x.dha_backward_usable for x in measured.profile.layers)
    assert any("not usable for Fragile: '1'" in note for note in measured.notes)


def test_what_the_backend_refuses_is_not_tried(backend: RecordingBackend) -> None:
    backend.kinds = frozenset({"LayerNorm"})
    model = nn.Sequential(Fragile(4, 4), nn.LayerNorm(4))
    model[0].backend, model[0].fault = backend, "crash"
    profile = run(model, torch.randn(3, 4), backend=backend).profile
    assert [x.dha_usable for x in profile.layers] == [False, True]
    assert not backend.mapped  # all of it was given back


def test_a_model_larger_than_the_device_is_measured_through_a_slot(backend: RecordingBackend) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    total = sum(p.numel() * 4 for p in model.parameters())
    backend.limit = total // 3
    batch = torch.randn(8, 64)
    before = snapshot(model)
    measured = run(model, batch, backend=backend)
    assert backend.memory_stats().peak <= backend.limit
    assert any("through a slot" in note for note in measured.notes)
    assert all(x.t_fp > 0 and x.t_bp > 0 for x in measured.profile.layers)
    for name, value in snapshot(model).items():
        assert equal(value, before[name]), name
    backend.limit = 1000
    with pytest.raises(mf.FerryError, match="largest layer does not fit"):
        run(model, torch.randn(8, 64), backend=backend)


def test_a_config_budget_bounds_the_measurement_too(backend: RecordingBackend) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    total = sum(p.numel() * 4 for p in model.parameters())
    run(model, torch.randn(8, 64), mf.Config(precision="fp32", device_memory=total // 3), backend)
    assert backend.memory_stats().peak <= total // 3


@pytest.mark.usefixtures("cpu")
def test_the_cache_is_hit_by_the_same_and_missed_by_anything_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MEMFERRY_CACHE", str(tmp_path))
    first = run(make_model(1))
    again = run(make_model(1))
    assert (first.cached, again.cached) == (False, True)
    assert again.profile == first.profile and again.notes == first.notes
    assert not run(make_model(1), refresh=True).cached
    assert not run(make_model(1), torch.cat([batches(1)[0]] * 2)).cached
    assert not run(make_model(2)).cached
    assert not run(make_model(1).eval()).cached
    assert not run(make_model(1), config=mf.Config(precision="bf16")).cached
    frozen = make_model(1)
    frozen.final.requires_grad_(False)
    assert not run(frozen).cached
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not run(make_model(1)).cached
    monkeypatch.undo()


@pytest.mark.usefixtures("cpu")
def test_the_key_holds_what_times_depend_on() -> None:
    model = make_model(1)
    layers = collect(model, "fp32", ())
    rt, batch = runtime.current(), batches(1)[0]

    def key(optimizer: torch.optim.Optimizer, config: mf.Config = FP32, batch: Any = batch) -> str:
        parts = profiler.depends_on(model, layers, optimizer, rt, config, batch)
        return profile_cache.key_of(parts)

    adamw = torch.optim.AdamW(model.parameters())
    assert key(adamw) == key(torch.optim.AdamW(model.parameters(), lr=3))
    others = {
        key(adamw),
        key(torch.optim.SGD(model.parameters(), lr=1)),
        key(adamw, mf.Config(precision="fp32", device_memory="1GiB")),
        key(adamw, batch=(batch, 1)),
        key(adamw, batch=(batch, 2)),
        key(adamw, batch={"tokens": batch}),
    }
    assert len(others) == 6
    assert {"backend", "device", "about"} <= set(rt.backend.identity())


@pytest.mark.usefixtures("cpu")
def test_a_damaged_or_unwritable_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MEMFERRY_CACHE", str(tmp_path))
    run(make_model(1))
    (file,) = (tmp_path / "profiles").iterdir()
    file.write_text("{ not json")
    assert not run(make_model(1)).cached
    assert run(make_model(1)).cached  # written again
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFERRY_CACHE", str(tmp_path / "file"))
    assert not run(make_model(1)).cached


def test_time_is_shared_among_layers_and_gaps() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))
            self.inner = nn.Linear(2, 2)

    model = nn.Sequential(nn.Linear(2, 2), Outer(), nn.Linear(2, 2))
    layers = collect(model, "fp32", ())  # 0, 1, 1.inner, 2
    assert [x.name for x in layers] == ["0", "1", "1.inner", "2"]
    inside = ancestors(layers)
    assert inside == [frozenset(), frozenset(), frozenset({1}), frozenset()]
    marks = [
        ("forward", -1, 0.0),
        ("enter", 0, 1.0),
        ("leave", 0, 3.0),
        ("enter", 1, 4.0),
        ("enter", 2, 6.0),
        ("leave", 2, 9.0),
        ("leave", 1, 13.0),
        ("enter", 3, 18.0),
        ("leave", 3, 24.0),
        ("loss", -1, 31.0),
        ("begin", 3, 32.0),
        ("end", 3, 40.0),
        ("begin", 1, 42.0),
        ("begin", 2, 45.0),
        ("end", 2, 49.0),
        ("end", 1, 54.0),
        ("begin", 0, 60.0),
        ("enter", 0, 61.0),  # recomputed
        ("leave", 0, 64.0),
        ("end", 0, 67.0),
        ("done", -1, 70.0),
    ]
    spent = attribute(marks, inside)
    assert spent.forward == [3.0, 6.0, 3.0, 6.0]  # 1 s before the first layer counts for it
    assert spent.gap_forward == [1.0, 5.0, 0.0, 7.0]
    assert spent.backward == [
        7.0,
        8.0,
        4.0,
        8.0,
    ]  # the last one ends with the pass; 3 s recomputed are not backward
    assert spent.gap_backward == [6.0, 2.0, 0.0, 1.0]
    assert spent.order == [0, 1, 2, 3] and spent.recomputed == {0}
    assert sum(b - a for _, what, a, b in spent.spans if what == "recompute") == 3.0


def test_parallel_branches_do_not_nest() -> None:
    """Queries, keys and values read one input: its gradient is complete only after the last of them."""
    inside = [frozenset[int]()] * 3
    marks = [
        ("loss", -1, 0.0),
        ("begin", 2, 1.0),
        ("begin", 1, 3.0),  # no end of 2 before
        ("begin", 0, 6.0),
        ("end", 2, 10.0),
        ("end", 1, 10.0),
        ("end", 0, 10.0),
        ("done", -1, 12.0),
    ]
    spent = attribute(marks, inside)
    assert spent.backward == [6.0, 3.0, 2.0]


@pytest.mark.parametrize("count", [1, 6])
def test_updates_are_timed_over_as_much_memory_as_the_model_has(count: int, cpu: runtime.Runtime) -> None:
    """One layer again and again would be timed in the processor's caches."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))
    optimizer = torch.optim.AdamW(model.parameters())
    arming.assign_groups([p for layer in collect(model, "bf16", ()) for p in layer.params], optimizer)
    updates = HostUpdates(collect(model, "bf16", ()), optimizer, cpu.backend, True)
    try:
        numel, alike = updates._updates[-1]
        assert (numel, len(alike)) == (64 * 64, count)
        assert len({update.memory.state["m"].host.data_ptr() for update, _ in alike}) == count
        seen: list[int] = []
        for k, (update, _) in enumerate(alike):
            update.run = lambda *_, k=k: seen.append(k)
        for _ in range(2 * count):
            updates.run_largest()
        assert sorted(seen[:count]) == list(range(count)) and seen[:count] == seen[count:]
    finally:
        updates.close()
