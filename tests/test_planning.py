"""Plans from measurements: search by default, the engine's units and ties respected, budgets kept, bits unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same, batches, make_model, plan_of, train
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.helpers import layer, profile_of, random_profile

import memferry_ascend as mf
from memferry_ascend import cli, profile_plan, profiler, runtime
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.layers import SMALLEST_UNIT, collect, units
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.planner import FabricProfile, Grad, LayerPlan, Mode, Plan, Profile, Update, simulate

FP32 = mf.Config(precision="fp32")


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "PASSES", 2)
    monkeypatch.setattr(profiler, "DHA_PASSES", 2)
    monkeypatch.setattr(profiler, "MORE_PASSES", 2)
    monkeypatch.setattr("memferry_ascend.linkprobe.LARGE", 1 << 20)
    monkeypatch.setattr("memferry_ascend.linkprobe.REPEATS", 2)


def arm(model: torch.nn.Module, config: mf.Config = FP32, **kwargs: Any) -> mf.Engine:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return mf.ferry(model, optimizer, config=config, **{"sample_batch": batches(1)[0], **kwargs})


@pytest.mark.usefixtures("cpu")
def test_a_sample_batch_means_a_searched_plan() -> None:
    with arm(make_model(4)) as engine:
        assert engine.profile is not None
        assert {x.name for x in engine.profile.layers} == {x.name for x in engine.plan.layers}
        assert engine.plan.predicted_period and engine.plan.predicted_period > 0
        assert engine.plan.device_bytes is not None and engine.plan.host_bytes
        assert all(x.why for x in engine.plan.layers)
    with arm(make_model(4), sample_batch=None) as engine:
        assert engine.profile is None
    with arm(make_model(4), mf.Config(precision="fp32", planner="rules")) as engine:
        assert engine.profile is None
    with arm(make_model(4), mf.Config(precision="fp32", planner="paper", reserve=0.0)) as engine:
        assert engine.profile is not None
        usable = {x.name: x.trainable and x.direct_usable for x in engine.profile.layers}
        assert {x.name: x.grad is Grad.DIRECT for x in engine.plan.layers} == usable
        assert any(usable.values()) and not all(usable.values())


@pytest.mark.usefixtures("cpu", "torch_arithmetic")
@pytest.mark.parametrize("seed", [0, 4, 9])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_profiling_and_the_searched_plan_change_no_bit(seed: int, precision: str) -> None:
    config = mf.Config(precision=precision)
    model = make_model(seed)
    want = train(model, plan_of(model, Mode.GFGB), config=config, serial=True, steps=3)
    model = make_model(seed)
    torch.manual_seed(7)
    with arm(model, config) as engine:
        drawn = torch.rand(3)
        losses = []
        for batch in batches(3):
            loss = engine.model(batch)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        got = replace_state(want, losses, engine.state_dict())
    assert_same(want, got)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def replace_state(like: Any, losses: list[float], state: dict[str, Any]) -> Any:
    return replace(like, losses=losses, state=state)


@pytest.mark.usefixtures("cpu")
def test_a_tied_parameter_gets_one_mode() -> None:
    seeds = [s for s in range(40) if make_model(s).head_style == "tied"][:3]
    for seed in seeds:
        with arm(make_model(seed)) as engine:
            assert engine.plan["embed"].mode is engine.plan["head"].mode


def test_host_reads_of_a_tie_must_be_faster_for_all_its_readers_together() -> None:
    embed = layer("embed", kind="Embedding", t_fp_dha=0.1, t_bp_dha=0.1, dha_bytes=10)
    slow = layer("head", shares="embed", t_fp_dha=50.0, t_bp_dha=50.0, dha_bytes=1000)
    narrowed = profile_plan.narrow(profile_of(embed, layer("a"), slow), frozenset())
    assert not narrowed["embed"].dha_usable and not narrowed["head"].dha_usable
    fast = replace(slow, t_fp_dha=1.0, t_bp_dha=2.0)
    narrowed = profile_plan.narrow(profile_of(embed, layer("a"), fast), frozenset())
    assert narrowed["embed"].dha_usable and narrowed["head"].dha_usable


def test_direct_gradients_only_where_a_kernel_writes_them() -> None:
    profile = profile_of(layer("a", t_bp_grad_direct=2.0), layer("b", kind="Conv1d", t_bp_grad_direct=2.0))
    usable = {
        kinds: [x.direct_usable for x in profile_plan.narrow(profile, kinds).layers]
        for kinds in (frozenset(), frozenset({"Linear"}), frozenset({"*"}))
    }
    assert list(usable.values()) == [[False, False], [True, False], [True, True]]


SETTINGS = settings(max_examples=15, deadline=None, derandomize=True)


@SETTINGS
@given(seed=st.integers(0, 10_000), update=st.sampled_from(["step", "backward"]))
def test_plans_hold_what_the_engine_runs(seed: int, update: str) -> None:
    profile = random_profile(seed)
    narrowed = profile_plan.narrow(profile, {"*"})
    for planner in ("search", "paper"):
        plan = profile_plan.plan_profile(profile, planner, update=update, reserve=0.5)
        assert {x.update for x in plan.layers} == {Update.HOST}  # no time of a device update is known
        plan.check_layers([x.name for x in profile.layers])
        for group in profile_plan.tied_groups(profile):
            assert len({plan.layers[i].mode for i in group}) == 1
        simulate(narrowed, plan, update)  # raises when a mode is not usable
        assert plan.predicted_period == profile_plan.predict(narrowed, plan, update).period
        assert plan == profile_plan.plan_profile(profile, planner, update=update, reserve=0.5)


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_grouping_moves_the_same_bytes_and_work(seed: int) -> None:
    profile = profile_plan.narrow(random_profile(seed, count=12), frozenset())
    plan = profile_plan.runnable(profile, profile_plan.all_of(profile, Mode.DHA))
    grouped, in_units = profile_plan.grouped(profile, plan)
    assert sum(grouped.own_bytes) == sum(profile.own_bytes)
    assert sum(x.t_update for x in grouped.layers) == pytest.approx(sum(x.t_update for x in profile.layers))

    def work(p: Profile, plan: Plan) -> float:
        total = 0.0
        for x, decided in zip(p.layers, plan.layers, strict=True):
            by_dha = decided.mode is Mode.DHA
            total += x.t_fp_dha + x.t_bp_dha if by_dha else x.t_fp + x.t_bp
            total += x.t_gap_fp + x.t_gap_bp
        return total

    assert work(grouped, in_units) == pytest.approx(work(profile, plan))
    in_units.check_layers([x.name for x in grouped.layers])


@pytest.mark.parametrize("dha", [(), ("1",), ("9", "11"), ("17",)])
def test_grouping_is_the_engines(dha: tuple[str, ...]) -> None:
    model = torch.nn.Sequential()
    for _ in range(9):
        model.append(torch.nn.LayerNorm(600))  # small enough to ride along when read by DHA
        model.append(torch.nn.Linear(600, 600))
    layers = collect(model, "fp32", ())
    plan = Plan(
        tuple(
            LayerPlan(x.name, Mode.DHA if x.kind == "LayerNorm" or x.name in dha else Mode.GFGB)
            for x in layers
        )
    )
    theirs = [u.name for u in units(layers, {x.name: x for x in plan.layers})]
    profile = profile_of(
        *(layer(x.name, bytes=sum(p.nbytes for p in x.params), t_fp_dha=1, t_bp_dha=1) for x in layers)
    )
    assert [x.name for x in profile_plan.grouped(profile, plan)[0].layers] == theirs


def test_a_unit_is_launched_as_its_layers_are_decided() -> None:
    sizes = {
        "bytes": SMALLEST_UNIT // 4,
        "t_host_fp": 1.0,
        "t_host_bp": 2.0,
        "t_gap_fp": 0.25,
        "t_gap_bp": 0.5,
    }
    rider = layer("c", **{**sizes, "bytes": 4}, t_fp_dha=1.0, t_bp_dha=1.0)
    whole = layer("d", **{**sizes, "bytes": SMALLEST_UNIT})
    profile = profile_of(layer("a", **sizes), layer("b", **sizes), rider, whole)
    profile = replace(profile, launches={"STREAM": (10.0, 20.0), "DHA": (3.0, 4.0), "unit": (100.0, 200.0)})
    modes = (Mode.STREAM, Mode.STREAM, Mode.DHA, Mode.GFGB)
    plan = Plan(tuple(LayerPlan(x.name, m) for x, m in zip(profile.layers, modes, strict=True)))
    units, in_units = profile_plan.grouped(profile, plan)
    first, last = units.layers
    half = 1 - (SMALLEST_UNIT // 2 + 4) / SMALLEST_UNIT
    assert first.t_host_fp == pytest.approx(3 * 1.0 + 2 * 0.25 + 2 * 10 + 3 + half * 100)
    assert first.t_host_bp == pytest.approx(3 * 2.0 + 2 * 0.5 + 2 * 20 + 4 + half * 200)
    assert (last.t_host_fp, last.t_host_bp) == (1.0, 2.0)  # as large as those that layers are measured in
    assert units.launches == {}  # nothing is added twice
    assert profile_plan.predict(profile, plan).period == simulate(units, in_units, slots=RING_SLOTS).period


@SETTINGS
@given(seed=st.integers(0, 10_000), share=st.floats(0.05, 1.2))
def test_a_budget_is_kept_in_whole_units_or_refused(seed: int, share: float) -> None:
    profile = random_profile(seed)
    budget = int(share * sum(profile.own_bytes)) + 1
    try:
        plan = profile_plan.plan_profile(profile, device_memory=budget)
    except mf.FerryError:
        return
    assert plan.device_bytes is not None and plan.device_bytes <= budget


def test_the_papers_plan_says_when_it_does_not_fit() -> None:
    profile = profile_of(layer("a", bytes=10_240), layer("b", bytes=10_240))
    with pytest.raises(mf.FerryError, match=r"paper.*40960 bytes.*over device_memory.*search"):
        profile_plan.plan_profile(profile, "paper", device_memory=20_000)


def test_a_plan_that_moves_storage_must_be_clearly_faster() -> None:
    profile = profile_of(*(layer(f"l{i}", t_trans=0.001, t_update=0.0) for i in range(4)))
    plan = profile_plan.plan_profile(profile)
    assert {x.mode for x in plan.layers} == {Mode.GFGB}


def test_the_engines_device_budget_is_kept() -> None:
    backend = CpuBackend()
    runtime._current = runtime.Runtime(backend, "auto", None, 0, 1, 0, 1)
    runtime._arguments = ("auto", None)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(8)))
    total = sum(p.numel() * 4 for p in model.parameters())
    batch = torch.randn(4, 700)
    backend.reset_peak()
    with arm(
        model, mf.Config(precision="fp32", device_memory=int(1.5 * total)), sample_batch=batch
    ) as engine:
        for _ in range(3):
            engine.model(batch).sum().backward()
            engine.optimizer.step()
        assert backend.memory_stats().peak <= 1.5 * total
        assert engine.plan.device_bytes is not None and engine.plan.device_bytes <= 1.5 * total
    with pytest.raises(mf.FerryError, match=r"device_memory|does not fit"):
        arm(model, mf.Config(precision="fp32", device_memory=1000), sample_batch=batch)


@pytest.mark.usefixtures("cpu")
def test_the_order_of_a_plan_is_the_models() -> None:
    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x)).sum()

    with arm(Backwards(), sample_batch=torch.ones(2, 3)) as engine:
        assert engine.profile is not None
        assert [x.name for x in engine.profile.layers] == ["first", "last"]
        assert [x.name for x in engine.plan.layers] == ["last", "first"]


def test_reordering_keeps_the_tag() -> None:
    plan = Plan((LayerPlan("a"), LayerPlan("b"), LayerPlan("c")), tag=0)
    assert profile_plan.ordered(plan, ["c", "b", "a"]).tag == 2
    assert profile_plan.ordered(replace(plan, tag=-1), ["c", "b", "a"]).tag == -1
    with pytest.raises(ValueError, match="another model"):
        profile_plan.ordered(plan, ["a", "b", "d"])


@pytest.mark.usefixtures("cpu")
def test_a_given_plan_and_a_plan_file_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "measure", None)
    plan = plan_of(make_model(1), Mode.STREAM)
    plan.save(tmp_path / "plan.json")
    with arm(make_model(1), mf.Config(precision="fp32", planner=str(tmp_path / "plan.json"))) as engine:
        assert engine.profile is None and engine.plan == plan
    with pytest.raises(mf.FerryError, match="another model"):
        arm(make_model(1), plan=Plan((LayerPlan("nothing"),)))


# -- the command line ------------------------------------------------------------------------------------------------
def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_profile_then_plan_offline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFERRY_BACKEND", "cpu")
    file, out = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    words = ["profile", "--model", "gpt-1m", "--context", "16", "--batch", "1", "--precision", "fp32"]
    code, text, _ = run(capsys, *words, "--out", file)
    assert code == 0 and "head" in text and "measured now" in text
    code, text, _ = run(capsys, *words, "--json")
    found = json.loads(text)
    assert code == 0 and found["cached"] and Profile.from_json(found) == Profile.load(file)
    monkeypatch.setattr(runtime, "init", None)  # a plan needs no device
    code, text, _ = run(capsys, "plan", "--profile", file, "--out", out)
    assert code == 0 and "predicted" in text and "limited by" in text
    assert Plan.load(out).predicted_period is not None
    code, text, _ = run(
        capsys, "plan", "--profile", file, "--set", "blocks.*=STREAM", "--compare", out, "--json"
    )
    found = json.loads(text)
    assert code == 0 and found["critical"] in ("compute", "h2d", "d2h", "host")
    assert {x["mode"] for x in found["layers"] if x["name"].startswith("blocks.")} == {"STREAM"}
    assert "blocks.0.up: mode" in found["compared"]["layers"]
    assert run(capsys, "plan", "--profile", file, "--planner", "paper", "--reserve", "0.5")[0] == 0


def test_profile_of_ones_own_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFERRY_BACKEND", "cpu")
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "def make(): return torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.ones(4, 3)\n"
        "def wrong(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    code, text, _ = run(capsys, "profile", "--factory", "own_model:make", "--precision", "fp32", "--json")
    assert code == 0 and [x["name"] for x in json.loads(text)["layers"]] == ["0"]
    for name, message in (("own_model:wrong", "expected it to return"), ("own_model:no", "can be imported")):
        code, _, err = run(capsys, "profile", "--factory", name)
        assert code == 2 and message in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["layers"][0].update(t_fp=-1), "layer 'a': t_fp must be >= 0"),
        (lambda d: d["layers"][1].update(t_update="x"), "layer 'b': t_update must be a number"),
        (lambda d: d["layers"][1].pop("t_bp"), "layer 'b': missing 1 required positional argument: 't_bp'"),
        (lambda d: d["layers"][0].update(t_trans="inf"), "layer 'a': t_trans must"),
        (lambda d: d.update(format="other"), "expected format 'memferry profile'"),
        (lambda d: d["link"].update(h2d=0), "link: h2d must be > 0"),
    ],
)
def test_bad_profiles_name_the_layer_and_the_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: Any, message: str
) -> None:
    document = profile_of(layer("a"), layer("b")).to_json()
    change(document)
    (tmp_path / "p.json").write_text(json.dumps(document))
    code, out, err = run(capsys, "plan", "--profile", str(tmp_path / "p.json"))
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "nothing=DHA"], "matches no layer"),
        (["--set", "a=FAST"], "layer 'a': mode must be one of"),
        (["--set", "a=DHA"], "layer 'a'"),
        (["--set", "a"], "PATTERN=MODE"),
        (["--device-memory", "10"], "smallest needs"),
        (["--device-memory", "10 apples"], "unknown unit"),
        (["--reserve", "1.5"], "--reserve must be from 0 to 1"),
        (["--update", "never"], "--update must be"),
        (["--planner", "guess"], 'expected "search" or "paper"'),
        (["--compare", "/no/such"], "No such file"),
        (["--ranks", "4"], "the profile says nothing about a fabric; pass --fabric"),
        (["--ranks", "4", "--fabric", "fast"], "--fabric must be GB/S,US"),
        (["--ranks", "0", "--fabric", "1,1"], "ranks must be a whole number >= 1"),
    ],
)
def test_bad_requests_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    profile_of(layer("a"), layer("b")).save(tmp_path / "p.json")
    code, out, err = run(capsys, "plan", "--profile", str(tmp_path / "p.json"), *words)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_a_plan_for_several_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = profile_of(layer("a"), layer("b"))
    profile.save(tmp_path / "p.json")

    def planned(*words: str) -> dict[str, Any]:
        code, text, err = run(capsys, "plan", "--profile", str(tmp_path / "p.json"), *words, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(text)
        return found

    one, four = planned(), planned("--ranks", "4", "--fabric", "170,26")
    assert (one["ranks"], four["ranks"]) == (1, 4)
    assert "fabric" not in one["busy"]
    assert four["busy"]["host"] == pytest.approx(one["busy"]["host"] / 4)
    assert four["busy"]["fabric"] > 0
    replace(profile, fabric=FabricProfile(2, 170e9, 26e-6)).save(tmp_path / "p.json")
    assert planned()["ranks"] == 2
    assert planned("--ranks", "4") == four
    assert planned("--ranks", "1") == one
