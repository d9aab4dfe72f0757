"""What ordinary training code does, against plain PyTorch's numbers, in every mode and with slow workers and copies."""

from __future__ import annotations

import copy
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import ALL_POINTS, Delays, batches, layer_names, make_model, plan_of, poisoned, small_units
from torch import nn
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend import runtime
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import LayerPlan, Mode, Plan

FP32 = mf.Config(precision="fp32")
MODES = list(Mode)


@pytest.fixture(autouse=True)
def slow(moves: None, cpu: runtime.Runtime) -> Iterator[Delays]:
    """Every hand-over is late."""
    delays = Delays(ALL_POINTS, seed=1, most=0.001)
    cpu.backend.disturb = delays
    with poisoned():
        yield delays


@pytest.fixture(params=[*MODES, "mixed"])
def mode(request: pytest.FixtureRequest) -> Mode | str:
    """One mode for every layer, or the four in turn."""
    return request.param


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def plan_for(model: nn.Module, mode: Mode | str) -> Plan:
    if mode == "mixed":
        turn = itertools.cycle(MODES)
        return Plan(tuple(LayerPlan(n, next(turn)) for n in layer_names(model)))
    return plan_of(model, Mode(mode))


def ferry(
    model: nn.Module,
    mode: Mode | str = Mode.GFGB,
    config: mf.Config = FP32,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> mf.Engine:
    with small_units():
        return mf.ferry(model, optimizer(model.parameters()), config=config, plan=plan_for(model, mode))


def close_to(a: nn.Module, b: nn.Module, rtol: float = 2e-6) -> None:
    """The plain model `b` holds what `a` holds."""
    want = b.state_dict()
    got = a.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def both(
    model: nn.Module,
    mode: Mode | str,
    loop: Callable[[nn.Module, torch.optim.Optimizer], Any],
    config: mf.Config = FP32,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> None:
    """Run `loop(model, optimizer)` on plain PyTorch and on an engine; results and parameters are the same."""
    plain = copy.deepcopy(model)
    want = loop(plain, optimizer(plain.parameters()))
    with ferry(model, mode, config, optimizer) as engine:
        got = loop(engine.model, engine.optimizer)
    assert got == pytest.approx(want, rel=2e-6, abs=1e-6)
    close_to(model, plain)


class Branches(nn.Module):
    """`pick` says which layers run; the head may be used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor, pick: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        h = self.embed(x)
        for i in pick:
            if i == self.fail_at:
                raise ValueError("halfway")
            h = h + torch.tanh(self.parts[i](h))
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def tokens(n: int, seed: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (2, 5), generator=g) for _ in range(n)]


def branches() -> Branches:
    torch.manual_seed(7)
    return Branches()


PICKS = [(0, 1, 2, 3), (0, 2), (1, 1, 3), (3, 0), (2,), (0, 1, 2, 3), (0, 0, 0)]


def test_unused_and_repeated_parameters(mode: Mode | str) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for x, pick in zip(tokens(7), PICKS, strict=True):
            loss = model(x, pick)
            loss.backward()
            for i, part in enumerate(model.parts):
                assert (part.weight.grad is None) == (i not in pick)
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    both(branches(), mode, loop)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("first", ["step", "zero"])
def test_zero_grad_in_both_forms(mode: Mode | str, to_none: bool, first: str) -> None:
    """With set_to_none=False a parameter without a gradient counts as one of zeros: AdamW still decays it."""

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for x, pick in zip(tokens(7), PICKS, strict=True):
            if first == "zero":
                opt.zero_grad(set_to_none=to_none)
            loss = model(x, pick)
            loss.backward()
            opt.step()
            if first == "step":
                opt.zero_grad(set_to_none=to_none)
            losses.append(float(loss.detach()))
        if not to_none:  # a step on nothing but zeros, at once: the update before it is still in flight
            opt.zero_grad(set_to_none=False)
            opt.step()
            opt.zero_grad(set_to_none=False)
            opt.step()
        return losses

    both(branches(), mode, loop)


def test_gradients_that_the_user_sets(mode: Mode | str) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        for k, x in enumerate(tokens(4)):
            model(x).backward()
            model.head.weight.grad = torch.full_like(model.head.weight, 0.1 * k)  # replaced
            model.parts[0].weight.grad = None  # discarded
            model.parts[1].weight.grad.mul_(0.5)  # edited
            opt.step()
            opt.zero_grad()
            model.head.bias.grad = torch.ones_like(model.head.bias)  # without a backward, update in flight
            opt.step()
            opt.zero_grad()
        return []

    both(branches(), mode, loop)


def test_shared_modules_keep_both_names(mode: Mode | str) -> None:
    torch.manual_seed(0)
    model = branches()
    model.parts[2] = model.parts[0]
    fresh = copy.deepcopy(model)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for x in tokens(4):
            loss = model(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    plain = copy.deepcopy(model)
    want = loop(plain, adamw(plain.parameters()))
    with ferry(model, mode) as engine:
        assert loop(engine.model, engine.optimizer) == pytest.approx(want, rel=2e-6)
        fresh.load_state_dict(engine.state_dict()["model"])
    close_to(fresh, plain)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_then_lora(mode: Mode | str, precision: str) -> None:
    torch.manual_seed(0)
    model = branches()
    with ferry(model, mode) as engine:  # trained whole first, and closed
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
    model.requires_grad_(False)
    for i in range(4):
        model.parts[i] = Lora(model.parts[i])
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    if precision == "fp32":

        def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
            for x in tokens(4):
                model(x).backward()
                opt.step()
                opt.zero_grad()
            return []

        both(model, mode, loop, optimizer=lambda ps: adamw([p for p in ps if p.requires_grad]))
    else:
        config = mf.Config(precision="bf16")
        engine = ferry(model, mode, config, lambda ps: adamw([p for p in ps if p.requires_grad]))
        with engine:
            for x in tokens(4):
                engine.model(x).backward()
                engine.optimizer.step()
            kinds = {what for _, what, _ in engine.memory_report()}
            assert "parameters" in kinds
    for name, p in model.named_parameters():
        if name in frozen:
            want = frozen[name] if precision == "fp32" else frozen[name].bfloat16().float()
            assert torch.equal(p.detach(), want), name


def test_no_grad_evaluation_between_steps(mode: Mode | str) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for x in tokens(5):
            loss = model(x)
            with torch.no_grad():
                losses.append(float(model(tokens(1, 9)[0])))  # between forward and backward
            loss.backward()
            with torch.inference_mode():
                losses.append(float(model(tokens(1, 9)[0], (1, 0))))
            opt.step()
            model.eval()
            with torch.no_grad():
                losses.append(float(model(tokens(1, 9)[0])))
            model.train()
            opt.zero_grad()
        return losses

    both(branches(), mode, loop)


def test_a_forward_that_raises_halfway_is_retried(mode: Mode | str) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for k, x in enumerate(tokens(5)):
            model.fail_at = k % 4
            with pytest.raises(ValueError, match="halfway"):
                model(x)
            model.fail_at = None
            loss = model(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    both(branches(), mode, loop)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("config", [FP32, mf.Config(precision="fp32", accumulate=2)])
@pytest.mark.parametrize("clear", [True, False])
def test_a_backward_that_raises_halfway_is_retried(mode: Mode | str, config: mf.Config, clear: bool) -> None:
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ValueError("boom")

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for k, x in enumerate(tokens(4)):
            handle = model.parts[k % 4].register_forward_pre_hook(lambda _m, a: (Bomb.apply(a[0]),))
            loss = model(x)
            with pytest.raises(ValueError, match="boom"):
                loss.backward()
            handle.remove()
            if clear:
                opt.zero_grad()
            loss = model(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    both(branches(), mode, loop, config)


def test_steps_skipped_on_nan(mode: Mode | str) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        for k, x in enumerate(tokens(6)):
            loss = model(x) * (float("nan") if k in (1, 4) else 1.0)
            loss.backward()
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            assert finite == (k not in (1, 4))
            if finite:
                opt.step()
                losses.append(float(loss.detach()))
            opt.zero_grad()
        return losses

    both(branches(), mode, loop)


class SlowUpdates(Delays):
    """Every update takes its time, so that whoever reads without waiting reads the old value."""

    def __init__(self) -> None:
        super().__init__(("update",), seed=0)

    def __call__(self, point: str) -> None:
        if point == "update":
            time.sleep(0.02)


def test_reads_right_after_step_see_the_new_values(mode: Mode | str, cpu: runtime.Runtime) -> None:
    cpu.backend.disturb = SlowUpdates()

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        ema = [p.detach().clone() for p in model.parameters()]
        seen = []
        for x in tokens(3):
            model(x).backward()
            opt.step()
            for e, p in zip(ema, model.parameters(), strict=True):
                e.lerp_(p.detach(), 0.3)
            opt.zero_grad()
            model(x, (1,)).backward()
            opt.step()
            with torch.no_grad():
                seen.append(float(torch.stack([p.norm() for p in model.parameters()]).norm()))
                seen += [p.mean().item() for p in model.parameters()]
            opt.zero_grad()
            model(x).backward()
            opt.step()
            with torch.no_grad():
                torch._foreach_lerp_(ema, list(model.parameters()), 0.3)
            model(x, (3,))  # a pass that needs little: what it has not waited for must still be waited for
            seen += [p.data.sum().item() for p in model.parameters()]
            opt.zero_grad()
        return seen + [float(e.sum()) for e in ema]

    both(branches(), mode, lambda m, o: torch.tensor(loop(m, o)).tolist())


def test_deepcopy_while_updates_are_in_flight(mode: Mode | str, cpu: runtime.Runtime) -> None:
    cpu.backend.disturb = SlowUpdates()
    model = branches()
    plain = copy.deepcopy(model)
    opt = adamw(plain.parameters())
    plain(tokens(1)[0]).backward()
    opt.step()
    with ferry(model, mode) as engine:
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        twin = copy.deepcopy(engine.model)
        close_to(twin, plain)
        want = {k: v.clone() for k, v in twin.state_dict().items()}
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        engine.synchronize()
        assert all(torch.equal(v, want[k]) for k, v in twin.state_dict().items())
        twin(tokens(1)[0]).backward()  # a plain model of its own
        adamw(twin.parameters()).step()
        twin.load_state_dict(want)
    close_to(twin, plain)


def test_model_state_dict_and_load_state_dict(mode: Mode | str, cpu: runtime.Runtime) -> None:
    cpu.backend.disturb = SlowUpdates()
    other = branches()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        model(tokens(1)[0]).backward()
        opt.step()
        saved = copy.deepcopy(model.state_dict())
        opt.zero_grad()
        model(tokens(1)[0]).backward()
        model.load_state_dict(other.state_dict())
        opt.step()
        model.load_state_dict(saved)
        opt.zero_grad()
        loss = model(tokens(1)[0])
        loss.backward()
        opt.step()
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(saved | {"head.bias": torch.zeros(3)})
        return [float(loss.detach())]

    both(branches(), mode, loop)


def test_edit(mode: Mode | str) -> None:
    model = branches()
    plain = copy.deepcopy(model)
    opt = adamw(plain.parameters())

    def change(m: nn.Module) -> None:
        with torch.no_grad():
            m.head.weight[0] = 0.25
            m.parts[1].bias.zero_()
            m.parts[2].weight.data = torch.full((8, 8), 0.125)
            nn.init.constant_(m.embed.weight, 0.5)

    plain(tokens(1)[0]).backward()
    opt.step()
    change(plain)
    opt.zero_grad()
    plain(tokens(1)[0]).backward()
    opt.step()
    with ferry(model, mode) as engine:
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        with engine.edit() as m:
            change(m)
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()
        with pytest.raises(KeyError), engine.edit():
            raise KeyError("in the middle")
    close_to(model, plain)


def test_edit_keeps_the_low_half_of_what_it_does_not_touch(mode: Mode | str) -> None:
    model = branches()
    with ferry(model, mode, mf.Config(precision="bf16")) as engine:
        before = engine.state_dict()["model"]
        with engine.edit() as m, torch.no_grad():
            m.head.weight[0] = 0.3
        after = engine.state_dict()["model"]
    assert torch.equal(after["head.weight"][0], torch.full((8,), 0.3).bfloat16().float())
    after["head.weight"][0] = before["head.weight"][0]
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_edits_outside_edit_are_noticed(mode: Mode | str) -> None:
    with ferry(branches(), mode) as engine:
        with torch.no_grad():
            engine.model.head.weight.zero_()
        with pytest.raises(FerryError, match=r"'head.weight' was edited in place outside engine.edit"):
            engine.model(tokens(1)[0])
        with engine.edit():
            pass
        engine.model(tokens(1)[0]).backward()
        with torch.no_grad():
            nn.init.ones_(engine.model.head.weight)
        with pytest.raises(FerryError, match="edited in place"):
            engine.optimizer.step()
        with engine.edit():
            pass
        engine.model.half()
        with pytest.raises(FerryError, match="other storage"):
            engine.model(tokens(1)[0])


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.embed(x))
        h = self.norm(h.to(self.norm.weight.dtype)).to(self.head.weight.dtype)
        return F.cross_entropy(self.head(h).flatten(0, 1).float(), x.flatten())


@pytest.mark.parametrize("pattern", ["norm", "LayerNorm", "*"])
def test_mixed_dtypes(mode: Mode | str, pattern: str) -> None:
    torch.manual_seed(0)
    model = MixedTypes()
    model.up.bfloat16()  # a bf16 parameter in an fp32 model: fp32 masters all the same
    plain = copy.deepcopy(model).float()
    with ferry(model, mode, mf.Config(keep_fp32=(pattern,))) as engine:
        kept = {n for n, p in engine.model.named_parameters() if p.dtype is torch.float32}
        everything = {n for n, _ in model.named_parameters()}
        assert kept == (everything if pattern == "*" else {"norm.weight", "norm.bias"})
        opt = adamw(plain.parameters())
        for x in tokens(5):
            loss = engine.model(x)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            want = plain(x)
            want.backward()
            opt.step()
            opt.zero_grad()
            tolerance = 1e-5 if pattern == "*" else 0.03
            assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=tolerance)
    assert model.up.weight.dtype is torch.bfloat16 and model.head.weight.dtype is torch.float32


def test_tensor_hooks_of_the_user(mode: Mode | str) -> None:
    """Before and after ferry, changing the gradient and only looking at it."""
    for late in (False, True):
        seen: list[list[float]] = []

        def attach(model: nn.Module, seen: list[list[float]] = seen) -> None:
            seen.append(mine := [])
            model.head.weight.register_hook(lambda g: g * 0.5)
            model.parts[0].weight.register_hook(lambda g: mine.append(float(g.sum())))

            def post(p: torch.Tensor) -> None:
                assert p.grad is not None
                mine.append(float(p.grad.sum()))
                p.grad.mul_(3.0)

            model.embed.weight.register_post_accumulate_grad_hook(post)
            model.parts[1].bias.register_post_accumulate_grad_hook(post)

        def loop(model: nn.Module, opt: torch.optim.Optimizer, late: bool = late) -> list[float]:
            if late:
                attach(model)
            losses = []
            for x in tokens(4):
                loss = model(x)
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(float(loss.detach()))
            return losses

        model = branches()
        plain = copy.deepcopy(model)
        if not late:
            attach(plain)
            attach(model)
        want = loop(plain, adamw(plain.parameters()))
        with ferry(model, mode) as engine:
            got = loop(engine.model, engine.optimizer)
        assert got == pytest.approx(want, rel=2e-6)
        assert seen[0] == pytest.approx(seen[1], rel=1e-4, abs=1e-5)
        close_to(model, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
def test_checkpointing(mode: Mode | str, reentrant: bool, micro: int) -> None:
    model = make_model(4, checkpoint="reentrant" if reentrant else "plain")

    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        data = batches(3 * micro)
        for k in range(0, 3 * micro, micro):
            for x in data[k : k + micro]:
                loss = model(x)
                loss.backward()
                losses.append(float(loss.detach()))
            opt.step()
            opt.zero_grad()
        return losses

    both(model, mode, loop)


@pytest.mark.parametrize("order", ["first in first out", "last in first out", "summed", "retained"])
def test_two_forwards_then_their_backwards(mode: Mode | str, order: str) -> None:
    def loop(model: nn.Module, opt: torch.optim.Optimizer) -> list[float]:
        losses = []
        data = tokens(8)
        for k in range(0, 8, 2):
            a, b = model(data[k]), model(data[k + 1], (2, 1, 0))
            if order == "summed":
                (a + b).backward()
            elif order == "retained":
                a.backward(retain_graph=True)
                b.backward()
                a.backward()
            else:
                for loss in (a, b) if order.startswith("first") else (b, a):
                    loss.backward()
            opt.step()
            opt.zero_grad()
            losses += [float(a.detach()), float(b.detach())]
        return losses

    both(branches(), mode, loop)


def test_backward_through_a_graph_from_before_the_step_raises(mode: Mode | str) -> None:
    plain = branches()
    stale = plain(tokens(1)[0])
    stale.backward(retain_graph=True)
    adamw(plain.parameters()).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    model = branches()
    with ferry(model, mode) as engine:
        stale = engine.model(tokens(1)[0])
        stale.backward(retain_graph=True)
        engine.optimizer.step()
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation|before the last optimizer step"
        ):
            stale.backward()
        engine.optimizer.zero_grad()
        loss = engine.model(tokens(1)[0])  # and training goes on
        loss.backward()
        engine.optimizer.step()


def test_gradients_of_gradients_are_refused_or_right(mode: Mode | str) -> None:
    with ferry(branches(), mode) as engine:
        loss = engine.model(tokens(1)[0])
        with pytest.raises(FerryError, match=r"gradients of gradients|gradients of\s+gradients"):
            loss.backward(create_graph=True)
        engine.optimizer.zero_grad()
        got = torch.autograd.grad(engine.model(tokens(1)[0]), list(engine.model.parameters()))
        plain = branches()
        want = torch.autograd.grad(plain(tokens(1)[0]), list(plain.parameters()))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert all(p.grad is None for p in engine.model.parameters())
        engine.model(tokens(1)[0]).backward()
        engine.optimizer.step()


def test_gradients_from_before_ferry_count(mode: Mode | str) -> None:
    model = branches()
    model(tokens(1)[0]).backward()
    plain = copy.deepcopy(model)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        a.grad = b.grad.clone()
    x = tokens(1, 5)[0]
    opt = adamw(plain.parameters())
    plain(x).backward()
    opt.step()
    with ferry(model, mode) as engine:
        engine.model(x).backward()
        engine.optimizer.step()
    close_to(model, plain)


# -- refused -------------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_ferry() -> None:
    model = branches()
    before = copy.deepcopy(model.state_dict())
    halves = [list(model.parameters())[:4], list(model.parameters())[4:]]
    with pytest.raises(FerryError, match="several optimizers"):
        mf.ferry(model, [adamw(h) for h in halves])  # type: ignore[arg-type]
    with pytest.raises(FerryError, match="trainable but not in the optimizer"):
        mf.ferry(model, adamw(halves[0]))
    with pytest.raises(FerryError, match="LBFGS"):
        mf.ferry(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(FerryError, match="SparseAdam"):
        mf.ferry(model, torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(FerryError, match=r"torch.compile"):
        mf.ferry(torch.compile(model), adamw(model.parameters()))
    inner = branches()
    inner.parts[1].compile()
    with pytest.raises(FerryError, match=r"torch.compile'd one \(at 'parts.1'\)"):
        mf.ferry(inner, adamw(inner.parameters()))
    norm = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    with pytest.raises(FerryError, match="max_norm"):
        mf.ferry(norm, adamw(norm.parameters()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with ferry(model), pytest.raises(FerryError, match="ferried already"):
        ferry(model)


def test_what_is_refused_after_ferry(mode: Mode | str) -> None:
    model = branches()
    optimizer = adamw(model.parameters())
    engine = mf.ferry(model, optimizer, config=FP32, plan=plan_for(model, mode))
    x = tokens(1)[0]
    with engine:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(FerryError, match="autocast"):
            engine.model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            engine.model(x)
        engine.model(x).backward()
        with pytest.raises(FerryError, match="original optimizer"):
            optimizer.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(engine.model(x)).backward()
        with pytest.raises(FerryError, match="GradScaler"):
            scaler.step(engine.optimizer)
        with pytest.raises(FerryError, match="add_param_group"):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(FerryError, match="assign=True"):
            engine.model.load_state_dict(branches().state_dict(), assign=True)
        engine.optimizer.zero_grad()
        with pytest.raises(FerryError, match="at least one parameter with a gradient"):
            engine.optimizer.step()
        engine.model.head.requires_grad_(False)
        engine.model(x).backward()
        with pytest.raises(FerryError, match="requires_grad was toggled"):
            engine.optimizer.step()
        engine.model.head.requires_grad_(True)
        engine.optimizer.zero_grad()
        engine.model(x).backward()
        engine.optimizer.step()
    with pytest.raises(FerryError, match="closed"):
        engine.optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    model(x).backward()
    optimizer.step()  # the model and its optimizer are plain again


# -- optimizers and schedules ----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def some_steps(model: nn.Module, opt: torch.optim.Optimizer, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in data:
        loss = model(x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_per_parameter_optimizer_equals_plain(name: str) -> None:
    """And its state goes to plain PyTorch and back through state_dict, and to plain PyTorch through close."""
    make = OPTIMIZERS[name]
    data = tokens(16)
    model = branches()
    plain, third = copy.deepcopy(model), branches()
    opt = make(plain.parameters())
    want = some_steps(plain, opt, data)

    with ferry(model, "mixed", optimizer=make) as engine:
        got = some_steps(engine.model, engine.optimizer, data[:4])
        weights, state = engine.model.state_dict(), engine.optimizer.state_dict()
        inner = engine.optimizer.inner
    third.load_state_dict(weights)  # to plain
    third_opt = make(third.parameters())
    third_opt.load_state_dict(state)
    got += some_steps(third, third_opt, data[4:8])
    with ferry(third, "mixed", optimizer=lambda p: third_opt) as engine:  # and back, with its state
        got += some_steps(engine.model, engine.optimizer, data[8:12])
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    got += some_steps(third, third_opt, data[12:])  # and plain again: close gave the state back
    assert got == pytest.approx(want, rel=5e-6)
    close_to(third, plain, rtol=2e-5)
    assert inner.state_dict()["state"].keys() == state["state"].keys()
    for number, entry in opt.state_dict()["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(
                torch.as_tensor(third_opt.state_dict()["state"][number][key]).float(),
                torch.as_tensor(value).float(),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, key=key: f"{name} {key}: {m}",
            )


def test_optimizer_hooks_and_groups(mode: Mode | str) -> None:
    model = branches()
    calls: list[str] = []
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": 0.0}], lr=0.1, momentum=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with mf.ferry(model, optimizer, config=FP32, plan=plan_for(model, mode)) as engine:
        engine.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        some_steps(engine.model, engine.optimizer, tokens(2))
    assert calls == ["before", "after"] * 2
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name]) == (p.dim() == 1), name


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [adamw, OPTIMIZERS["SGD momentum"]])
def test_schedulers_made_before_and_after_ferry(
    mode: Mode | str, when: str, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """The schedule moves on while workers compute: they must not see the next learning rate."""

    def schedule(opt: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1.0 if k % 2 else 0.1)

    def loop(model: nn.Module, opt: torch.optim.Optimizer, lr: Any) -> list[float]:
        rates = []
        for x in tokens(5):
            model(x).backward()
            opt.step()
            lr.step()
            opt.zero_grad()
            rates.append(lr.get_last_lr()[0])
        return rates

    model = branches()
    plain = copy.deepcopy(model)
    opt = make(plain.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" would be wrong
        want = loop(plain, opt, schedule(opt))
        opt = make(model.parameters())
        early = schedule(opt) if when == "before" else None
        with small_units():
            engine = mf.ferry(model, opt, config=FP32, plan=plan_for(model, mode))
        with engine:
            assert loop(engine.model, engine.optimizer, early or schedule(engine.optimizer)) == want
        if early is not None:  # the scheduler's wrapper is back in its place
            model(tokens(1)[0]).backward()
            opt.step()
            early.step()
    if early is None:
        close_to(model, plain)


def test_loading_an_empty_optimizer_state_forgets(mode: Mode | str) -> None:
    model = branches()
    fresh = adamw(branches().parameters()).state_dict()
    start = copy.deepcopy(model.state_dict())
    with ferry(model, mode) as engine:
        first = some_steps(engine.model, engine.optimizer, tokens(3))
        engine.model.load_state_dict(start)
        engine.optimizer.load_state_dict(fresh)
        assert engine.optimizer.state_dict()["state"] == {}
        assert some_steps(engine.model, engine.optimizer, tokens(3)) == first


# -- the engine's end ------------------------------------------------------------------------------------------------------


def test_a_second_thread_may_read_a_snapshot(mode: Mode | str) -> None:
    """`state_dict` from another thread, as a logger does, is of one moment per parameter."""
    with ferry(branches(), mode) as engine:
        out: list[Any] = []
        for x in tokens(3):
            engine.model(x).backward()
            engine.optimizer.step()
            thread = threading.Thread(target=lambda: out.append(engine.model.state_dict()))
            thread.start()
            thread.join()
        engine.synchronize()
        want = engine.model.state_dict()
    assert all(torch.equal(v, want[k]) for k, v in out[-1].items())
