"""Every test starts without a runtime and leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memferry_ascend import runtime

torch.set_num_threads(1)  # the models here are tiny: more threads only wait for each other


@pytest.fixture(autouse=True)
def fresh_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MEMFERRY_BACKEND", raising=False)
    torch.manual_seed(0)
    yield
    runtime.reset()


@pytest.fixture
def cpu() -> runtime.Runtime:
    return runtime.init(backend="cpu")
