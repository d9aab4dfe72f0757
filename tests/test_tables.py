"""Gradients of untied embeddings: only the rows that a batch touched move, and the bits are those of the dense gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ALL_POINTS, VOCAB, WIDTH, Delays, assert_same, batches, plan_of, poisoned, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placements import Tables, tables
from torch import nn
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend import direct
from memferry_ascend.planner import Grad, Mode

pytestmark = pytest.mark.usefixtures("cpu")

POINTS = (*ALL_POINTS, "clear")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(rows written, whether the rest was clean) of each gradient that moved by rows."""
    seen: list[tuple[int, bool]] = []
    scatter = direct._scatter_rows

    def count(grad: Any, indices: Any, padding: int, out: Any, *, clean: bool = False) -> Any:
        seen.append((indices.numel(), clean))
        if clean:
            assert not out.any(), "the rest of the table was to be zero"
        return scatter(grad, indices, padding, out, clean=clean)

    monkeypatch.setattr(direct, "_scatter_rows", count)
    return seen


def both(make: Callable[[], nn.Module] = tables, grad: Grad = Grad.STAGE, **kwargs: Any) -> None:
    """Train with dense gradients, serially, and by rows with delays; compare."""
    model = make()
    want = train(model, plan_of(model, Mode.GFGB, grad=Grad.KEEP), serial=True, **kwargs)
    model = make()
    kwargs.setdefault("unit_bytes", 1500)
    with poisoned():
        got = train(
            model, plan_of(model, Mode.DHA, grad=grad), disturb=Delays(POINTS, 1, most=0.001), **kwargs
        )
    assert_same(want, got)


@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    micro=st.sampled_from([1, 2, 3]),
    declared=st.booleans(),
    backward=st.booleans(),
    limit=st.sampled_from([None, 0.05]),
    precision=st.sampled_from(["fp32", "bf16"]),
    grad=st.sampled_from([Grad.STAGE, Grad.DIRECT]),
)
def test_rows_give_the_bits_of_the_dense_gradient(
    micro: int, declared: bool, backward: bool, limit: float | None, precision: str, grad: Grad
) -> None:
    accumulate = micro if declared or backward else 1
    update = "backward" if backward else "step"
    config = mf.Config(precision=precision, accumulate=accumulate, update=update, max_grad_norm=limit)
    both(micro=micro, config=config, grad=grad, steps=5)


@pytest.mark.parametrize("point", ["update", "clear"])
def test_the_next_rows_wait_until_the_last_ones_are_cleared(point: str) -> None:
    def make() -> nn.Module:
        return tables(1)

    model = make()
    want = train(model, plan_of(model, Mode.GFGB, grad=Grad.KEEP), serial=True, micro=2)
    for update in ("step", "backward"):
        model = make()
        config = mf.Config(precision="fp32", accumulate=2, update=update)
        delays = Delays((point,), 2, most=0.02)
        got = train(
            model, plan_of(model, Mode.GFGB), micro=2, config=config, disturb=delays, unit_bytes=1 << 20
        )
        assert_same(want, got)
        assert delays.hits >= 5


@pytest.mark.parametrize("grad", [Grad.STAGE, Grad.DIRECT])
def test_only_touched_rows_move(
    grad: Grad, moved: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tables()
    copied: list[int] = []
    download = mf.current().backend.stream("download")
    plain = download.copy

    def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        copied.append(dst.nbytes)
        plain(dst, src)

    monkeypatch.setattr(download, "copy", copy)
    train(model, plan_of(model, Mode.GFGB, grad=grad), steps=4)
    tokens = batches(1)[0].numel()
    table = model.words.weight.nbytes
    assert copied.count(table) == 1  # the first pass shows who reads what
    assert moved.count((tokens, True)) == 2 and moved.count((tokens, False)) == 1


def test_the_torch_optimizers_clear_too(moved: list[tuple[int, bool]]) -> None:
    both(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    assert any(clean for _, clean in moved)


def test_a_batch_that_touches_most_rows_is_dense(moved: list[tuple[int, bool]]) -> None:
    """One long batch among short ones."""
    lengths = [6, 6, 6, 40, 6, 6]

    def run(grad: Grad) -> list[torch.Tensor]:
        model = tables(3)
        model.places = nn.Embedding(64, WIDTH)
        model.places.weight.data.fill_(0.1)
        engine = mf.ferry(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
            config=mf.Config(precision="fp32"),
            plan=plan_of(model, Mode.GFGB, grad=grad),
        )
        g = torch.Generator().manual_seed(4)
        for length in lengths:
            engine.model(torch.randint(0, VOCAB, (3, length), generator=g)).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        state = list(engine.state_dict()["model"].values())
        engine.close()
        return state

    for a, b in zip(run(Grad.KEEP), run(Grad.STAGE), strict=True):
        assert torch.equal(a, b)
    assert (3 * 40, True) not in moved and (3 * 40, False) not in moved
    words = [clean for n, clean in moved if n == 18]
    assert words == [
        False,
        True,
        True,
        True,
    ]  # dense first, and once in the middle, after which it is cleared too


@pytest.mark.parametrize("kind", ["before", "after", "noise", "skip", "zeros", "replace", "clip"])
@pytest.mark.parametrize("micro", [1, 2])
def test_what_users_do_to_gradients(kind: str, micro: int) -> None:
    def noisy(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.add_(0.01)

    def make() -> nn.Module:
        model = tables(2)
        weight = model.words.weight
        if kind == "before":
            weight.register_hook(lambda g: g + 0.01)
        if kind == "after":
            weight.register_post_accumulate_grad_hook(noisy)
        return model

    def between(engine: mf.Engine) -> None:
        weight = engine.model.words.weight
        if kind == "noise":
            weight.grad.data.add_(0.01)
        elif kind == "replace":
            weight.grad = weight.grad * 2 + 0.01
        elif kind in ("skip", "zeros", "clip"):
            if kind == "clip":
                weight.grad = weight.grad * 2 + 0.01
                engine.clip_grad_norm_(0.1)
            engine.optimizer.zero_grad(set_to_none=kind != "zeros")
            for batch in batches(micro, seed=9):
                (engine.model(batch) / micro).backward()

    both(make, micro=micro, between=between, steps=4, config=mf.Config(precision="fp32"))


def test_a_table_used_twice_is_dense(moved: list[tuple[int, bool]]) -> None:
    """Called twice, or read by another module: autograd adds the parts, one dense gradient leaves."""
    both(lambda: tables(calls=2))
    assert not moved

    class Functional(Tables):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + F.embedding(tokens, self.words.weight).square().mean()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Functional()

    both(make)
    assert not moved


def test_a_raising_backward_leaves_nothing_behind(moved: list[tuple[int, bool]]) -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise RuntimeError("broken")

    class Fragile(Tables):
        broken = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            loss = super().forward(tokens)
            return loss + Break.apply(self.places.weight).sum() * 0 if self.broken else loss

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Fragile()

    def between(engine: mf.Engine) -> None:
        engine.optimizer.zero_grad()
        engine.model.broken = True
        loss = engine.model(batches(1, seed=8)[0])
        with pytest.raises(RuntimeError, match="broken"):
            loss.backward()
        engine.model.broken = False
        engine.optimizer.zero_grad()
        engine.model(batches(1, seed=7)[0]).backward()

    both(make, between=between)
    assert moved
