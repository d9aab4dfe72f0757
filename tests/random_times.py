"""Profiles of real models with random times, in which every placement is worth it somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from memferry_ascend.layers import Layer
from memferry_ascend.outline import outline, shared_owners
from memferry_ascend.planner import LayerProfile, LinkProfile, Profile

Make = Callable[[Any], torch.optim.Optimizer]
LINK = LinkProfile(h2d=1e9, d2h=1e9, duplex=1.5e9, latency=1e-6)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def random_times(layers: list[Layer], seed: int, base_bytes: int = 0) -> Profile:
    """A profile of real layers with times drawn so that every placement is worth it somewhere. Nothing is held back that
    an engine might refuse."""
    rng = random.Random(seed)
    shares, out = shared_owners(layers), []
    host, device = rng.choice([0.1, 1.0, 10.0]), rng.choice([0.05, 1.0, 20.0])
    for i, x in enumerate(layers):
        nbytes = sum(p.nbytes for p in x.reads)
        t = nbytes / LINK.h2d + 1e-6
        fp, bp = t * rng.choice([0.1, 1.0, 3.0]), t * rng.choice([0.2, 2.0, 4.0])
        out.append(
            LayerProfile(
                name=x.name, kind=x.kind, bytes=nbytes, t_trans=t, t_fp=fp, t_bp=bp,
                t_fp_dha=fp + t * rng.choice([0.0, 0.1, 3.0]), t_bp_dha=bp + t * rng.choice([0.0, 0.1, 3.0]),
                t_bp_grad_direct=bp * rng.choice([0.2, 1.02, 1.5]), t_gap_fp=0.0, t_gap_bp=0.0,
                t_update=t * host * rng.choice([0.5, 2.0]), dha_bytes=nbytes, shares=shares.get(i),
                trainable=any(p.trainable for p in x.reads), itemsize=x.reads[0].dtype.itemsize,
                t_update_device=t * device,
            )
        )  # fmt: skip
    if rng.random() < 0.3:  # forward order is not always the order of registration
        rng.shuffle(out)
    return Profile(tuple(out), LINK, base_bytes, parameters=outline(layers))
