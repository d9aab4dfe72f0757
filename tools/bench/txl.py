"""Transformer-XL (Dai et al., 2019), compactly: relative positional attention over a segment memory.

Kept from the original: content and position biases per head, sinusoidal relative encodings projected per layer,
the relative shift, the memory of the previous segment's hidden states (no gradient), tied input and output
embeddings. Simplified: layer norm before each block instead of after it (the original's `pre_lnorm`), one full
softmax instead of the adaptive one, no dropout, biases u and v per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TxlConfig:
    """`memory` is how many hidden states of earlier segments each layer attends to."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    memory: int = 512

    @property
    def vocab_size(self) -> int:
        return self.vocab


class RelativeAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * hidden, bias=False)
        self.position = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, hidden // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, 1, hidden // heads))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-2, -3)

    def forward(self, x: Tensor, context: Tensor, distances: Tensor) -> Tensor:
        """x: [batch, T, hidden]; context: [batch, K, hidden], memory then x; distances: [K, hidden], far to near."""
        t, k = x.shape[1], context.shape[1]
        q = self._split(self.query(x))
        keys, values = (self._split(half) for half in self.key_value(context).chunk(2, -1))
        scores = (q + self.position_bias) @ self._split(self.position(distances)).transpose(-1, -2)
        # The relative shift: column j of row i becomes the score at distance (K - T) + i - j.
        shifted = F.pad(scores, (1, 0)).view(*scores.shape[:2], k + 1, t)[:, :, 1:].reshape(scores.shape)
        future = torch.ones(t, k, dtype=torch.bool, device=x.device).triu(k - t + 1)
        bias = (shifted * (x.shape[-1] // self.heads) ** -0.5).masked_fill(future, float("-inf"))
        y = F.scaled_dot_product_attention(q + self.content_bias, keys, values, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = RelativeAttention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, memory: Tensor | None, distances: Tensor) -> Tensor:
        seen = x if memory is None else torch.cat([memory, x], 1)
        h = self.norm1(seen)
        x = x + self.attention(h[:, -x.shape[1] :], h, distances)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class TransformerXL(nn.Module):
    """Called with `input_ids` and `labels` [batch, T]; gives `.loss` of predicting the next token. Each call
    continues from the memory the call before left, which starts empty."""

    def __init__(self, config: TxlConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config.hidden, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.embed.weight
        self._memory: list[Tensor] | None = None

    def _distances(self, length: int, like: Tensor) -> Tensor:
        steps = torch.arange(length - 1, -1, -1, device=like.device, dtype=torch.float32)
        half = torch.arange(0, self.config.hidden, 2, device=like.device, dtype=torch.float32)
        angles = steps[:, None] * torch.exp(half * (-9.210340371976184 / self.config.hidden))  # ln 10000
        return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        old = self._memory
        if old is not None and old[0].shape[0] != x.shape[0]:
            old = None
        kept = 0 if old is None else old[0].shape[1]
        distances = self._distances(kept + x.shape[1], x)
        memory: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            before = None if old is None else old[i]
            seen = x.detach() if before is None else torch.cat([before, x.detach()], 1)
            memory.append(seen[:, -self.config.memory :])
            x = layer(x, before, distances)
        self._memory = memory
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)
