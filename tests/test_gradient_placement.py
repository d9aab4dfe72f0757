"""Gradients kept, staged or written by kernels: the same bits, and nothing on the device that should not be."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from harness import (
    ALL_POINTS,
    Delays,
    assert_same,
    batches,
    layer_names,
    make_model,
    plan_of,
    poisoned,
    small_units,
    train,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from placements import direct_model, freeze_some, placed_plan
from torch import nn

import memferry_ascend as mf
from memferry_ascend import direct
from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan

pytestmark = pytest.mark.usefixtures("cpu")

SETTINGS = settings(
    max_examples=14,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)


class Watch:
    """Counts what kernels wrote directly, and the device bytes of gradients autograd delivered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        self.delivered: list[str] = []
        written, arrive = mf.engine.Gradients.direct_written, mf.engine.Gradients.arrive

        def count(gradients: Any, ug: Any, s: Any) -> None:
            self.written.append(s.p.name)
            written(gradients, ug, s)

        def see(gradients: Any, ug: Any, s: Any, grad: Any) -> None:
            if grad is not None:
                self.delivered.append(s.p.name)
            arrive(gradients, ug, s, grad)

        monkeypatch.setattr(mf.engine.Gradients, "direct_written", count)
        monkeypatch.setattr(mf.engine.Gradients, "arrive", see)


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    own=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
    micro=st.sampled_from([1, 2, 5]),
    declared=st.booleans(),
    frozen=st.booleans(),
    unit_bytes=st.sampled_from([1, 1500, 1 << 20]),
    checkpoint=st.sampled_from([None, None, "plain", "reentrant"]),
)
def test_random_placements(
    seed: int, own: bool, precision: str, micro: int, declared: bool, frozen: bool, unit_bytes: int,
    checkpoint: str | None,
) -> None:  # fmt: skip
    def model() -> nn.Module:
        m = direct_model(seed, twice=seed % 2 == 1) if own else make_model(seed, checkpoint=checkpoint)
        return freeze_some(m, seed) if frozen else m

    base = model()
    steps = 5 if micro == 1 else 3
    want = train(
        base,
        plan_of(base, Mode.GFGB),
        config=mf.Config(precision=precision, accumulate=micro),
        micro=micro,
        steps=steps,
        serial=True,
    )
    other = model()
    with poisoned():
        got = train(
            other,
            placed_plan(other, seed + 1),
            config=mf.Config(precision=precision, accumulate=micro if declared else 1),
            micro=micro,
            steps=steps,
            unit_bytes=unit_bytes,
            disturb=Delays(ALL_POINTS, seed, most=0.0005),
        )
    assert_same(want, got)


