"""A byte-level GPT of any size, from one that trains on two cores in a minute to one no single device holds.

Tensor names carry their shape: B batch, T time, D width, H heads, K width of a head, V vocabulary (bytes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memferry_ascend.errors import ConfigError, unknown

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """What defines a GPT: `layers` blocks of width `width` with `heads` heads, reading `context` bytes."""

    layers: int
    width: int
    heads: int
    context: int = 1024

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a model needs {name} >= 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} is not a multiple of {self.heads} heads")

    @property
    def parameters(self) -> int:
        """The exact number of parameters, without building the model. The head is tied: counted once."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (VOCABULARY + self.context + 2) * self.width


# GPT-2's shapes count a vocabulary of 50257; with 256 bytes depth makes up for it, so that names stay true.
PRESETS = {
    "gpt-1m": Shape(layers=5, width=128, heads=4, context=128),
    "gpt-10m": Shape(layers=6, width=384, heads=6, context=256),
    "gpt-25m": Shape(layers=8, width=512, heads=8, context=512),
    "gpt-124m": Shape(layers=17, width=768, heads=12),
    "gpt-350m": Shape(layers=28, width=1024, heads=16),
    "gpt-1.5b": Shape(layers=48, width=1600, heads=25),
    "gpt-7b": Shape(layers=35, width=4096, heads=32, context=2048),
}


class Output(NamedTuple):
    """`loss`: a scalar, fp32, nats per byte (None without targets); `logits`: (B, T, 256)."""

    loss: Tensor | None
    logits: Tensor


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(x_BTD).split(D, dim=-1)
        )
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Attention and a GELU MLP, each behind its LayerNorm (pre-LN)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.ln2(x_BTD))))


class GPT(nn.Module):
    """The language model; `head.weight` is `embed.weight`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        """`tokens` and `targets` are (B, T) int64 bytes, T at most the context."""
        time = tokens.shape[1]
        if time > self.shape.context:
            raise ConfigError(f"the model reads {self.shape.context} bytes of context, the batch has {time}")
        x_BTD = self.embed(tokens) + self.position(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.ln(x_BTD))
        if targets is None:
            return Output(None, logits_BTV)
        return Output(F.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten()), logits_BTV)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """As GPT-2: normal(0, 0.02), the projections back into the stream scaled by 1/sqrt(2 layers)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding) and module is not self.head:
                back = name.endswith(("attn.proj", "down"))
                std = 0.02 / (2 * self.shape.layers) ** 0.5 if back else 0.02
                module.weight.normal_(0.0, std, generator=generator)
                if isinstance(module, nn.Linear):
                    module.bias.zero_()


def shape_of(preset: str, context: int | None = None) -> Shape:
    """The shape of a preset, with another context length (bytes) if given. Raises ConfigError if unknown."""
    if preset not in PRESETS:
        raise unknown(
            "model preset", preset, (f"{n} ({s.parameters / 1e6:.1f} M)" for n, s in PRESETS.items())
        )
    shape = PRESETS[preset]
    return shape if context is None else replace(shape, context=context)


def build(shape: Shape, seed: int = 0) -> GPT:
    """The fp32 model on the CPU. Built without memory first, so that each parameter is written once, by our
    own initialisation: at 7 B parameters torch's default one would cost as much time again."""
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight  # to_empty gives every module its own parameter
    model.initialise(torch.Generator().manual_seed(seed))
    return model
