"""planner="rules": embeddings and norms by DHA where supported, the rest copied."""

import pytest

from memferry_ascend.planner import Mode, plan_rules


def test_gathers_and_norms_are_dha_only_where_supported():
    layers = [("emb", "Embedding"), ("fc", "Linear"), ("n1", "LayerNorm"), ("n2", "RMSNorm"), ("", "GPT")]
    plan = plan_rules(layers, {"Embedding", "LayerNorm", "Linear"})
    assert [x.mode for x in plan.layers] == [Mode.DHA, Mode.GFGB, Mode.DHA, Mode.GFGB, Mode.GFGB]
    assert "not supported" in plan["n2"].why
    assert [x.kind for x in plan.layers] == [kind for _, kind in layers]


def test_the_same_name_twice_is_refused():
    with pytest.raises(ValueError, match="more than once"):
        plan_rules([("a", "Linear"), ("a", "Linear")], ())
