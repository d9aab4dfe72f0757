"""A model with every kind that writes gradients directly, and plans with random placements."""

from __future__ import annotations

import random
from typing import Any

import torch
from harness import BATCH, LENGTH, VOCAB, WIDTH, layer_names
from torch import nn
from torch.nn import functional as F

from memferry_ascend.direct import why_not
from memferry_ascend.planner import LayerPlan, Mode, Plan


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2: weight (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view((*x.size()[:-1], self.nf))


class Direct(nn.Module):
    """Embeddings (one with padding), Conv1D, Linear with and without bias, both norms, in-place activations."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice = twice
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.first = nn.LayerNorm(WIDTH)
        self.up, self.down = Conv1D(3 * WIDTH, WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.second = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.flat = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for _ in range(2 if self.twice else 1):
            x = x + self.down(F.relu(self.up(self.first(x)), inplace=True))
        x = x + self.mix(self.second(x).transpose(0, 1)).transpose(0, 1)  # not contiguous: no plain product
        x = self.flat(x.reshape(-1, WIDTH)).tanh_().view(BATCH, LENGTH, WIDTH)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def direct_model(seed: int, **kwargs: Any) -> Direct:
    torch.manual_seed(seed)
    return Direct(**kwargs)


ROWS = 90


class Tables(nn.Module):
    """A large table beside small layers in one unit, and a second one with padding that every batch fills."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=5)
        self.norm = nn.LayerNorm(WIDTH)
        self.places = nn.Embedding(8, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for _ in range(self.calls - 1):
            x = x + self.words(tokens + 1)
        x = self.norm(x) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(F.gelu(self.mix(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tables(seed: int = 0, **kwargs: Any) -> Tables:
    torch.manual_seed(seed)
    return Tables(**kwargs)


def freeze_some(model: nn.Module, seed: int) -> nn.Module:
    """Freeze about a fifth of the parameters, never all of them."""
    rng = random.Random(seed)
    for p in list(model.parameters())[:-1]:
        if rng.random() < 0.2:
            p.requires_grad_(False)
    return model


def placed_plan(
    model: nn.Module, seed: int, *, device: float = 0.0, modes: tuple[Mode, ...] = tuple(Mode)
) -> Plan:
    """Random modes and gradient placements, direct where the layer can; `device` is the share of device updates."""
    rng = random.Random(seed)
    modules = dict(model.named_modules())
    layers = []
    for name in layer_names(model):
        grads = ["keep", "stage"] + (["direct"] if why_not(modules[name]) is None else [])
        if rng.random() < device:
            layers.append(LayerPlan(name, Mode.GFGB, "keep", "device"))  # type: ignore[arg-type]
        else:
            layers.append(LayerPlan(name, rng.choice(modes), rng.choice(grads)))  # type: ignore[arg-type]
    return Plan(tuple(layers))
