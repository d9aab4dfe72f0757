"""Several ranks over the emulated HCCL: its rules, the collectives, training in parallel, and how ranks end together."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import children
import emulator
import pytest
import ranks
import torch
from parallel import test_train, world
from parallel.test_parallel import same

import memferry_ascend as mf


@pytest.fixture(autouse=True)
def _emulator_runs_here() -> None:
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")


# -- rules: no torch ---------------------------------------------------------------------------------------------------
in_child = functools.partial(
    children.in_child,
    "import os; os.environ.update(HCCL_EXEC_TIMEOUT='1', HCCL_CONNECT_TIMEOUT='1')\n"
    "from runtime import *\nfrom hccl import *",
    devices=4,
)
"""HCCL's time limits are a second."""

# ruff: noqa: F821 (the bodies see the names of hccl.py and runtime.py)
# mypy: ignore-errors


@in_child()
def test_sums_are_in_rank_order() -> None:
    def body(rank, comm, stream):
        # Added in another order, the small numbers survive.
        x = floats([1.0, 1e8, -1e8, 1.0][rank])
        assert all_reduce(x, x, 1, comm, stream) == 0
        assert synchronize(stream) == 0
        assert read(x, 1) == [1.0]  # ((1 + 1e8) - 1e8) + 1 in fp32
        assert destroy(comm) == 0
        assert destroy(comm) == PARAMETER
        assert all_reduce(x, x, 1, comm, stream) == PARAMETER

    ranks(4, body)


@in_child()
def test_calls_are_checked_before_anything_is_queued() -> None:
    """
    - HcclAllReduce: data type 33 is not emulated
    - HcclAllReduce: reduction 0 of data type 7 is not emulated
    - HcclBroadcast: root 2 of 2 ranks
    - HcclAllGather: not a stream of the current device
    - HcclSend: rank 0 has no peer 0 among 2 ranks
    - HcclCommInitAll is not emulated
    """

    def body(rank, comm, stream):
        x = floats(1.0, 2.0)
        if rank == 0:
            assert all_reduce(0, x, 2, comm, stream) == POINTER
            assert all_gather(x, 0, 1, comm, stream) == POINTER
            assert all_reduce(x, x, 1, comm, stream, kind=33) == UNSUPPORTED
            assert all_reduce(x, x, 1, comm, stream, kind=UINT8) == UNSUPPORTED
            assert all_reduce(x, x, 1, comm, stream, op=7) == UNSUPPORTED
            assert broadcast(x, 1, 2, comm, stream) == PARAMETER
            assert send(x, 1, 0, comm, stream) == PARAMETER
            assert set_device(3) == 0
            assert all_gather(x, x, 1, comm, stream) == PARAMETER
            assert all_gather(x, x, 1, comm, new_stream()) == PARAMETER
            assert set_device(0) == 0
            assert lib.HcclCommInitAll(2, None, None) == UNSUPPORTED
        # What was refused is not counted: the ranks are still at one place.
        assert barrier(comm, stream) == 0
        assert synchronize(stream) == 0

    ranks(2, body)


@in_child()
def test_operands_are_memory_of_the_device() -> None:
    """
    - HcclAllReduce: an operand is host memory mapped on device 0, expected the device's
    - HcclAllReduce: 12 bytes at
    """

    def body(rank, comm, stream):
        if rank == 0:
            host = pages(4096)
            assert register(host, 4096) == 0
            x = device_pointer(host)[1]
        else:
            x = floats(1.0)
        assert all_reduce(x, x, 1, comm, stream) == 0  # found out when it runs, as by hardware
        assert synchronize(stream) != 0
        assert async_error(comm) == (PARAMETER if rank == 0 else TIMEOUT)

    ranks(2, body)

    def too_long(rank, comm, stream):
        x = malloc(4096)[1] + 4096 - 8
        assert all_reduce(x, x, 3, comm, stream) == 0
        assert synchronize(stream) != 0
        assert async_error(comm) == RUNTIME

    ranks(2, too_long)


@in_child()
def test_ranks_that_call_differently_are_all_told() -> None:
    """
    - HcclAllReduce: rank 0 has count 2, type 4, reduction 0, root 0; rank 1 has 1, 4, 0, 0
    - operation 0 of rank 0 is HcclAllReduce, operation 0 of rank 1 is HcclBarrier
    - HcclAlltoAllV: rank 0 sends 8 bytes to rank 1, which expects 4
    """

    def counts(rank, comm, stream):
        x = floats(1.0, 2.0)
        assert all_reduce(x, x, 2 - rank, comm, stream) == 0
        assert synchronize(stream) == FAILED
        assert async_error(comm) == PARAMETER
        assert barrier(comm, stream) == 0  # queued, and refused: the communicator is of no more use
        assert synchronize(stream) == FAILED
        assert read(x, 2) == [1.0, 2.0]

    def operations(rank, comm, stream):
        x = floats(1.0, 2.0)
        assert (barrier(comm, stream) if rank else all_reduce(x, x, 2, comm, stream)) == 0
        assert synchronize(stream) == FAILED

    def splits(rank, comm, stream):
        x, y = floats(1.0, 2.0, 3.0, 4.0), floats(0.0, 0.0, 0.0, 0.0)
        assert all_to_all(x, [8, 8], y, [8, 8] if rank == 0 else [4, 8], comm, stream) == 0
        assert synchronize(stream) == FAILED

    for body in (counts, operations, splits):
        ranks(2, body)


