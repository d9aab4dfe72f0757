"""The plain engine is the reference: fp32 masters, fp32 sums, ties away from zero, states that survive."""

import pytest
import torch

from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.train import engines, loop, models, options

SHAPE = models.Shape(layers=1, width=16, heads=2, context=8)


def make(**given):
    o = options.resolve({"plain": True, "backend": "cpu", "lr": 1e-2, **given})
    model = models.build(SHAPE)
    return engines.arm(model, loop.make_optimizer(model, o), {}, o)


def batch(seed=0):
    tokens_BT = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:]}


def step(engine, *seeds):
    for seed in seeds:
        engine.model(**batch(seed)).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def test_fp32_is_plain_training():
    engine = make(precision="fp32", max_grad_norm=0.1)
    model = models.build(SHAPE)
    optimizer = loop.make_optimizer(model, options.resolve({"lr": 1e-2}))
    for seed in range(3):
        step(engine, seed)
        model(**batch(seed)).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert engine.grad_norm == norm > 0.1
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(engine.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_updates_fp32_masters_with_fp32_sums():
    engine = make(precision="bf16")
    names = dict(engine.model.named_parameters())
    masters = {n: v.clone() for n, v in engine.state_dict()["model"].items()}
    assert all(p.dtype == torch.bfloat16 for p in names.values())
    reference = models.build(SHAPE)
    optimizer = loop.make_optimizer(reference, options.resolve({"lr": 1e-2}))
    gradients = []
    for seed in (1, 2):
        shadow = models.build(SHAPE).to(torch.bfloat16)
        shadow.head.weight = shadow.embed.weight
        shadow(**batch(seed)).loss.backward()
        gradients.append([p.grad.float() for p in shadow.parameters()])
    for p, first, second in zip(reference.parameters(), *gradients, strict=True):
        p.grad = first + second
    optimizer.step()
    step(engine, 1, 2)
    after = engine.state_dict()["model"]
    for name, p in reference.named_parameters():
        assert torch.equal(after[name], p), name
        assert not torch.equal(after[name], masters[name]), name
        assert names[name].dtype == torch.bfloat16
        assert names[name].grad is None


def test_rounding_is_to_nearest_with_ties_away_from_zero():
    engine = make(precision="bf16")
    weight = engine.model.blocks[0].up.weight
    master = engine._masters[weight]
    ulp = 2.0**-7
    master.view(-1)[:4] = torch.tensor([1 + ulp / 2, -(1 + ulp / 2), 1 + ulp * 0.49, 1 + ulp * 1.5])
    engine._round()
    assert weight.data.view(-1)[:4].float().tolist() == [1 + ulp, -(1 + ulp), 1.0, 1 + 2 * ulp]


def test_keep_fp32_takes_names_and_classes():
    engine = make(precision="bf16", keep_fp32="LayerNorm,blocks.0.attn.*")
    kept = {n for n, p in engine.model.named_parameters() if p.dtype == torch.float32}
    assert kept == {
        f"{layer}.{part}"
        for layer in ("ln", "blocks.0.ln1", "blocks.0.ln2", "blocks.0.attn.qkv", "blocks.0.attn.proj")
        for part in ("weight", "bias")
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_survives_and_training_goes_on_bit_for_bit(precision):
    engine, other = make(precision=precision), make(precision=precision)
    step(engine, 1)
    step(engine, 2)
    other.load_state_dict(engine.state_dict())
    for each in (engine, other):
        step(each, 3)
    for (name, a), b in zip(
        engine.state_dict()["model"].items(), other.state_dict()["model"].values(), strict=True
    ):
        assert torch.equal(a, b), name
    state = engine.state_dict()
    del state["model"]["ln.weight"]
    with pytest.raises(FerryError, match="another model"):
        other.load_state_dict(state)


def test_memory_counts_every_byte():
    engine = make(precision="bf16")
    n = SHAPE.parameters
    step(engine, 1)
    engine.model(**batch()).loss.backward()
    report = {what: nbytes for _, what, nbytes in engine.memory_report()}
    steps = 4 * len(list(engine.model.parameters()))
    assert report == {
        "parameters": 2 * n,
        "fp32 masters": 4 * n,
        "gradients": 4 * n,
        "optimizer state": 8 * n + steps,
    }


def test_close_gives_the_fp32_model_back():
    engine = make(precision="bf16")
    step(engine, 1)
    state = engine.state_dict()["model"]
    model = engine.model
    engine.close()
    engine.close()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, state[name])


def test_plain_refuses_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        make()
