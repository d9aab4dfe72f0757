"""The command line and the README's example on emulated NPUs."""

from __future__ import annotations

from pathlib import Path

import emulator
import pytest
import torch

from memferry_ascend import cli, runtime

RUN = ["--text", "stdlib", "--model", "gpt-1m", "--context", "32", "--batch", "2", "--steps", "4"]
RUN += ["--precision", "fp32", "--clip", "1", "--eval-batches", "1", "--planner", "rules"]


@pytest.fixture(autouse=True)
def _emulator_runs_here() -> None:
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the run's last checkpoint."""
    newest = max(folder.rglob("*.pt"), key=lambda p: p.stat().st_mtime)
    state = torch.load(newest, weights_only=False)
    found: dict[str, torch.Tensor] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}/{key}")

    walk(state, "")
    return {k: v for k, v in found.items() if "/model/" in k}


@pytest.mark.slow  # minutes each on two busy cores
def test_train_ends_with_the_cpus_parameters(tmp_path: Path) -> None:
    """The same command on both backends: equal up to the order of sums in attention's backward and the norm."""
    assert cli.main(["train", *RUN, "--backend", "cpu", "--out", str(tmp_path / "cpu")]) == 0
    runtime.reset()
    arguments = ["-m", "memferry_ascend", "train", *RUN, "--backend", "ascend", "--out", tmp_path / "npu"]
    emulator.run(arguments, environ={"MEMFERRY_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"})
    cpu, npu = weights(tmp_path / "cpu"), weights(tmp_path / "npu")
    assert cpu.keys() == npu.keys()
    assert len(cpu) > 10
    for name, value in cpu.items():
        torch.testing.assert_close(npu[name], value, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")


README = """
import torch, sys
sys.path.insert(0, "tests/ascend")
from torch import nn
from types import SimpleNamespace
import models
class GPT(models.GPT):
    def forward(self, inputs, labels):
        return SimpleNamespace(loss=super().forward(inputs, labels))
device = "npu"
def on(batch):
    return dict(zip(("inputs", "labels"), batch))
import memferry_ascend as mf
rt = mf.init(topology="cm384")
assert rt.backend.name == "ascend" and torch.npu.device_count() == 8
assert rt.topology is not None and rt.topology_name == "cm384"
loader = [on(b) for b in models.batches(3, device)]
batch = loader[0]
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
engine = mf.ferry(model, optimizer, sample_batch=batch, config=mf.Config(device_memory="24GiB"))
losses = []
for batch in loader * 3:
    loss = engine.model(**batch).loss
    loss.backward()  # plain autograd
    engine.optimizer.step()  # a true torch.optim.Optimizer: schedulers, groups, clipping all work
    engine.optimizer.zero_grad()
    losses.append(float(loss))
print(engine.plan)
assert losses[-1] < losses[0], losses
engine.close()
"""


@pytest.mark.slow  # minutes each on two busy cores
def test_the_readme_example_with_eight_devices(tmp_path: Path) -> None:
    environ = {"MEMFERRY_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = emulator.run(["-c", README], devices=8, hbm=1 << 30, environ=environ).stdout
    assert "Embedding" in said
