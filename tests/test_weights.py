"""Models that never exist beside the arena: meta models, safetensors files, and the memory arming takes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import batches, plan_of
from placements import direct_model
from torch import nn

import memferry_ascend as mf
from memferry_ascend.planner import Mode

safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.usefixtures("cpu")


class Plain(nn.Module):
    """Modules that initialise themselves, in the order in which they are made; buffers, a tied head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.plain = nn.BatchNorm1d(16, affine=False)
        self.head = nn.Linear(16, 23, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.norm(self.hidden(self.embed(tokens)).flatten(0, 1).float()))
        return nn.functional.cross_entropy(self.head(x.to(self.head.weight.dtype)).float(), tokens.flatten())


def arm(model: nn.Module, **kwargs: Any) -> mf.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = kwargs.pop("config", mf.Config(precision="fp32"))
    return mf.ferry(model, optimizer, config=config, **kwargs)


def losses(engine: mf.Engine) -> list[float]:
    out = []
    for batch in batches(3):
        loss = engine.model(batch)
        loss.backward()
        engine.optimizer.step()
        out.append(float(loss.detach()))
    engine.close()
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"grad": "keep", "update": "device"}], ids=["host", "device"])
def test_a_meta_model_is_initialised_as_on_the_cpu(precision: str, fields: dict[str, str]) -> None:
    config = mf.Config(precision=precision, keep_fp32=("norm",))
    torch.manual_seed(7)
    real = Plain()
    with torch.device("meta"):
        meta = Plain()
    names = dict(meta.named_parameters())
    torch.manual_seed(7)
    a = arm(real, config=config, plan=plan_of(real, Mode.GFGB, **fields))
    torch.manual_seed(7)
    b = arm(meta, config=config, plan=plan_of(meta, Mode.GFGB, **fields))
    assert all(p is names[n] for n, p in meta.named_parameters())  # the optimizer's own
    first, second = a.state_dict()["model"], b.state_dict()["model"]
    assert first.keys() == second.keys()
    assert all(torch.equal(v, second[k]) for k, v in first.items())
    assert losses(a) == losses(b)
    assert not any(t.is_meta for t in (*meta.parameters(), *meta.buffers()))


def test_tied_meta_parameters_take_their_owners_values() -> None:
    with torch.device("meta"):
        model = Plain(tied=True)
    engine = arm(model)
    assert model.head.weight is model.embed.weight
    assert (
        float(engine.state_dict()["model"]["embed.weight"].std()) > 0.5
    )  # an embedding's, not a linear layer's
    losses(engine)


def test_attributes_of_parameters_survive() -> None:
    with torch.device("meta"):
        model = Plain()
    model.hidden.weight.decays = True
    engine = arm(model)
    assert model.hidden.weight.decays
    engine.close()


def save(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    safetensors_torch.save_file(state, path)
    return state


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_come_from_a_file(tmp_path: Path, meta: bool, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(1)
    source = Plain()
    source(batches(1)[0])  # running statistics
    state = save(source, path, dtype)
    with torch.device("meta" if meta else "cpu"):
        model = Plain()
    engine = arm(model, weights=path)
    found = engine.state_dict()["model"]
    assert all(torch.equal(found[k], v.to(found[k].dtype)) for k, v in state.items())
    assert state.keys() == found.keys()
    losses(engine)


def test_values_come_from_a_folder(tmp_path: Path) -> None:
    state = {k: v.detach().clone() for k, v in direct_model(3).state_dict().items()}
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        safetensors_torch.save_file({k: state[k] for k in keys}, tmp_path / file)
    for indexed in (False, True):
        if indexed:
            where = {k: f for f, keys in parts.items() for k in keys}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
            safetensors_torch.save_file({"other": torch.ones(1)}, tmp_path / "not in the index.safetensors")
        with torch.device("meta"):
            model = direct_model(0)
        engine = arm(model, weights=tmp_path)
        found = engine.state_dict()["model"]
        assert all(torch.equal(found[k], v) for k, v in state.items())
        engine.close()


def test_a_tied_parameter_may_bear_any_of_its_names(tmp_path: Path) -> None:
    state = dict(Plain().state_dict())
    state["head.weight"] = state.pop("embed.weight").clone()
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = Plain(tied=True)
    engine = arm(model, weights=tmp_path / "x.safetensors")
    assert torch.equal(engine.state_dict()["model"]["embed.weight"], state["head.weight"])
    engine.close()


def untouched(model: nn.Module) -> None:
    assert all(p.is_meta and p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("head.weight"), r"another model: missing \['head.weight'\]"),
        (lambda s: s.update({"head.weight": torch.ones(2, 2)}), r"of another shape \['head.weight: \(2, 2\)"),
    ],
    ids=["missing", "shape"],
)
def test_a_file_of_another_model_changes_nothing(tmp_path: Path, change: Any, message: str) -> None:
    state = {k: v.clone() for k, v in Plain().state_dict().items()}
    change(state)
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(mf.FerryError, match=message):
        arm(model, weights=tmp_path / "x.safetensors")
    untouched(model)


