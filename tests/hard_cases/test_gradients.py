"""What users do with gradients, against plain PyTorch's numbers, in every mode and with slow workers and copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memferry_ascend.planner import Mode

from .helpers import PICKS, adamw, both, branches, close_to, ferry, some_steps, tokens


@pytest.mark.pairwise
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
            return some_steps(model, opt, tokens(4))

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
