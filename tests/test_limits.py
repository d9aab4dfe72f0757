"""Bytes are counted exactly before anything is allocated, and refused with a sentence that helps."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import make_model, plan_of, random_plan, small_units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memferry_ascend as mf
from memferry_ascend import arena, limits, runtime
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.config import host_threads
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import Grad, Mode, Update

MAKE = {
    "AdamW": lambda ps: torch.optim.AdamW(ps),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
    "ASGD": lambda ps: torch.optim.ASGD(ps),
}


def ferry(model: Any, **kwargs: Any) -> mf.Engine:
    make = MAKE[kwargs.pop("optimizer", "AdamW")]
    plan = kwargs.pop("plan", None) or plan_of(model, Mode.GFGB)
    with small_units():
        return mf.ferry(model, make(model.parameters()), plan=plan, config=mf.Config(**kwargs))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 99),
    precision=st.sampled_from(["bf16", "fp32"]),
    accumulate=st.sampled_from([1, 3]),
    chunk=st.sampled_from([1, 3000, 10_000, 256 << 20]),
    on_device=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_smallest_host_budget_works_and_one_byte_less_is_refused(
    cpu: runtime.Runtime, seed: int, precision: str, accumulate: int, chunk: int, on_device: float
) -> None:
    before = arena.CHUNK
    arena.CHUNK = chunk  # where slabs end changes what they take
    try:
        model = make_model(seed)
        want = {k: v.clone() for k, v in model.state_dict().items()}
        rng = random.Random(seed)
        plan = plan_of(model, Mode.GFGB)
        kept = [replace(x, grad=Grad.KEEP, update=Update.DEVICE) for x in plan.layers]
        layers = [b if rng.random() < on_device else a for a, b in zip(plan.layers, kept, strict=True)]
        plan = replace(plan, layers=tuple(layers))
        with pytest.raises(FerryError, match="smallest workable host_memory") as caught:
            ferry(model, plan=plan, precision=precision, accumulate=accumulate, host_memory=1)
        least = int(re.search(r"host_memory is (\d+) bytes", str(caught.value)).group(1))
        with pytest.raises(FerryError, match=f"is {least} bytes"):
            ferry(model, plan=plan, precision=precision, accumulate=accumulate, host_memory=least - 1)
        assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())
        with ferry(model, plan=plan, precision=precision, accumulate=accumulate, host_memory=least) as engine:
            assert engine._arena.nbytes == least
    finally:
        arena.CHUNK = before


@pytest.mark.parametrize("name", MAKE)
def test_a_torch_optimizers_own_state_is_counted(cpu: runtime.Runtime, name: str) -> None:
    model = make_model(1)
    with ferry(model, optimizer=name) as engine:
        counted = limits.state_bytes(engine._units, engine.optimizer.inner)
        engine.model(torch.zeros(3, 6, dtype=torch.long)).backward()
        engine.optimizer.step()
        engine.synchronize()
        kept = [v for _, s in engine._optimizer_state() for v in s.values() if isinstance(v, torch.Tensor)]
        real = sum(v.nbytes for v in kept if v.dim())
    assert counted.get("state", real) == real


def test_the_three_largest_consumers_are_named() -> None:
    need = {"param": 2 << 30, "m": 4 << 30, "v": 4 << 30, "lo": 1 << 30, "state": 3 << 30}
    with pytest.raises(FerryError) as caught:
        limits.check_host(need, 5 << 30)
    text = str(caught.value)
    assert "first moments 4.00 GiB, second moments 4.00 GiB, optimizer state 3.00 GiB" in text
    assert "14.00 GiB" in text and f"smallest workable host_memory is {14 << 30} bytes" in text
    limits.check_host(need, 14 << 30)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_smallest_device_works_and_one_byte_less_is_refused(mode: Mode) -> None:
    model = make_model(3)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(runtime, "make_backend", lambda *_: CpuBackend(limit=1 << 40))
        rt = runtime.init(backend="cpu")
        with ferry(model, plan=plan_of(model, mode)) as engine:
            need = sum(limits.device_bytes(engine._units).values())
            assert rt.backend.memory_stats().allocated == need
        del engine
        assert rt.backend.memory_stats().allocated == 0
        want = {k: v.clone() for k, v in model.state_dict().items()}
        rt.backend.limit = need
        with ferry(model, plan=plan_of(model, mode)):
            pass
        if need:
            rt.backend.limit = need - 1
            with pytest.raises(FerryError, match=r"device memory: .*streaming all of them takes \d+ bytes"):
                ferry(model, plan=plan_of(model, mode))
            assert rt.backend.memory_stats().allocated == 0
        assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    8388608 kB\n"}
G = 1 << 30
CG = "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * G),
        ({CG + "memory.max": "max\n", CG + "memory.current": "5"}, 8 * G),
        ({CG + "memory.max": f"{4 * G}\n", CG + "memory.current": f"{G}\n"}, 3 * G),
        ({CG + "memory.max": f"{G}\n", CG + "memory.current": f"{2 * G}\n"}, 0),
        (
            {
                CG + "memory.max": f"{4 * G}",
                CG + "memory.current": f"{3 * G}",
                CG + "memory.stat": f"anon 5\ninactive_file {2 * G}\n",
            },
            3 * G,
        ),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                CG + "user/job/memory.max": "max",
                CG + "user/job/memory.current": "1",
                CG + "user/memory.max": f"{2 * G}",
                CG + "user/memory.current": "0",
            },
            2 * G,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/docker/7\n",
                CG + "memory/docker/7/memory.limit_in_bytes": f"{G}",
                CG + "memory/docker/7/memory.usage_in_bytes": "24",
                CG + "memory/docker/7/memory.stat": "inactive_file 7\ntotal_inactive_file 4\n",
            },
            G - 20,
        ),
        (
            {
                CG + "memory/memory.limit_in_bytes": "9223372036854771712",
                CG + "memory/memory.usage_in_bytes": "12",
            },
            8 * G,
        ),
    ],
)
def test_the_tightest_cgroup_counts(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert limits.available_host_bytes(write(tmp_path, MEMINFO | files)) == free


def test_locked_memory_counts_only_where_registration_needs_it(cpu: runtime.Runtime) -> None:
    model = make_model(1)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(CpuBackend, "locked_memory_limit", lambda self: 4096)
        with pytest.raises(
            FerryError, match=r"locked memory: .*over the limit of 4.00 KiB.*ulimit -l \d+`"
        ) as e:
            ferry(model, plan=random_plan(model, 1))
        need = int(re.search(r"ulimit -l (\d+)`", str(e.value)).group(1)) * 1024
        m.setattr(CpuBackend, "locked_memory_limit", lambda self: need)
        ferry(model, plan=random_plan(model, 1)).close()
    assert cpu.backend.locked_memory_limit() is None


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [(1, 1, 1), (7, 1, 7), (8, 1, 6), (32, 1, 30), (32, 4, 6), (32, 8, 4), (2, 4, 1)],
)
def test_host_threads_leave_cores_to_who_launches_kernels(
    cores: int, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert host_threads(ranks) == expected
    assert host_threads(ranks, 5) == 5


def test_omp_num_threads_has_no_say() -> None:
    script = (
        "import os, torch, memferry_ascend as mf\n"
        "from memferry_ascend import hostmath, config\n"
        "m = torch.nn.Linear(4, 4); mf.init(backend='cpu')\n"
        "cores = len(os.sched_getaffinity(0))\n"
        "with mf.ferry(m, torch.optim.AdamW(m.parameters())) as e:\n"
        "    mine = cores if cores < 8 else cores - 2\n"
        "    assert config.host_threads() == mine\n"
        "    assert not hostmath.NATIVE or hostmath.threads() == mine, hostmath.threads()\n"
        "with mf.ferry(m, torch.optim.AdamW(m.parameters()), config=mf.Config(threads=3)) as e:\n"
        "    assert not hostmath.NATIVE or hostmath.threads() == 3\n"
        "assert config.host_threads(local_ranks=cores + 1) == 1\n"
    )
    setting = {"OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=setting, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
