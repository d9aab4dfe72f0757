"""Two ranks, on one GPU (tensors exchanged by gloo through host memory) and on two (nccl): the same bits as every plan of
two ranks, the loss of one rank, memory shared and registered by both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel.world import launch

APART = {
    "MEMFERRY_BACKEND": "cuda",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "WORLD_DETERMINISTIC": "1",
}
SHARED = APART | {"MEMFERRY_COLLECTIVES": "gloo"}


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_ranks(gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    world = SHARED if gpus == 1 else APART
    modes = ("GFGB", "DHA", "DFGB", "STREAM", "random")
    more = {"micro": 2, "config": {"precision": "bf16", "max_grad_norm": 0.05}}
    cases = [("train", {"steps": 3, "modes": m}) for m in modes]
    cases += [("train", {"steps": 3, "modes": m, **more}) for m in ("GFGB", "random")]
    delayed = ("random", "STREAM", "DFGB")
    cases += [("train", {"steps": 3, "modes": m, "delays": 0.002, "unit_bytes": 1}) for m in delayed]
    cases += [
        ("train", {"steps": 3, "modes": m, "micro": 2, "config": {"update": u}})
        for m, u in (("GFGB", "step"), ("random", "backward"))
    ]
    results = launch(2, cases, tmp_path, timeout=500, **world)
    plain, clipped, slow, early = results[:5], results[5:7], results[7:10], results[10:]
    for runs in ([*plain, *slow], clipped, early):
        want = runs[0][0]
        for got in (r for run in runs for r in run):
            assert got["losses"] == want["losses"]
            assert got["norms"] == want["norms"]
            assert got["hashes"] in ([], want["hashes"])
            for name, value in want["state"]["model"].items():
                assert value.equal(got["state"]["model"][name]), name
    (tmp_path / "one").mkdir()
    alone = launch(1, [("train", {"steps": 3, "modes": "GFGB"})], tmp_path / "one", timeout=300, **world)
    assert plain[0][0]["losses"] == pytest.approx(alone[0][0]["losses"], rel=1e-4)
