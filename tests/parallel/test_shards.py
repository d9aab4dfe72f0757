"""Cuts of random units: every element is owned once, and offsets are the unit's own; memory shared by name."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memferry_ascend as mf
from memferry_ascend.arena import Layout
from memferry_ascend.backends.hostmem import SHARED_FOLDER, forget
from memferry_ascend.layers import Param, Unit
from memferry_ascend.planner import LayerPlan, Mode
from memferry_ascend.shards import Cut, ShardMemory


def unit_of(sizes: list[tuple[int, bool, bool]]) -> Unit:
    params = [
        Param(
            i,
            f"p{i}",
            nn.Parameter(torch.empty(n), requires_grad=trains),
            torch.float32 if wide else torch.bfloat16,
            trains,
        )
        for i, (n, wide, trains) in enumerate(sizes)
    ]
    return Unit(0, [], LayerPlan("x", Mode.GFGB), params)


sizes = st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(sizes=sizes, ranks=st.integers(1, 9))
def test_every_element_has_one_owner(sizes: list[tuple[int, bool, bool]], ranks: int) -> None:
    unit = unit_of(sizes)
    layout, cut = Layout(unit), Cut(unit, ranks)
    assert cut.chunk % 512 == 0
    assert cut.chunk * ranks >= layout.nbytes
    owners = {p.index: [0] * p.numel for p in unit.params}
    packed_end = 0
    for rank in range(ranks):
        memory = ShardMemory(unit, cut, rank)
        first, last = cut.bounds(rank)
        assert last - first <= cut.chunk
        for piece in memory.pieces:
            for e in range(piece.start, piece.start + piece.count):
                owners[piece.index][e] += 1
            # Laying out the pieces gives the unit's own offsets, less the chunk's start.
            at = layout.places[piece.index].offset + piece.start * piece.dtype.itemsize
            assert memory.layout.places[piece.index].offset == at - first
        for run in cut.runs[rank]:
            assert run.placed + run.nbytes <= memory.layout.nbytes
            assert run.packed + run.nbytes <= cut.packed[rank]
        packed_end += cut.packed[rank]
    assert all(count == 1 for counts in owners.values() for count in counts)
    assert packed_end == cut.total
    taken = sorted(
        (at, at + count * unit.params[i].dtype.itemsize) for i, s in cut.sends.items() for at, _, count in s
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    assert sum(n for s in cut.sends.values() for _, _, n in s) == sum(
        p.numel for p in unit.params if p.trainable
    )


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_an_exchange_puts_gradients_in_their_places(
    sizes: list[tuple[int, bool, bool]], ranks: int, seed: int
) -> None:
    unit = unit_of(sizes)
    cut = Cut(unit, ranks)
    g = torch.Generator().manual_seed(seed)
    grads = {p.index: torch.randn(p.numel, generator=g).to(p.dtype) for p in unit.params if p.trainable}
    send = torch.zeros(cut.total, dtype=torch.uint8)
    for index, grad in grads.items():
        for at, start, count in cut.sends.get(index, ()):
            nbytes = count * grad.element_size()
            send[at : at + nbytes].view(grad.dtype).copy_(grad[start : start + count])
    base = 0
    for rank in range(ranks):
        memory = ShardMemory(unit, cut, rank)
        chunk = torch.full((max(memory.layout.nbytes, 1),), 77, dtype=torch.uint8)
        for run in cut.runs[rank]:
            packed = send[base + run.packed : base + run.packed + run.nbytes]
            chunk[run.placed : run.placed + run.nbytes] = packed
        for piece in memory.pieces:
            at = memory.layout.places[piece.index].offset
            if piece.trainable:
                got = chunk[at : at + piece.nbytes].view(piece.dtype)
                assert torch.equal(got, grads[piece.index][piece.start : piece.start + piece.count])
        base += cut.packed[rank]


def test_shared_memory_has_one_content_and_leaves_no_name(cpu: mf.Runtime) -> None:
    name = f"memferry-test-{os.getpid()}"
    one = cpu.backend.alloc_host(10_000, mapped=True, shared=name)
    two = cpu.backend.alloc_host(10_000, mapped=True, shared=name)
    assert int(one.host.sum()) == 0
    one.host[17] = 5
    assert two.device is not None
    assert int(two.device[17]) == 5
    forget(name)
    forget(name)
    assert not os.path.exists(os.path.join(SHARED_FOLDER, name))
    two.host[18] = 6
    assert int(one.host[18]) == 6
    cpu.backend.free_host(one)
    assert int(two.host[17]) == 5  # the other process's memory stays
    cpu.backend.free_host(two)


def test_shared_memory_that_does_not_fit_is_refused(cpu: mf.Runtime) -> None:
    name = f"memferry-test-{os.getpid()}-large"
    free = os.statvfs(SHARED_FOLDER)
    try:
        with pytest.raises(mf.FerryError, match="shared between ranks through /dev/shm: make it larger"):
            cpu.backend.alloc_host(free.f_blocks * free.f_frsize * 4 + (1 << 40), mapped=False, shared=name)
    finally:
        forget(name)


def test_simulated_links_fall_and_collectives_take_over() -> None:
    from memferry_ascend.bench import scaling

    machine, work = scaling.Machine(), scaling.Workload(layers=4)
    rows = {n: scaling.simulate(machine, work, n, "backward", "node") for n in (1, 2, 4, 16, 384)}
    assert rows[1]["busy"]["fabric"] == 0
    for n in (2, 4, 16):
        assert rows[n]["busy"]["h2d"] == pytest.approx(rows[1]["busy"]["h2d"] / n, rel=0.1)
        assert rows[n]["busy"]["host"] == pytest.approx(rows[1]["busy"]["host"] / n, rel=1e-3)
        assert rows[n]["seconds"] < rows[1]["seconds"]
    assert scaling.overtaken(list(rows.values())) == math.ceil(machine.fabric_near / machine.link)
    assert rows[384]["busy"]["fabric"] > rows[16]["busy"]["fabric"]
