"""Tests that need a CUDA device; without one they are skipped, and the last GPU run is in docs/benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from memferry_ascend import runtime
from memferry_ascend.backends.cuda import CudaBackend

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def cuda(fresh_runtime: None) -> Iterator[runtime.Runtime]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield runtime.init(backend="cuda")
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["swap", "hooks"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to have autograd find units that move, as far as this torch has them."""
    if request.param == "swap" and not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        pytest.skip("this torch cannot exchange the memory beneath a tensor")
    monkeypatch.setattr(CudaBackend, "swaps", request.param == "swap")
