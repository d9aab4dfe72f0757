"""Small models for tests: a pre-LN GPT with a tied head and a post-LN BERT. A step costs milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, TOKENS, WIDTH, HEADS = 97, 16, 32, 4


class GPTBlock(nn.Module):
    """Pre-LN attention and MLP, heads by scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = [
            t.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(width, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the loss of predicting `labels` (batch, tokens) from `inputs` (batch, tokens)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class BERT(nn.Module):
    """Masked-token and pair loss; nn.TransformerEncoderLayer with a padding mask; ignored labels."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.kind = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.pair = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token(inputs) + self.position(places) + self.kind((places > 7).long())
        x = self.drop(self.norm(x))
        padding = torch.zeros_like(inputs, dtype=torch.bool)
        padding[:, -2:] = True
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        hidden = labels.masked_fill(labels % 3 != 0, -100)
        words = F.cross_entropy(self.head(x).float().flatten(0, 1), hidden.flatten(), ignore_index=-100)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return words + F.cross_entropy(self.pair(pooled).float(), labels[:, 0] % 2)


def batches(count: int, device: str, batch: int = 4) -> list[tuple[Tensor, Tensor]]:
    """`count` pairs of inputs and labels, the same for every device."""
    draw = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randint(VOCABULARY, (batch, TOKENS), generator=draw).to(device) for _ in range(2))
        for _ in range(count)
    ]
