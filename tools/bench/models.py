"""The models: transformers configurations and Transformer-XL, with random weights made here.

Every system starts from the same weights, which are bf16 values, so that nobody's fp32 master begins elsewhere:
matrices normal(0, 0.02), norms one, biases zero, each parameter from its own seed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memferry_ascend.errors import FerryError, unknown

from .txl import TransformerXL, TxlConfig


class Unavailable(FerryError):
    """What a row needs is not installed here; the message is the row's reason."""


@dataclass(frozen=True)
class Model:
    """How to make a model and the batch it is measured with."""

    make: Callable[[], nn.Module]
    batch: int
    seq: int


def _bert(kind: str, **sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = _transformers()
        config = getattr(transformers, f"{kind}Config")(
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa", **sizes
        )
        model: nn.Module = getattr(transformers, f"{kind}ForMaskedLM")(config)
        return model

    return make


def _gpt2(**sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = _transformers()
        config = transformers.GPT2Config(
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
            use_cache=False,
            **sizes,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    return make


def _txl(
    vocab: int, hidden: int, layers: int, heads: int | None = None, memory: int = 512
) -> Callable[[], nn.Module]:
    config = TxlConfig(vocab, hidden, layers, heads or hidden // 128, memory)
    return lambda: TransformerXL(config)


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise Unavailable(f"transformers is not installed ({error})") from error
    return transformers


_SIZED = re.compile(r"gpt2-h(\d+)-l(\d+)")


def _sized(hidden: int, layers: int) -> Model:
    """A GPT-2 of any size, with its activations recomputed in the backward, and the batch of the size comparison."""

    def make() -> nn.Module:
        model = _gpt2(n_embd=hidden, n_layer=layers, n_head=max(1, hidden // 64))()
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return model

    return Model(make, 1, 1024)


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS = {
    "tiny": Model(_txl(96, 32, 2, heads=2, memory=8), 2, 8),
    "bert-base": Model(_bert("Bert"), 16, 512),
    "roberta-base": Model(
        _bert("Roberta", vocab_size=50265, max_position_embeddings=514, type_vocab_size=1), 16, 512
    ),
    "bert-large": Model(_bert("Bert", **_LARGE), 16, 512),
    "gpt2-medium": Model(_gpt2(n_embd=1024, n_layer=24, n_head=16), 4, 1024),
    "gpt2-xl": Model(_gpt2(n_embd=1600, n_layer=48, n_head=25), 4, 1024),
    "txl-0.7b": Model(_txl(32768, 2048, 12), 8, 512),
    "txl-1.0b": Model(_txl(65536, 2048, 16), 8, 512),
    "txl-2.0b": Model(_txl(65536, 2560, 22), 8, 512),
    "txl-3.0b": Model(_txl(98304, 3072, 22), 8, 512),
    "txl-4.4b": Model(_txl(114688, 3584, 24), 8, 512),
    "txl-6.7b": Model(_txl(130528, 4096, 28), 8, 512),
}


class _NoInit(TorchFunctionMode):
    """Skips the random numbers of module constructors: `initialise` draws its own, on all cores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def find(name: str) -> Model:
    """The model of that name; "gpt2-h2560-l32" is a GPT-2 of 32 layers of width 2560. Raises ConfigError for an unknown
    name."""
    sized = _SIZED.fullmatch(name)
    if sized is not None:
        return _sized(int(sized[1]), int(sized[2]))
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def build(name: str, seed: int = 0) -> nn.Module:
    """The model on the CPU with bf16 parameters, the same values at every call with that seed.

    Raises:
        Unavailable: a package is missing.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with _NoInit():
            model = find(name).make()
    finally:
        torch.set_default_dtype(before)
    initialise(model, seed)
    return model.train()


def initialise(model: nn.Module, seed: int) -> None:
    """Fill the parameters as the module's docstring says."""
    norms = {id(m.weight) for m in model.modules() if isinstance(m, nn.LayerNorm)}

    def fill(job: tuple[int, nn.Parameter]) -> None:
        index, p = job[0], job[1].detach()  # no_grad is a thread's own
        if p.dim() < 2 or p.shape[-2] == 1:
            p.fill_(float(id(job[1]) in norms))
            return
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        flat = p.view(-1)
        for start in range(0, flat.numel(), 1 << 22):  # fp32 numbers of one piece at a time
            piece = flat[start : start + (1 << 22)]
            piece.copy_(torch.randn(piece.numel(), dtype=torch.float32, generator=generator).mul_(0.02))

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(fill, enumerate(model.parameters())))


def batches(
    model: nn.Module, count: int, batch: int, seq: int, device: torch.device, seed: int = 0
) -> list[dict[str, Tensor]]:
    """`count` batches of random tokens on the device, as keyword arguments. Tokens 0 to 4 mean padding and the like
    to some models and are left out."""
    vocab = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    generator = torch.Generator().manual_seed(seed + 17)
    out = []
    for _ in range(count):
        ids = torch.randint(5, vocab, (batch, seq), generator=generator).to(device)
        out.append({"input_ids": ids, "labels": ids})
    return out


def blocks(model: nn.Module) -> nn.ModuleList:
    """The repeated layers: what FSDP shards one by one."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
