"""Training on an emulated NPU ends with the CPU's parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import BERT, GPT, batches
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Some tasks wait up to 100 us, so that streams and the host meet in changing orders.
EMULATED = {"devices": 2, "jitter": "100:1"}

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
}


def train(
    model: Callable[[], nn.Module], optimizer: Optimizer, device: str, dtype: torch.dtype, steps: int = 3
) -> tuple[list[float], list[Tensor]]:
    """Losses and gradient norms of each step, and the parameters at the end.

    nn.MultiheadAttention hands over a mask of numbers. torch_npu then computes attention from single
    operators, where the CPU would take its fused kernel: the CPU is held to the same formula.
    """
    if device == "cpu" and model is BERT:
        with sdpa_kernel(SDPBackend.MATH):
            return train_here(model, optimizer, device, dtype, steps)
    return train_here(model, optimizer, device, dtype, steps)


def train_here(
    model: Callable[[], nn.Module], optimizer: Optimizer, device: str, dtype: torch.dtype, steps: int
) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    net = model().to(dtype).to(device)
    update = optimizer(list(net.parameters()))
    schedule = torch.optim.lr_scheduler.LambdaLR(update, lambda step: 1 / (step + 1))
    numbers = []
    for inputs, labels in batches(steps, device):
        loss = net(inputs, labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        update.step()
        schedule.step()
        update.zero_grad()
        numbers += [loss.item(), norm.item()]
    return numbers, [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gpt_trains_as_on_cpu(dtype: torch.dtype) -> None:
    cpu, cpu_parameters = train(GPT, OPTIMIZERS["adamw"], "cpu", dtype)
    npu, npu_parameters = train(GPT, OPTIMIZERS["adamw"], "npu:0", dtype)
    assert npu == cpu
    assert cpu[0] > 3.0  # it is a loss, not a zero
    assert all(torch.equal(a, b) for a, b in zip(npu_parameters, cpu_parameters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bert_trains_as_on_cpu(dtype: torch.dtype) -> None:
    """Up to rounding: torch_npu differentiates a batched product by other products than torch does.

    By SGD: Adam magnifies gradients that are zero but for rounding (those of the key's bias).
    """
    cpu, cpu_parameters = train(BERT, OPTIMIZERS["sgd"], "cpu", dtype)
    npu, npu_parameters = train(BERT, OPTIMIZERS["sgd"], "npu:0", dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert npu == pytest.approx(cpu, rel=tolerance)
    for mine, theirs in zip(npu_parameters, cpu_parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_updates_as_on_cpu(name: str) -> None:
    cpu, cpu_parameters = train(GPT, OPTIMIZERS[name], "cpu", torch.float32)
    npu, npu_parameters = train(GPT, OPTIMIZERS[name], "npu:1", torch.float32)
    assert npu == cpu
    assert all(torch.equal(a, b) for a, b in zip(npu_parameters, cpu_parameters, strict=True))


def test_fused_adamw_is_adamw() -> None:
    """torch_npu passes the hyperparameters of the fused operator in float32: equal up to their rounding."""
    cpu, cpu_parameters = train(GPT, OPTIMIZERS["adamw"], "cpu", torch.float32)
    fused, parameters = train(
        GPT, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), "npu:0", torch.float32
    )
    assert fused == pytest.approx(cpu, rel=1e-4)
    for mine, theirs in zip(parameters, cpu_parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-3)  # of up to 3e-2 that three steps move


def test_activation_checkpointing_changes_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    net = GPT().npu()
    inputs, labels = batches(1, "npu:0")[0]
    net(inputs, labels).backward()
    plain = [p.grad.cpu() for p in net.parameters()]
    net.zero_grad()
    for block in net.blocks:
        block.forward = lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False)
    net(inputs, labels).backward()
    assert all(torch.equal(a, p.grad.cpu()) for a, p in zip(plain, net.parameters(), strict=True))


def test_random_numbers_are_seeded_and_plausible() -> None:
    def draw(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        where = {"device": "npu:0"}
        dropped = nn.functional.dropout(torch.ones(4096, **where), 0.25)
        return [
            torch.randn(4096, **where).cpu(),
            torch.rand(4096, **where).cpu(),
            torch.randint(10, (4096,), **where).cpu(),
            torch.randperm(64, **where).cpu(),
            dropped.cpu(),
        ]

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    normal, uniform, integers, order, dropped = first
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.1
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert set(integers.tolist()) == set(range(10))
    assert sorted(order.tolist()) == list(range(64))
    assert sorted(set(dropped.tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert 0.2 < (dropped == 0).float().mean() < 0.3


def test_dropout_backward_uses_the_forward_mask() -> None:
    torch.manual_seed(2)
    x = torch.randn(64, 64).npu().requires_grad_()
    out = nn.functional.dropout(x, 0.5)
    out.sum().backward()
    assert torch.equal((out == 0).cpu(), (x.grad == 0).cpu())


def test_bert_with_dropout_learns() -> None:
    torch.manual_seed(0)
    net = BERT(dropout=0.1).npu()
    update = torch.optim.AdamW(net.parameters(), lr=1e-3)
    inputs, labels = batches(1, "npu:0")[0]
    losses = []
    for _ in range(8):
        loss = net(inputs, labels)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