@in_child()
def test_a_rank_that_is_gone_is_waited_for_until_the_time_limit() -> None:
    """
    - HcclBarrier: rank 0 waited 1 s for rank 1 (HCCL_EXEC_TIMEOUT)
    - HcclRecv: rank 1 waited 1 s for rank 2 (HCCL_EXEC_TIMEOUT)
    """
    import time

    def body(rank, comm, stream):
        if rank == 2:
            os._exit(0)  # as if it was killed
        x = floats(1.0)
        began = time.monotonic()
        assert (barrier(comm, stream) if rank == 0 else receive(x, 1, 2, comm, stream)) == 0
        assert async_error(comm) == 0  # not yet
        assert destroy(comm) == 0 if rank == 1 else True  # which does not free the stream
        assert synchronize(stream) == EXECUTION_TIMEOUT
        assert time.monotonic() - began > 0.9
        if rank == 0:
            assert async_error(comm) == TIMEOUT

    ranks(3, body)


@in_child()
def test_ranks_that_do_not_fit_together_do_not_meet() -> None:
    """
    - HcclCommInitRootInfo: ranks 0 and 1 are both on device 1
    - HcclCommInitRootInfo: rank 0 counts 2 ranks, rank 1 3
    - HcclCommInitRootInfo: rank 1 did not come within 1 s (HCCL_CONNECT_TIMEOUT)
    - HcclCommInitRootInfo: not a root info of HcclGetRootInfo
    """

    def same_device(rank, info):
        assert set_device(1) == 0
        assert join(2, info, rank)[0] == PARAMETER

    def sizes(rank, info):
        assert set_device(rank) == 0
        assert join(2 + rank, info, rank)[0] in (PARAMETER, TIMEOUT)

    def alone(rank, info):
        assert set_device(0) == 0
        assert join(2, info, 0)[0] == TIMEOUT
        assert join(2, b"nothing", 0)[0] == PARAMETER
        assert join(2, info, 2)[0] == PARAMETER

    for size, body in ((2, same_device), (2, sizes), (1, alone)):
        assert fork(size, body) == [0] * size


@in_child(fail="HcclAllGather:2:19")
def test_calls_fail_on_request() -> None:
    def body(rank, comm, stream):
        x = floats(1.0, 2.0)
        assert all_gather(x, x, 1, comm, stream) == 0
        assert all_gather(x, x, 1, comm, stream) == 19
        assert synchronize(stream) == 0

    ranks(2, body)


# -- torch.distributed -------------------------------------------------------------------------------------------------
COLLECTIVES: ranks.Cases = [
    (f"collectives:{name}", {}) for name in ("reductions", "moves", "in_stream_order")
]
CLIPPED = {"micro": 2, "config": {"precision": "bf16", "max_grad_norm": 0.05}}
LAST: dict[str, ranks.Cases] = {"two": [("parallel.cases:gives_up", {})]}
"""Afterwards ranks are not at one place."""
SLOW = {"delays": 0.002, "unit_bytes": 1}
"""Hand-overs wait, longer on one rank, and every layer is a unit."""

# Runs of one group must agree bit for bit, whatever their plan, their delays and when updates start.
PLAIN = [{"modes": "GFGB"}, {"modes": "GFGB"} | SLOW]
MANY = [
    PLAIN,
    [{"modes": "GFGB"} | CLIPPED, {"modes": "GFGB"} | CLIPPED | SLOW],
    [
        {"modes": "GFGB", "micro": 2, "seed": 3, "config": {"update": "step"}},
        {"modes": "GFGB", "micro": 2, "seed": 3, "config": {"update": "backward"}} | SLOW,
    ],
    [{"modes": "GFGB", "micro": 2, "seed": 2, "no_sync": True} | more for more in ({}, SLOW)],
]
MODES = [
    [{"modes": m} for m in ("GFGB", "DHA")] + [{"modes": m} | SLOW for m in ("STREAM", "DFGB", "random")],
    [{"modes": m, "seed": 3} | CLIPPED | more for m, more in (("GFGB", {}), ("random", SLOW))],
]
OLD_KERNEL = {"EMU_OLD_KERNEL": "1"}
"""Registers no memory that ranks could share, which modes other than GFGB take."""
TRAINED: dict[str, tuple[int, dict[str, str], list[list[dict[str, Any]]]]] = {
    "two": (2, OLD_KERNEL, MANY),
    "four": (4, {}, [PLAIN]),
    "shared": (2, {}, MODES),
}
"""Ranks, environment, groups."""
BESIDES: dict[str, ranks.Cases] = {
    "two": [*COLLECTIVES, ("parallel.cases:planned", {}), ("parallel.cases:one_mode", {"modes": "STREAM"})],
    "four": COLLECTIVES,
    "shared": [
        ("parallel.cases:planned", {}),
        ("parallel.cases:edits", {"modes": "random", "precision": "bf16"}),
    ],
}
"""What they run first."""


