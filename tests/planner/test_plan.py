"""Plans: lookup, table, override, diff, files, and refusals that name what is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan, Update

NAMES = ("emb", "block.0.fc", "block.1.fc", "head")
PLAN = Plan(
    tuple(LayerPlan(name) for name in NAMES), t_res=0.5, tag=1, device_bytes=2**30, predicted_period=0.01
)

layer_plans = st.builds(
    LayerPlan,
    name=st.text(min_size=0, max_size=5),
    mode=st.sampled_from(Mode),
    grad=st.sampled_from(Grad),
    why=st.text(max_size=8),
    bytes=st.none() | st.integers(0, 2**60),
)


def test_strings_are_taken_for_the_enums():
    assert LayerPlan("x", mode="DHA", grad="direct", update="host") == LayerPlan(
        "x", Mode.DHA, Grad.DIRECT, Update.HOST
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "FAST"}, "layer 'x': mode must be one of 'GFGB'.*found 'FAST'"),
        ({"grad": "nowhere"}, "layer 'x': grad"),
        ({"update": "moon"}, "layer 'x': update"),
        ({"update": "device", "mode": "STREAM"}, "layer 'x'.*needs mode 'GFGB'"),
        ({"update": "device", "grad": "direct"}, "layer 'x'.*'keep' or 'stage'"),
    ],
)
def test_a_layer_plan_that_makes_no_sense_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LayerPlan("x", **values)


def test_lookup_by_name_and_a_missing_name_says_what_there_is():
    assert PLAN["head"].name == "head"
    assert "emb" in PLAN
    with pytest.raises(KeyError, match="no layer 'tail'; it has 'emb'"):
        PLAN["tail"]


def test_the_same_name_twice_is_refused():
    with pytest.raises(ValueError, match="'a' appear more than once"):
        Plan((LayerPlan("a"), LayerPlan("b"), LayerPlan("a")))


def test_the_table_shows_every_layer_and_the_totals():
    embedding = LayerPlan("emb", Mode.DHA, why="beats GFGB by 1.00 ms", bytes=2**20, kind="Embedding")
    plan = Plan((embedding, LayerPlan("")), device_bytes=2**30, measured_period=0.25)
    lines = str(plan).splitlines()
    assert lines[0].split() == ["layer", "kind", "mode", "grad", "update", "MiB", "why"]
    assert "emb" in lines[1]
    assert "DHA" in lines[1]
    assert "1.00" in lines[1]
    assert "(root)" in lines[2]
    assert lines[3] == "device 1.00 GiB, measured 250.000 ms per iteration"


def test_override_by_pattern_drops_what_was_computed_for_the_old_plan():
    plan = PLAN.override({"block.*": {"mode": "STREAM"}, "block.1.*": {"mode": "DHA", "grad": "direct"}})
    assert [x.mode for x in plan.layers] == [Mode.GFGB, Mode.STREAM, Mode.DHA, Mode.GFGB]
    assert plan["block.1.fc"].grad is Grad.DIRECT
    assert (plan.device_bytes, plan.predicted_period) == (None, None)
    assert PLAN["block.0.fc"].mode is Mode.GFGB


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tail*": {"mode": "DHA"}}, r"'tail\*' matches no layer"), ({"emb": {"speed": "9"}}, "unknown speed"),
     ({"emb": {"mode": "x"}}, "layer 'emb': mode")],
)  # fmt: skip
def test_a_bad_override_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PLAN.override(changes)


def test_diff_lists_what_changes_and_nothing_else():
    assert PLAN.diff(PLAN) == ""
    other = Plan((*PLAN.override({"emb": {"mode": "DHA"}}).layers[:3], LayerPlan("new")))
    assert PLAN.diff(other).splitlines() == ["  emb: mode GFGB -> DHA", "- head", "+ new"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("emb", "block.0.fc", "block.1.fc", "tail"), "plan lacks 'tail'; the model lacks 'head'"),
        (("block.0.fc", "emb", "block.1.fc", "head"), "order differs from position 0"),
    ],
)
def test_a_plan_for_another_model_names_the_layers_that_differ(names, message):
    PLAN.check_layers(NAMES)
    with pytest.raises(ValueError, match=message):
        PLAN.check_layers(names)


@given(st.lists(layer_plans, unique_by=lambda x: x.name, max_size=5), st.floats(0, 10), st.integers(-1, 5))
def test_json_keeps_everything(layers, t_res, tag):
    plan = Plan(tuple(layers), t_res=t_res, tag=tag, host_bytes=3, measured_period=0.5)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


def test_files_are_whole_and_a_hand_written_one_needs_little(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    hand = {"format": "memferry plan", "version": 1, "layers": [{"name": "a", "mode": "STREAM"}]}
    assert Plan.from_json(hand) == Plan((LayerPlan("a", Mode.STREAM),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1, found 2"),
        ({"format": "memferry profile"}, "format 'memferry plan'"),
        ({"layers": 3}, "list"),
        ({"layers": [3]}, r"layers\[0\]"),
        ({"layers": [{"mode": "DHA"}]}, "name must be a string"),
        ({"layers": [{"name": "a", "mdoe": "DHA"}]}, "layer 'a': unknown field mdoe"),
        ({"layers": [{"name": "a", "mode": 7}]}, "layer 'a': mode"),
        ({"t_res": "1"}, "t_res must be a number"),
        ({"tagg": 1}, "unknown field tagg"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path, change, message):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({**PLAN.to_json(), **change}))
    with pytest.raises(ValueError, match=rf"broken\.json: .*{message}"):
        Plan.load(path)