@pytest.mark.pairwise
@pytest.mark.parametrize("placement", list(Grad))
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_update_in_backward(placement: Grad, micro: int, limit: float | None) -> None:
    config = {"accumulate": micro, "max_grad_norm": limit}
    model = direct_model(3)
    want = train(model, plan_of(model, Mode.GFGB), config=mf.Config(**config), micro=micro, serial=True)
    model = direct_model(3)
    got = train(
        model,
        plan_of(model, Mode.STREAM, grad=placement),
        config=mf.Config(**config, update="backward"),
        micro=micro,
        disturb=Delays(ALL_POINTS, 1, most=0.0005),
    )
    assert_same(want, got)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_direct_layers_leave_no_gradient_to_autograd(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    model = direct_model(0)
    names = {n for n, _ in model.named_parameters()}
    plan = plan_of(model, Mode.GFGB, grad=Grad.DIRECT)
    train(model, plan, steps=1, config=mf.Config(precision=precision))
    assert set(watch.delivered) == names
    assert not watch.written  # the first pass is staged: it shows who else reads what
    model = direct_model(0)
    train(model, plan, steps=3, config=mf.Config(precision=precision))
    later = watch.delivered[2 * len(names) :]
    assert set(later) == {"mix.weight"}  # its input is not contiguous
    assert sorted(watch.written) == sorted(2 * [n for n in names if n != "mix.weight"])


def test_what_is_used_twice_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    model = direct_model(0, twice=True)
    train(model, plan_of(model, Mode.GFGB, grad=Grad.DIRECT), steps=3)
    twice = {"first.weight", "first.bias", "up.weight", "up.bias", "down.weight", "down.bias"}
    assert twice.isdisjoint(watch.written)
    assert {"tokens.weight", "flat.weight", "head.weight"} <= set(watch.written)


def test_declared_accumulation_is_direct_in_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    model = direct_model(0)
    plan = plan_of(model, Mode.GFGB, grad=Grad.DIRECT)
    train(model, plan, steps=2, micro=3, config=mf.Config(precision="bf16", accumulate=3))
    assert watch.written.count("head.weight") == 3  # six backwards, three of them before the first step


def test_a_read_outside_the_forward_pass_is_added_as_autograd_would() -> None:
    def losses(grad: Grad) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = direct_model(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = mf.ferry(model, optimizer, plan=plan_of(model, Mode.GFGB, grad=grad))
        out = []
        for batch in batches(4):
            loss = engine.model(batch) + 0.1 * model.head.weight.float().square().sum()
            loss.backward()
            engine.optimizer.step()
            out.append(float(loss.detach()))
        state = engine.state_dict()["model"]
        engine.close()
        return out, state

    (want, a), (got, b) = losses(Grad.STAGE), losses(Grad.DIRECT)
    assert want == got
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_users_hooks_see_the_gradient() -> None:
    def run(grad: Grad) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = direct_model(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = mf.ferry(model, optimizer, plan=plan_of(model, Mode.GFGB, grad=grad))
        seen: list[float] = []

        def double(g: torch.Tensor) -> torch.Tensor:
            seen.append(float(g.float().sum()))
            return 2 * g

        model.head.weight.register_hook(double)
        for batch in batches(3):
            engine.model(batch).backward()
            engine.optimizer.step()
        state = engine.state_dict()["model"]
        engine.close()
        return seen, state

    (want, a), (got, b) = run(Grad.STAGE), run(Grad.DIRECT)
    assert want == got
    assert len(got) == 3
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("placement", list(Grad))
@pytest.mark.parametrize("micro", [1, 2])
def test_p_grad_is_the_gradient_and_may_be_changed(placement: Grad, micro: int) -> None:
    """Reading, scaling in place, replacing and discarding `p.grad` act as in plain PyTorch, in every placement."""

    def run(grad: Grad) -> Any:
        model = direct_model(2)
        seen: list[torch.Tensor] = []

        def between(engine: mf.Engine) -> None:
            for p in model.parameters():
                assert p.grad is not None and p.grad.device.type == p.device.type
            seen.extend(p.grad.clone() for p in model.parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            model.flat.weight.grad = model.flat.weight.grad * 3
            model.mix.weight.grad = None
            model.up.weight.grad.mul_(0.5)

        result = train(
            model, plan_of(model, Mode.GFGB, grad=grad), between=between, micro=micro, steps=4,
            config=mf.Config(accumulate=micro),
        )  # fmt: skip
        return result, seen

    (want, a), (got, b) = run(Grad.STAGE), run(placement)
    assert_same(want, got)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("placement", list(Grad))
def test_a_gradient_replaced_between_two_backwards_counts_once(placement: Grad) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    engine = mf.ferry(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, Mode.GFGB, grad=placement),
    )
    x = torch.arange(8.0).view(2, 4)
    before = engine.state_dict()["model"]["0.weight"]
    for _ in range(2):
        engine.model(x).sum().backward()
        model[0].weight.grad = torch.ones(3, 4)
        engine.model(x).sum().backward()
        engine.optimizer.step()
    engine.synchronize()
    after = engine.state_dict()["model"]["0.weight"]
    engine.close()
    torch.testing.assert_close(after, before - 2 * (x.sum(0).expand(3, 4) + 1))


@pytest.mark.parametrize("placement", list(Grad))
def test_autograd_grad_leaves_training_alone(placement: Grad) -> None:
    model = direct_model(2)
    plain = copy.deepcopy(model)
    engine = mf.ferry(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, Mode.GFGB, grad=placement),
    )
    batch = batches(1)[0]
    engine.model(batch).backward()
    engine.optimizer.step()
    for name in ("head.weight", "up.weight", "first.weight"):
        got = torch.autograd.grad(engine.model(batch), model.get_parameter(name))[0]
        want = torch.autograd.grad(plain(batch), plain.get_parameter(name))[0]
        assert torch.equal(got, want)
    engine.model(batch).backward(inputs=[model.flat.weight])
    assert model.head.weight.grad is None
    plain(batch).backward(inputs=[plain.flat.weight])
    assert torch.equal(model.flat.weight.grad, plain.flat.weight.grad)
    engine.close()


def test_kept_gradients_live_in_one_buffer_counted_by_the_backend() -> None:
    model = direct_model(0)
    backend = mf.current().backend
    sizes: dict[Grad, int] = {}
    for grad in Grad:
        m = copy.deepcopy(model)
        engine = mf.ferry(m, torch.optim.AdamW(m.parameters()), plan=plan_of(m, Mode.GFGB, grad=grad))
        for batch in batches(2):
            engine.model(batch).backward()
        sizes[grad] = backend.memory_stats().peak
        assert m.head.weight.grad.dtype is torch.float32  # an undeclared second backward: the fp32 sum
        engine.close()
        del engine, m
        gc.collect()
        backend.reset_peak()
    assert sizes[Grad.KEEP] == 2 * sizes[Grad.DIRECT] == 2 * sizes[Grad.STAGE]


def test_a_copy_of_the_model_is_plain() -> None:
    model = direct_model(0)
    engine = mf.ferry(
        model,
        torch.optim.AdamW(model.parameters()),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, Mode.GFGB, grad=Grad.DIRECT),
    )
    batch = batches(1)[0]
    engine.model(batch).backward()
    engine.optimizer.step()
    twin = copy.deepcopy(model)
    twin(batch).backward()
    assert twin.head.weight.grad is not None
    assert twin.head.forward.__self__ is twin.head
    assert torch.equal(twin(batch), engine.model(batch))
    engine.close()
    assert "forward" not in model.head.__dict__


def test_create_graph_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    engine = mf.ferry(
        model,
        torch.optim.AdamW(model.parameters()),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, Mode.GFGB, grad=Grad.DIRECT),
    )
    engine.model(torch.ones(2, 3)).sum().backward()
    engine.optimizer.step()
    x = torch.ones(2, 3, requires_grad=True)
    (g,) = torch.autograd.grad(engine.model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        g.sum().backward()
    engine.close()


@pytest.mark.parametrize(("rows", "width", "tokens"), [(1, 1, 1), (5, 3, 40), (50, 8, 7), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scattered_rows_have_the_bits_of_the_dense_gradient(
    rows: int, width: int, tokens: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(tokens)
    for padding in (-1, 0, rows - 1):
        for shape in ((tokens,), (1, tokens)):
            indices = torch.randint(0, rows, shape, generator=g)
            grad = torch.randn((*shape, width), generator=g).to(dtype)
            want = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding, False)
            out = torch.full((rows, width), float("nan"), dtype=dtype)
            assert torch.equal(direct._scatter_rows(grad, indices, padding, out), want)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 5)])
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_products_of_any_shape_equal_autograds(shape: tuple[int, int], tokens: int, kind: str) -> None:
    from placements import Conv1D

    torch.manual_seed(0)
    make = nn.Linear if kind == "Linear" else (lambda i, o: Conv1D(o, i))
    model = nn.Sequential(make(*shape))
    plain = copy.deepcopy(model)
    engine = mf.ferry(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, Mode.GFGB, grad=Grad.DIRECT),
    )
    for dims in ((tokens, shape[0]), (2, tokens, shape[0])):
        for _ in range(2):
            x = torch.randn(dims, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            weigh = torch.randn(*dims[:-1], shape[1])
            plain.zero_grad()
            a, b = engine.model(x), plain(y)
            assert torch.equal(a, b)
            (a * weigh).sum().backward()
            (b * weigh).sum().backward()
            assert torch.equal(x.grad, y.grad)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
            engine.optimizer.step()
    engine.close()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Conv1d(4, 4, 1), "no kernel of Conv1d"),
        (nn.Embedding(3, 2, sparse=True), "sparse"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.LayerNorm(3, elementwise_affine=False), "not a parameter"),
        (nn.MultiheadAttention(4, 2).out_proj, "no kernel of NonDynamicallyQuantizableLinear"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_why_not(module: nn.Module, reason: str) -> None:
    assert reason in (direct.why_not(module) or "")


def test_a_class_that_only_has_the_name_is_not_trusted() -> None:
    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    assert "not torch.nn.Linear" in (direct.why_not(Linear(2, 2)) or "")
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert "replaced" in (direct.why_not(patched) or "")


def test_direct_forced_on_an_unsupported_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(3, 3, 1))
    plan = Plan((LayerPlan("0", Mode.GFGB, Grad.DIRECT),))
    with pytest.raises(mf.FerryError, match=r"'0'.*direct.*Conv1d.*stage"):
        mf.ferry(model, torch.optim.AdamW(model.parameters()), plan=plan)
    mf.ferry(model, torch.optim.AdamW(model.parameters())).close()  # nothing was changed