class World:
    """What the ranks of one world returned."""

    def __init__(self, name: str, results: list[list[Any]]) -> None:
        self.size, _, self.groups = TRAINED[name]
        n = len(BESIDES[name])
        self.besides = {
            case.rpartition(":")[2]: found
            for (case, _), found in zip(BESIDES[name], results[:n], strict=True)
        }
        self.trained = results[n:]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, profile_cache: Path) -> dict[str, World]:
    """All at the same time. Streams are delayed."""
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")
    wanted = [
        (
            size,
            more,
            [
                *BESIDES[name],
                *(("train", {"steps": 3} | run) for group in groups for run in group),
                *LAST.get(name, []),
            ],
            tmp_path_factory.mktemp(name),
        )
        for name, (size, more, groups) in TRAINED.items()
    ]
    found = ranks.launch(wanted, profile_cache, jitter=500)
    return {name: World(name, results) for name, results in zip(TRAINED, found, strict=True)}


@pytest.fixture
def ranks_of(request: pytest.FixtureRequest, worlds: dict[str, World]) -> World:
    return worlds[request.param]


@pytest.mark.parametrize("ranks_of", ["two", "four"], indirect=True)
def test_collectives_equal_torchs_arithmetic(ranks_of: World) -> None:
    for name in ("reductions", "moves", "in_stream_order"):
        assert ranks_of.besides[name] == ["right"] * ranks_of.size, name


@pytest.mark.parametrize("ranks_of", list(TRAINED), indirect=True)
def test_ranks_train_to_the_same_bits_and_to_one_ranks_losses(ranks_of: World, cpu: mf.Runtime) -> None:
    results = iter(ranks_of.trained)
    for group in ranks_of.groups:
        found = [next(results) for _ in group]
        want = found[0][0]
        assert len(want["hashes"]) == 3
        for run, got in zip(group, found, strict=True):
            assert len(got) == ranks_of.size
            for r in got:
                assert r["losses"] == want["losses"], run
                assert r["norms"] == want["norms"], run
                assert r["hashes"] == ([] if "delays" in run else want["hashes"]), run
                assert same(r["state"]["model"], want["state"]["model"]), run
                assert same(r["state"]["optimizer"], want["state"]["optimizer"]), run
                assert r["closed"] == want["closed"], run
        torch.manual_seed(0)
        alone = world.train(**{"steps": 3} | group[0])
        rel = 2e-2 if group[0].get("config", {}).get("precision") == "bf16" else 1e-5
        assert want["losses"] == pytest.approx(alone["losses"], rel=rel), group[0]
        assert want["norms"] == pytest.approx(alone["norms"], rel=rel), group[0]


def test_ranks_that_share_no_memory_are_planned_and_kept_to_gfgb(worlds: dict[str, World]) -> None:
    for modes in worlds["two"].besides["planned"]:
        assert set(modes) == {"GFGB"}
    for said in worlds["two"].besides["one_mode"]:
        assert "layer 'embed' is STREAM, but only GFGB layers run with several ranks here" in said
        assert "507899" in said
    for modes in worlds["shared"].besides["planned"]:
        assert "DHA" in modes


def test_ranks_edit_memory_that_they_share(worlds: dict[str, World]) -> None:
    first, other = worlds["shared"].besides["edits"]
    assert same(first, other)


def test_nobody_waits_for_a_rank_that_has_given_up(worlds: dict[str, World]) -> None:
    said, other = worlds["two"].trained[-1]
    assert other == "gave up"
    assert "first cause: rank 1: the disk with the text is full" in said


