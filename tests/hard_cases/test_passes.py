"""Unusual forward and backward passes, against plain PyTorch's numbers, in every mode and with slow workers and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import batches, make_model
from torch import nn

import memferry_ascend as mf
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import Mode

from .helpers import FP32, PICKS, adamw, both, branches, ferry, one_step, tokens


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
            losses.append(one_step(model, opt, x))
        return losses

    both(branches(), mode, loop)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.pairwise
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


@pytest.mark.pairwise
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


@pytest.mark.pairwise
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