def test_the_plan_says_that_a_tied_weight_is_staged() -> None:
    model = make_model(0)
    model.head = nn.Linear(16, 23, bias=False)
    model.head.weight = model.embed.weight
    plan = placed_plan(model, 0).override({"embed": {"grad": "direct", "mode": "GFGB"}})
    with small_units():
        engine = mf.ferry(model, torch.optim.AdamW(model.parameters()), plan=plan)
    assert "staged" in engine.plan["embed"].why
    engine.close()


@pytest.mark.parametrize("checkpoint", ["plain", "reentrant"])
def test_recomputed_layers_are_direct_too(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    models = (make_model(seed, checkpoint=checkpoint) for seed in range(50))
    model = next(m for m in models if m.blocks[0].kind == "mlp" and len(set(m.calls)) == len(m.calls))
    grads = {n: Grad.DIRECT if direct.why_not(m) is None else Grad.STAGE for n, m in model.named_modules()}
    plan = Plan(tuple(LayerPlan(n, Mode.GFGB, grads[n]) for n in layer_names(model)))
    train(model, plan, steps=3)
    for name in ("blocks.0.up.weight", "blocks.0.down.weight", "blocks.0.norm.bias", "final.weight"):
        assert watch.written.count(name) == 2, name


def test_a_step_lets_go_of_gradients_whose_download_the_next_forward_waits_for() -> None:
    """update="backward" publishes nothing, so nothing else would drop them before the next activations need the memory."""
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = mf.ferry(model, optimizer, config=mf.Config(update="backward", planner="rules"))
    try:
        engine.model(batches(1)[0]).backward()
        assert engine._gradients._in_flight_bytes > 0
        engine.optimizer.step()
        assert engine._gradients._in_flight_bytes == 0 and not engine._gradients._in_flight
    finally:
        engine.close()