def test_bad_paths(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Plain()
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"not a header")
    (tmp_path / "twice").mkdir()
    for name in ("a", "b"):
        safetensors_torch.save_file({"x": torch.ones(1)}, tmp_path / "twice" / f"{name}.safetensors")
    (tmp_path / "index").mkdir()
    index = tmp_path / "index" / "model.safetensors.index.json"
    for path, message in (
        ("nowhere", "found nothing at"),
        ("empty", "no .*safetensors files"),
        ("broken.safetensors", "not a readable safetensors file"),
        ("twice", "more than one file"),
    ):
        with pytest.raises(mf.FerryError, match=message):
            arm(model, weights=tmp_path / path)
    for text, message in (
        ("[]", "not an index"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "not there"),
    ):
        index.write_text(text)
        with pytest.raises(mf.FerryError, match=message):
            arm(model, weights=tmp_path / "index")
    untouched(model)


def test_a_module_that_cannot_initialise_itself_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Module())
        model[1].register_parameter("gain", nn.Parameter(torch.ones(3)))
    with pytest.raises(mf.FerryError, match=r"'1' \(Module\).*no reset_parameters.*weights="):
        arm(model)
    untouched(model)


def test_values_that_nobody_set_are_refused() -> None:
    class Forgets(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    with torch.device("meta"):
        model = nn.Sequential(Forgets(3, 3))
    with pytest.raises(
        mf.FerryError, match=r"Forgets.reset_parameters of module '0' left 'bias' without values"
    ):
        arm(model)


# -- memory, in a process of its own ---------------------------------------------------------------------------------

SCRIPT = """
import gc, resource, sys, threading
import torch
from torch import nn
import memferry_ascend as mf
torch.set_num_threads(1)

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()

def reset_peak():
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")

def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))

class Deep(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(n))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

mf.init(backend="cpu")
warm = nn.Linear(64, 64)
engine = mf.ferry(warm, torch.optim.AdamW(warm.parameters()))
engine.model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward(); engine.optimizer.step(); engine.close()
device, n = sys.argv[1], int(sys.argv[2])
start = rss()
with torch.device(device):
    model = Deep(n)
built = rss() - start
optimizer = torch.optim.AdamW(model.parameters())
layers = [mf.planner.LayerPlan(f"layers.{i}", "STREAM") for i in range(n)]
reset_peak()
engine = mf.ferry(model, optimizer, plan=mf.planner.Plan(tuple(layers)))
arming = peak() - start
gc.collect()
armed = rss() - start
if device == "meta":
    engine.model(torch.ones(1, 1024, dtype=torch.bfloat16)).sum().backward()
    engine.optimizer.step()
    engine.synchronize()
steady = rss() - start
print(built, arming, armed, steady)
engine.close()
"""


def memory(device: str, layers: int) -> tuple[int, int, int, int]:
    """(built, peak while arming, armed, after a step) in bytes above the interpreter's own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), device, str(layers)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(int(x) for x in done.stdout.split())  # type: ignore[return-value]


LAYERS = 50
PARAMETERS = LAYERS * 1024 * 1024


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory"
)
def test_a_meta_model_takes_no_more_while_arming_than_afterwards() -> None:
    built, arming, armed, steady = memory("meta", LAYERS)
    print(f"meta: built {built}, arming peak {arming}, armed {armed}, steady {steady}")
    assert built < 0.02 * 4 * PARAMETERS
    assert armed > 0.95 * 4 * PARAMETERS  # bf16 halves and remainders
    assert arming <= 1.05 * armed
    assert steady > 0.95 * 14 * PARAMETERS


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of resident memory"
)
def test_a_cpu_model_is_never_held_twice() -> None:
    built, arming, armed, _ = memory("cpu", LAYERS)
    print(f"cpu: built {built}, arming peak {arming}, armed {armed}")
    assert built > 0.95 * 4 * PARAMETERS
    assert armed < 1.1 * 4 * PARAMETERS  # the module's own memory is gone
    assert arming < 1.1 * 4 * PARAMETERS
