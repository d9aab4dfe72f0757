"""Presets are what their names say, the head is tied, and the model is causal."""

import re

import pytest
import torch

from memferry_ascend.errors import ConfigError
from memferry_ascend.train import models

TINY = models.Shape(layers=2, width=16, heads=2, context=8)


@pytest.mark.parametrize("name", models.PRESETS)
def test_parameter_count_is_exact_and_near_the_name(name):
    shape = models.shape_of(name)
    with torch.device("meta"):
        model = models.GPT(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    number, unit = re.fullmatch(r"gpt-([\d.]+)([mb])", name).groups()
    assert shape.parameters == pytest.approx(float(number) * {"m": 1e6, "b": 1e9}[unit], rel=0.09)


def test_unknown_preset_lists_all_with_sizes():
    with pytest.raises(ConfigError, match=r"gpt-10.*gpt-1m \(\d\.\d M\).*gpt-7b \(\d+\.\d M\)"):
        models.shape_of("gpt-10")


def test_bad_shapes_are_refused():
    with pytest.raises(ConfigError, match="not a multiple of 3 heads"):
        models.Shape(layers=1, width=16, heads=3)
    with pytest.raises(ConfigError, match="context >= 1"):
        models.shape_of("gpt-1m", context=0)


def test_built_model_is_tied_initialised_and_repeats():
    model, again, other = models.build(TINY, 1), models.build(TINY, 1), models.build(TINY, 2)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len({p.data_ptr() for p in model.parameters()})
    assert all(p.is_leaf and p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
        if value.dim() == 2:
            assert 0 < value.std() < 0.05, name
            assert not torch.equal(value, other.state_dict()[name]), name
        else:
            assert set(value.tolist()) == ({0.0} if name.endswith("bias") else {1.0}), name


def test_output_and_causality():
    model = models.build(TINY)
    tokens_BT = torch.randint(0, 256, (3, 8))
    output = model(tokens=tokens_BT, targets=tokens_BT.roll(1, dims=1))
    assert output.logits.shape == (3, 8, 256)
    assert output.loss.item() == pytest.approx(5.545, abs=0.1)  # ln 256: nothing learned yet
    output.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    changed_BT = tokens_BT.clone()
    changed_BT[:, 5:] = (changed_BT[:, 5:] + 1) % 256
    logits_BTV = model(changed_BT).logits
    torch.testing.assert_close(logits_BTV[:, :5], output.logits[:, :5])
    assert not torch.allclose(logits_BTV[:, 5:], output.logits[:, 5:])


def test_too_long_a_batch_is_refused():
    with pytest.raises(ConfigError, match="8 bytes of context, the batch has 9"):
        models.build(TINY)(torch.zeros(1, 9, dtype=torch.long))