# -- programs ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_train_under_torchrun_equals_gloo_on_the_cpu(tmp_path: Path, profile_cache: Path) -> None:
    words = test_train.words(tmp_path, "cpu", "--steps", "4")
    (codes, said), *_ = test_train.tiny(tmp_path / "forked", 2, [(words, {})])
    assert codes == [0, 0], said
    on_npu = [
        "ascend" if word == "cpu" else word for word in test_train.words(tmp_path, "npu", "--steps", "4")
    ]
    environ = emulator.environment(2) | {"OMP_NUM_THREADS": "1", "MEMFERRY_CACHE": str(profile_cache)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ranks.TESTS), environ["PYTHONPATH"]])
    launcher = [*(sys.executable, "-m", "torch.distributed.run", "--standalone"), "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "parallel.train_tiny", *on_npu],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    want, got = test_train.recorded(tmp_path / "cpu"), test_train.recorded(tmp_path / "npu")
    assert [r["step"] for r in got] == [1, 2, 3, 4]
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, profile_cache: Path) -> Path:
    """Programs of two ranks that end in several ways, next to each other."""
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")
    folder = tmp_path_factory.mktemp("endings")
    kinds = ["killed", "raises", "late", "unclosed", "destroyed"]
    ranks.learn(profile_cache)
    environ = {"MEMFERRY_CACHE": str(profile_cache)}
    emulator.run(ranks.program(f"endings({str(folder)!r}, {kinds!r})"), timeout=240.0, environ=environ)
    return folder


def ending(folder: Path, kind: str) -> list[tuple[int, float, str]]:
    """(exit code, when, what it said) by rank."""
    out = []
    for rank in range(2):
        ended = json.loads((folder / f"{kind}-{rank}.json").read_text())
        out.append((ended["code"], ended["time"], (folder / f"{kind}-{rank}.txt").read_text()))
    return out


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_with_a_message(endings: Path) -> None:
    """Although the device, and with it the thread that asks for the loss, waits for it (for 1836 s)."""
    (code, when, said), (killed, died, _) = ending(endings, "killed")
    assert killed == -signal.SIGKILL
    assert code == 1
    assert "memferry: rank 0 of 2 stops: another rank failed; rank 1 no longer answers" in said
    assert sum(line.startswith("loss") for line in said.splitlines()) == 2  # tracebacks show the word too
    assert when - died < test_train.BOUND


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_others_with_its_reason(endings: Path) -> None:
    (code, _, said), (raised, _, reason) = ending(endings, "raises")
    assert raised == code == 1
    assert "ValueError: the data set of rank 1 is damaged" in reason
    assert "first cause: rank 1: the data set of rank 1 is damaged" in said


@pytest.mark.slow
def test_nothing_is_queued_that_would_wait_for_a_rank_that_was_killed(endings: Path) -> None:
    """Else closing the engine would wait for the device, which nobody watches any more."""
    (code, _, said), (killed, _, _) = ending(endings, "late")
    assert killed == -signal.SIGKILL
    assert code == 1
    assert "PeerError: rank 0 of 2 stops: another rank failed; rank 1 no longer answers" in said
    assert "closed" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unclosed", "destroyed"])
def test_programs_end_well(endings: Path, kind: str) -> None:
    """Also one that closes nothing, and one that goes on alone after its groups: nobody's end is taken for a failure."""
    for code, _, said in ending(endings, kind):
        assert code == 0, said
        assert said.rstrip().endswith("the end")
        assert said.count("loss") == 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_deaths_at_random_points(tmp_path: Path, profile_cache: Path, seed: int) -> None:
    """`memferry train` on three ranks: one is killed, the others are gone in time, and the resumed job ends as one that
    was left alone."""

    def on_npu(run: test_train.Run) -> test_train.Run:
        return ["ascend" if word == "cpu" else word for word in run[0]], run[1]

    death = test_train.Death(tmp_path, seed)
    whole: test_train.Run = (test_train.words(tmp_path, "whole", "--steps", str(test_train.STEPS)), {})
    folder = tmp_path / "forked"
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps([on_npu(run) for run in (whole, *death.runs)]))
    ranks.learn(profile_cache)
    environ = {"MEMFERRY_CACHE": str(profile_cache), "MEMFERRY_BACKEND": "ascend"}
    emulator.run(ranks.program(f"trained(3, {str(folder)!r})"), devices=3, environ=environ)
    (first, _), (codes, seconds), (resumed, _) = json.loads((folder / "results.json").read_text())
    said = [(folder / f"1-rank-{r}.txt").read_text() for r in range(3)]
    assert first == resumed == [0, 0, 0], said
    assert codes[death.victim] == -signal.SIGKILL
    for rank in {0, 1, 2} - {death.victim}:
        assert codes[rank] in (1, 2), said[rank]
        assert f"rank {rank} of 3 stops: another rank failed" in said[rank]
    assert seconds < test_train.BOUND
    assert test_train.recorded(death.out) == test_train.recorded(tmp_path / "whole")
