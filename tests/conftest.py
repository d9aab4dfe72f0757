"""Every test starts without a runtime and leaves none behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pairwise import mark_the_rest

from memferry_ascend import hostmath, profile_plan, profiler, runtime
from memferry_ascend.backends.cpu import CpuBackend

torch.set_num_threads(1)  # the models here are tiny: more threads only wait for each other


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest(items)


@pytest.fixture(scope="session")
def profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never the user's; shared by the session, so that one model is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def fresh_runtime(monkeypatch: pytest.MonkeyPatch, profile_cache: Path) -> Iterator[None]:
    monkeypatch.delenv("MEMFERRY_BACKEND", raising=False)
    monkeypatch.setenv("MEMFERRY_CACHE", str(profile_cache))
    torch.manual_seed(0)
    yield
    runtime.reset()


@pytest.fixture(params=["swap", "hooks"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to have autograd find units that move, as far as this torch has them."""
    if request.param == "hooks":
        monkeypatch.setattr(CpuBackend, "swaps", False)
    elif not CpuBackend.swaps:
        pytest.skip("this torch cannot exchange the memory beneath a tensor")


@pytest.fixture
def cpu() -> runtime.Runtime:
    return runtime.init(backend="cpu")


@pytest.fixture
def torch_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host updates in torch operations, as without the extension: the very operations a device runs."""
    monkeypatch.setattr(hostmath, "_ops", None)


@pytest.fixture
def less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A found plan need not be the best one here, nor a measurement exact."""
    search = sys.modules["memferry_ascend.planner.search"]
    monkeypatch.setattr(search, "SIMULATE_WORK", {"step": 600, "backward": 300})
    monkeypatch.setattr(search, "ESTIMATE_WORK", 20_000)
    monkeypatch.setattr(profile_plan, "REFINEMENTS", 0)
    for name in ("PASSES", "DHA_PASSES", "MORE_PASSES"):
        monkeypatch.setattr(profiler, name, 1)
    monkeypatch.setattr("memferry_ascend.linkprobe.LARGE", 1 << 20)
    monkeypatch.setattr("memferry_ascend.linkprobe.REPEATS", 1)
