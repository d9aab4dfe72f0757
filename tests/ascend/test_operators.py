"""Every emulated operator gives the CPU's numbers, bit for bit, through torch's ordinary functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

EMULATED = {"devices": 2}

# name: (function of the tensors a, b, c of shape (4, 6, 8); positive; integers; booleans)
Function = Callable[..., object]
FLOATS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "add alpha": lambda a, b: torch.add(a, b, alpha=0.3),
    "add number": lambda a, b: a + 1.5,
    "sub": lambda a, b: a - b,
    "sub number": lambda a, b: a - 0.1,
    "rsub": lambda a, b: 2.0 - a,
    "mul": lambda a, b: a * b,
    "mul number": lambda a, b: a * 0.7,
    "div": lambda a, b: a / b,
    "div number": lambda a, b: a / 3.0,
    "div floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div trunc number": lambda a, b: torch.div(a, 0.3, rounding_mode="trunc"),
    "floor divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "remainder number": lambda a, b: a % 0.7,
    "fmod": lambda a, b: torch.fmod(a, b),
    "broadcast": lambda a, b: a[:1] + b[:, :1],
    "in place": lambda a, b: a.clone().add_(b).sub_(1).mul_(b).div_(2).mul_(3).add_(1).sub_(b).div_(b),
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "exp": lambda a, b: a.exp(),
    "expm1": lambda a, b: a.expm1(),
    "log": lambda a, b: a.abs().log(),
    "log1p": lambda a, b: a.abs().log1p(),
    "log2": lambda a, b: a.abs().log2(),
    "sqrt": lambda a, b: a.abs().sqrt(),
    "rsqrt": lambda a, b: a.abs().rsqrt(),
    "reciprocal": lambda a, b: a.reciprocal(),
    "sin": lambda a, b: a.sin(),
    "cos": lambda a, b: a.cos(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "erf": lambda a, b: a.erf(),
    "sign": lambda a, b: a.sign(),
    "floor": lambda a, b: a.floor(),
    "ceil": lambda a, b: a.ceil(),
    "round": lambda a, b: a.round(),
    "trunc": lambda a, b: a.trunc(),
    "pow": lambda a, b: a.abs().pow(b),
    "pow number": lambda a, b: a.pow(2),
    "pow of number": lambda a, b: torch.pow(2.0, a),
    "square": lambda a, b: a.square(),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "clamp min": lambda a, b: a.clamp_min(0.1),
    "clamp max tensor": lambda a, b: a.clamp(max=b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "minimum": lambda a, b: torch.minimum(a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp tensor": lambda a, b: torch.lerp(a, b, a.sigmoid()),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=0.5),
    "compare": lambda a, b: [a == b, a != b, a < b, a <= b, a > b, a >= b],
    "compare number": lambda a, b: [a == 0, a != 0, a < 0, a <= 0, a > 0, a >= 0],
    "isnan": lambda a, b: (a / 0 * 0).isnan(),
    "isinf": lambda a, b: (a / 0).isinf(),
    "isfinite": lambda a, b: (a / 0).isfinite(),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "masked fill": lambda a, b: a.masked_fill(b > 0, -1.0),
    "equal": lambda a, b: [torch.equal(a, a.clone()), torch.equal(a, b)],
    "sum": lambda a, b: [a.sum(), a.sum(1), a.sum((0, 2), keepdim=True)],
    "mean": lambda a, b: [a.mean(), a.mean(-1, keepdim=True)],
    "amax": lambda a, b: [a.amax(1), a.amin((0, 1))],
    "max": lambda a, b: [a.max(), a.min(), *a.max(1), *a.min(1)],
    "argmax": lambda a, b: [a.argmax(), a.argmax(1), a.argmin(2)],
    "norm": lambda a, b: [
        a.norm(),
        a.norm(dim=1),
        torch.linalg.vector_norm(a),
        torch.linalg.vector_norm(a, 1, dim=0),
    ],
    "any all": lambda a, b: [(a > 0).any(), (a > 0).all(), (a > 0).any(1), (a > 0).all(1)],
    "var": lambda a, b: [a.var(1), a.std(1), *torch.var_mean(a, 2)],
    "cumsum": lambda a, b: a.cumsum(1),
    "topk": lambda a, b: [*a.topk(3, dim=1)],
    "sort": lambda a, b: [*a.sort(dim=2, stable=True)],
    "matmul": lambda a, b: [a @ b.transpose(1, 2), a[0] @ b[0].t(), a @ b[0].t(), a[0] @ b[0, 0]],
    "addmm": lambda a, b: torch.addmm(a[0, :, :6], a[0], b[0].t(), beta=0.5, alpha=2.0),
    "baddbmm": lambda a, b: torch.baddbmm(a[:, :, :6], a, b.transpose(1, 2)),
    "linear": lambda a, b: [
        F.linear(a, b[0]),
        F.linear(a, b[0], b[0, :, 0]),
        F.linear(a[0], b[0], b[0, :, 0]),
    ],
    "cat": lambda a, b: torch.cat([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "split": lambda a, b: [*a.split(3, 1), *a.chunk(2, 2)],
    "repeat": lambda a, b: a.repeat(2, 1, 1),
    "flip": lambda a, b: a.flip(1),
    "pad": lambda a, b: F.pad(a, (1, 2), value=0.5),
    "transposed copy": lambda a, b: [
        a.transpose(0, 2).contiguous(),
        a[:, ::2].clone(),
        a.expand(2, 4, 6, 8).clone(),
    ],
    "copy into a part": lambda a, b: b.clone().index_fill_(0, torch.tensor([1], device=a.device), 0.0),
    "narrow copy": lambda a, b: (lambda t: (t[:, 1:3].copy_(a[:, 2:4]), t)[1])(b.clone()),
    "tril triu": lambda a, b: [a.tril(), a.triu(1)],
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
    "index": lambda a, b: [
        a[torch.tensor([2, 0], device=a.device)],
        a[:, torch.tensor([2, 0], device=a.device)],
    ],
    "index select": lambda a, b: a.index_select(1, torch.tensor([3], device=a.device)),
    "index put": lambda a, b: a.clone().index_put_((torch.tensor([2, 0], device=a.device),), b[:2]),
    "index add": lambda a, b: a.index_add(0, torch.tensor([1, 1], device=a.device), b[:2]),
    "scatter add": lambda a, b: a.scatter_add(1, b.argsort(1), b),
    "one hot": lambda a, b: F.one_hot(a.argmax(2), 8),
    "float to int": lambda a, b: [(a * 10).int(), (a * 10).long(), a.bool(), a.half(), a.bfloat16().float()],
    "softmax": lambda a, b: [a.softmax(-1), a.log_softmax(1)],
    "relu": lambda a, b: [F.relu(a), F.silu(a), F.gelu(a)],
    "layer norm": lambda a, b: F.layer_norm(a, (8,), b[0, 0], b[0, 1]),
    "conv1d": lambda a, b: F.conv1d(a, b[:, :, :3], padding=1),
    "nonzero": lambda a, b: [a.gt(0).nonzero(), a.masked_select(b > 0), a[b > 0]],
    "roll": lambda a, b: a.roll(1, 0),
    "take along": lambda a, b: a.take_along_dim(b.argsort(1), 1),
    "scatter": lambda a, b: [a.scatter(1, b.argsort(1), b), a.scatter(1, b.argsort(1), 0.5)],
    "close": lambda a, b: [torch.isclose(a, b), torch.allclose(a, a), torch.allclose(a, b)],
    "product": lambda a, b: [a.prod(), a.prod(1)],
    "log sum exp": lambda a, b: a.logsumexp(1),
    "count": lambda a, b: (a > 0).count_nonzero(),
    "linspace": lambda a, b: torch.linspace(0, 1, 7, device=a.device),
    "certain choice": lambda a, b: torch.multinomial(torch.tensor([0.0, 1.0, 0.0], device=a.device), 1),
    "more activations": lambda a, b: [F.softplus(a), F.leaky_relu(a)],
    "einsum": lambda a, b: [
        torch.einsum("bij,bkj->bik", a, b),
        torch.outer(a[0, 0], b[0, 0]),
        a[0, 0].dot(b[0, 0]),
    ],
    "rms norm": lambda a, b: F.rms_norm(a, (8,), b[0, 0]),
    "losses": lambda a, b: [
        F.l1_loss(a, b),
        F.smooth_l1_loss(a, b),
        F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    ],
    "foreach": lambda a, b: [
        torch._foreach_neg([a, b]),
        torch._foreach_abs([a, b]),
        torch._foreach_exp([a, b]),
        torch._foreach_reciprocal([a, b]),
        torch._foreach_sqrt([a.abs(), b.abs()]),
        torch._foreach_norm([a, b]),
        torch._foreach_add([a], [b], alpha=0.5),
        torch._foreach_add([a, b], 0.5),
        torch._foreach_add([a, b], [1.0, 2.0]),
        torch._foreach_sub([a], [b]),
        torch._foreach_sub([a, b], 1.0),
        torch._foreach_mul([a], [b]),
        torch._foreach_mul([a, b], 3.0),
        torch._foreach_mul([a, b], [1.0, 2.0]),
        torch._foreach_div([a], [b]),
        torch._foreach_div([a, b], 3.0),
        torch._foreach_pow([a], 2.0),
        torch._foreach_maximum([a], [b]),
        torch._foreach_minimum([a], 0.5),
        torch._foreach_lerp([a], [b], 0.3),
        torch._foreach_addcmul([a], [a], [b], value=2.0),
        torch._foreach_addcdiv([a], [a], [b], [2.0]),
    ],
    "foreach in place": lambda a, b: (
        lambda t: (
            torch._foreach_zero_(t[:1]),
            torch._foreach_copy_(t[1:], [a]),
            torch._foreach_mul_(t, 2.0),
            t,
        )[3]
    )([a.clone(), b.clone()]),
    "numpy": lambda a, b: a.tolist(),
    "item": lambda a, b: [a[1, 2, 3].item(), a.sum().item()],
}

INTEGERS: dict[str, Function] = {
    "arithmetic": lambda a, b: [a + b, a * b, a - b, a // (b + 1), a % (b + 1), a + 1, a * 2],
    "bits": lambda a, b: [a & b, a | b, a ^ b, ~a, a & 3],
    "logic": lambda a, b: [(a > 3) & (b > 3), (a > 3) | (b > 3), ~(a > 3), torch.logical_xor(a > 3, b > 3)],
    "reduce": lambda a, b: [a.sum(), a.max(), (a > 3).sum(), a.cumsum(0)],
    "embedding": lambda a, b: F.embedding(a, torch.arange(30.0, device=a.device).view(10, 3)),
    "create": lambda a, b: [
        torch.arange(5, device=a.device),
        torch.arange(0, 1, 0.25, device=a.device),
        torch.zeros(3, device=a.device),
        torch.ones(3, device=a.device),
        torch.full((3,), 2.5, device=a.device),
        torch.eye(3, device=a.device),
        torch.zeros_like(a),
        torch.ones_like(a),
        a.new_tensor([1, 2]),
    ],
    "bernoulli of ones": lambda a, b: torch.ones(3, device=a.device).bernoulli_(1.0),
}

# Functions whose gradients are compared too.
GRADIENTS: dict[str, Function] = {
    "add mul": lambda a, b: a * b + a,
    "div": lambda a, b: a / b,
    "exp log": lambda a, b: a.exp() + b.abs().log(),
    "pow": lambda a, b: a**3,
    "matmul": lambda a, b: a @ b.transpose(1, 2),
    "linear": lambda a, b: F.linear(a, b[0], b[0, 0, :6]),
    "relu": lambda a, b: F.relu(a) + F.silu(b),
    "gelu": lambda a, b: F.gelu(a) * F.gelu(b),
    "tanh": lambda a, b: a.tanh() * b.sigmoid(),
    "softmax": lambda a, b: a.softmax(-1) * b.log_softmax(1),
    "layer norm": lambda a, b: F.layer_norm(a, (8,), b[0, 0], b[0, 1]),
    "layer norm plain": lambda a, b: F.layer_norm(a, (8,)) * b,
    "mean": lambda a, b: a.mean(1) + b.sum(1) + a.amax(1),
    "index": lambda a, b: a[:, 1:3] * b[torch.tensor([3, 3, 1, 0], device=a.device)][:, 1:3],
    "embedding": lambda a, b: F.embedding(torch.tensor([[1, 2, 2]], device=a.device), a[0]) * b[0, :3],
    "cat": lambda a, b: torch.cat([a, b.transpose(0, 1)[:4, :, :][:, :4].repeat(1, 2, 1)[:, :6]], 1),
    "split": lambda a, b: a.split(2, 2)[1] * b.split(2, 2)[0],
    "cross entropy": lambda a, b: F.cross_entropy(a.flatten(0, 1), b.argmax(2).flatten()),
    "cross entropy ignoring": lambda a, b: F.cross_entropy(
        a.flatten(0, 1), b.argmax(2).flatten(), ignore_index=3
    ),
    "smooth cross entropy": lambda a, b: F.cross_entropy(
        a.flatten(0, 1), b.argmax(2).flatten(), label_smoothing=0.1
    ),
    "mse": lambda a, b: F.mse_loss(a, b),
    "attention": lambda a, b: F.scaled_dot_product_attention(
        a.view(1, 4, 6, 8), b.view(1, 4, 6, 8), b.view(1, 4, 6, 8)
    ),
    "causal attention": lambda a, b: F.scaled_dot_product_attention(
        a.view(1, 4, 6, 8), b.view(1, 4, 6, 8), b.view(1, 4, 6, 8), is_causal=True
    ),
    "masked attention": lambda a, b: F.scaled_dot_product_attention(
        a.view(2, 2, 6, 8),
        b.view(2, 2, 6, 8),
        b.view(2, 2, 6, 8),
        attn_mask=torch.ones(6, 6, device=a.device).tril().bool(),
    ),
    "dropout of nothing": lambda a, b: F.dropout(a, 0.0) * b,
    "conv1d": lambda a, b: F.conv1d(a, b[:, :, :3], padding=1),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "masked fill": lambda a, b: a.masked_fill(b > 0, 0.0) * b,
}


def flat(value: object) -> list[object]:
    """The tensors and numbers in a result, on the CPU."""
    if isinstance(value, Tensor):
        return [value.detach().cpu()]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return [value]


def same(mine: object, cpu: object) -> bool:
    """Equal bits, types and shapes; NaN equals NaN."""
    if isinstance(mine, Tensor) and isinstance(cpu, Tensor):
        return (
            mine.dtype == cpu.dtype
            and mine.shape == cpu.shape
            and torch.allclose(mine, cpu, 0, 0, equal_nan=True)
        )
    return type(mine) is type(cpu) and mine == cpu


def inputs(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    if dtype == torch.int64:
        return tuple(torch.randint(0, 10, (4, 6), generator=draw).to(device) for _ in range(2))
    return tuple(torch.randn(4, 6, 8, generator=draw).to(dtype).to(device) for _ in range(2))


def compare(function: Function, dtype: torch.dtype, gradients: bool) -> None:
    outcomes = []
    for device in ("cpu", "npu:0"):
        a, b = inputs(dtype, device)
        if gradients:
            a.requires_grad_(), b.requires_grad_()
            result = function(a, b)
            weight = torch.arange(result.numel(), dtype=torch.float32).view(result.shape).div(100).to(dtype)
            (result * weight.to(device)).sum().backward()
            result = [result, *(t.grad for t in (a, b) if t.grad is not None)]
        else:
            result = function(a, b)
        outcomes.append(flat(result))
    cpu, npu = outcomes
    assert len(cpu) == len(npu)
    for mine, theirs in zip(npu, cpu, strict=True):
        assert same(mine, theirs), f"NPU {mine}\nCPU {theirs}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FLOATS)
def test_float_operator_equals_cpu(name: str, dtype: torch.dtype) -> None:
    compare(FLOATS[name], dtype, gradients=False)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_operator_equals_cpu(name: str) -> None:
    compare(INTEGERS[name], torch.int64, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_equals_cpu(name: str, dtype: torch.dtype) -> None:
    compare(GRADIENTS[name], dtype, gradients=True)
