"""The command line and the README's example on emulated NPUs."""

from __future__ import annotations

import random
from pathlib import Path

import emulator
import pytest
import torch
from memferry_ascend.topology import Measured, load

from memferry_ascend import cli, runtime
from memferry_ascend.direct import why_not
from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan
from memferry_ascend.train.models import PRESETS, build

RUN = ["--text", "stdlib", "--model", "gpt-1m", "--context", "32", "--batch", "2", "--steps", "4"]
RUN += ["--precision", "fp32", "--clip", "1", "--eval-batches", "1"]


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


def plans(folder: Path) -> list[Path]:
    """Plan files for the trained model: all layers streamed, then every mode mixed with gradient placements, the last with
    each of them on some layer."""
    model = build(PRESETS["gpt-1m"])
    modules = {name: m for name, m in model.named_modules() if m._parameters}
    assert all(why_not(m) is None for m in modules.values())
    rng = random.Random(3)
    made = [Plan(tuple(LayerPlan(n, Mode.STREAM) for n in modules))]
    for placements in (("keep",), ("direct",), ("keep", "stage", "direct")):
        layers = tuple(LayerPlan(n, rng.choice(list(Mode)), rng.choice(placements)) for n in modules)
        made.append(Plan(layers))
    assert {x.grad for x in made[-1].layers} == set(Grad)
    files = [folder / f"plan{k}.json" for k in range(len(made))]
    for file, plan in zip(files, made, strict=True):
        plan.save(file)
    return files


def test_train_ends_with_the_cpus_parameters(tmp_path: Path) -> None:
    """`memferry train` on the CPU, then on an emulated NPU with several plans: the same bits. Every operator of this model
    has the CPU's bits on the emulator (test_operators.py), and is called in the same order whatever the plan."""
    assert (
        cli.main(["train", *RUN, "--planner", "rules", "--backend", "cpu", "--out", str(tmp_path / "cpu")])
        == 0
    )
    runtime.reset()
    files = plans(tmp_path)
    emulator.run(
        [
            "-c",
            f"""
import torch
from memferry_ascend import cli, runtime
torch.set_num_threads(1)
for k, plan in enumerate({["rules", *map(str, files)]!r}):
    arguments = [*{RUN!r}, "--planner", plan, "--backend", "ascend", "--out", "{tmp_path}/npu" + str(k)]
    assert cli.main(["train", *arguments]) == 0
    runtime.reset()
""",
        ]
    )
    cpu = weights(tmp_path / "cpu")
    assert len(cpu) > 10
    for k in range(len(files) + 1):
        npu = weights(tmp_path / f"npu{k}")
        assert cpu.keys() == npu.keys()
        for name, value in cpu.items():
            assert torch.equal(npu[name], value), (
                f"plan {k}: {name} differs by {(npu[name] - value).abs().max()}"
            )


BEFORE = """
import sys
sys.path.insert(0, "tests/ascend")
from types import SimpleNamespace
import memferry_ascend
rt = memferry_ascend.init(topology="cm384")
import torch, models
torch.set_num_threads(1)
assert rt.backend.name == "ascend" and torch.npu.device_count() == 8
assert rt.topology is not None and rt.topology_name == "cm384"
class GPT(models.GPT):
    def __init__(self, *_):
        torch.manual_seed(0)
        super().__init__()
    def forward(self, inputs, labels):
        losses.append(super().forward(inputs, labels))
        return SimpleNamespace(loss=losses[-1])
losses = []
loader = [dict(zip(("inputs", "labels"), b)) for b in models.batches(3, "npu")] * 3
batch = loader[0]
"""
AFTER = """
steps = [float(l) for l in losses[-9:]]
assert steps[-1] < steps[0], steps
assert {p.device.type for p in model.parameters()} == {"npu"}
engine.close()
"""


def test_the_readme_example_with_eight_devices() -> None:
    """After `init(topology="cm384")`, as it stands in the README."""
    readme = (emulator.ROOT / "README.md").read_text()
    example = readme.partition("## Use")[2].partition("```python\n")[2].partition("```")[0]
    assert "mf.ferry(model, optimizer" in example
    said = emulator.run(["-c", BEFORE + example + AFTER], devices=8, hbm=1 << 30).stdout
    assert "Embedding" in said  # the plan was printed


def test_training_on_cm384_with_an_assisting_device() -> None:
    """Two of the fabric's devices, the second forwarding to the first: the bits of training alone."""
    emulator.run(
        [
            "-c",
            """
import sys
sys.path.insert(0, "tests/ascend")
import torch, memferry_ascend as mf
from memferry_ascend.direct import why_not
from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan
rt = mf.init(topology="cm384", backend="ascend")
import models
torch.set_num_threads(1)
def trained(assist):
    torch.manual_seed(0)
    model = models.GPT()
    plan = Plan(tuple(LayerPlan(n, Mode.STREAM) for n, m in model.named_modules() if m._parameters))
    config = mf.Config(precision="fp32", assist_devices=assist)
    engine = mf.ferry(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan, config=config)
    if assist:  # the fabric's figures would leave copies this small on one path
        engine._transfers.shares = halves(engine._transfers)
    for inputs, labels in models.batches(3, "npu"):
        engine.model(inputs, labels).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    state = engine.state_dict()["model"]
    if assist:
        print(engine._transfers.moved)
        assert all(moved > 0 for moved in engine._transfers.moved.values()) and len(engine._transfers.moved) == 2
    engine.close()
    return state
def halves(carried):
    def shares(nbytes, direction, host=None):
        paths = carried._live(direction).paths
        return [(paths[0], nbytes - nbytes // 2), (paths[1], nbytes // 2)]
    return shares
alone, together = trained(()), trained((1,))
assert all(torch.equal(alone[k], together[k]) for k in alone)
""",
        ],
        devices=8,
    )


def test_probe_measures_the_paths_through_peers(tmp_path: Path) -> None:
    """Every path of the first of three NPUs, in both directions; the file then serves as a topology. With the default task
    queue and without."""
    for queue, environ in (("default", {}), ("none", {"TASK_QUEUE_ENABLE": "0"})):
        out = tmp_path / f"{queue}.json"
        arguments = [
            "probe",
            "--backend",
            "ascend",
            "--sizes",
            "4KiB",
            "64MiB",
            "--repeats",
            "2",
            "--out",
            out,
        ]
        emulator.run(["-m", "memferry_ascend", *arguments], devices=3, environ=environ)
        found = load(out)
        assert isinstance(found, Measured)
        assert [path.name for path in found.measured] == ["direct", "via npu:1", "via npu:2"]
        for direction in ("h2d", "d2h"):
            paths = found.paths("npu:0", via=["npu:1", "npu:2"], direction=direction)
            assert len(paths.paths) == 3
            assert all(path.bandwidth > 0 for path in paths.paths)
