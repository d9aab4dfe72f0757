"""Profiles for the planner's tests: one layer, random small models, a BERT on the paper's machine."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from memferry_ascend.planner import Grad, LayerProfile, LinkProfile, Mode, Profile, Update
from memferry_ascend.planner.launches import ALTERNATIVES

LINK = LinkProfile(h2d=12e9, d2h=12e9, duplex=20e9, latency=1e-5)


def layer(name: str = "a", **changes: Any) -> LayerProfile:
    """A layer with round figures: seconds as if in units of 1 s."""
    values: dict[str, Any] = {
        "name": name, "kind": "Linear", "bytes": 1000, "t_trans": 4.0, "t_fp": 1.0, "t_bp": 2.0,
        "t_fp_dha": math.inf, "t_bp_dha": math.inf, "t_bp_grad_direct": math.inf, "t_gap_fp": 0.0,
        "t_gap_bp": 0.0, "t_update": 1.0, "dha_bytes": 0,
    }  # fmt: skip
    return LayerProfile(**{**values, **changes})


def profile_of(*layers: LayerProfile, link: LinkProfile = LINK, base_bytes: int = 0) -> Profile:
    return Profile(layers=layers, link=link, base_bytes=base_bytes)


def random_profile(seed: int, most: int = 5, *, count: int | None = None, contention: bool = True) -> Profile:
    """A random model of one to `most` layers: tied, frozen, recomputed, empty and equal layers, with and
    without
    latency, gaps, DHA, direct gradients, host times and launching costs. Without `contention` no bandwidth is ever
    shared (so no gradient is written directly either).
    """
    rng = random.Random(seed)
    count = count or rng.randint(1, most)
    h2d = rng.choice([6e9, 12e9, 50e9])
    duplex = rng.choice([1.0, 1.4, 2.0]) * h2d if contention else 4 * h2d
    host = rng.choice([None, 3 * h2d, 6 * h2d]) if contention else None
    latency = rng.choice([0.0, 1e-5])
    link = LinkProfile(h2d=h2d, d2h=h2d, duplex=duplex, latency=latency, host_memory=host)
    layers: list[LayerProfile] = []
    equal = rng.random() < 0.2
    for i in range(count):
        if equal and layers:
            values = {**layers[0].__dict__, "name": f"layer{i}", "shares": None}
            layers.append(LayerProfile(**values))
            continue
        owners = [x for x in layers if x.shares is None and x.bytes]
        shares = rng.choice(owners) if owners and rng.random() < 0.15 else None
        nbytes = rng.choice([0, rng.randint(1, 50) * 1000, rng.randint(1, 60) * 10**6])
        if shares is not None:
            nbytes = shares.bytes + rng.choice([0, 2000])
        t_trans = latency + nbytes / h2d if nbytes else 0.0
        t_fp = rng.choice([0.0, 2e-5, t_trans, rng.uniform(1e-5, 2e-3)])
        t_bp = 2 * t_fp
        usable = rng.random() < 0.7
        t_fp_dha = t_fp + rng.choice([0.0, 0.1, 1.0, 4.0]) * t_trans * rng.random() if usable else math.inf
        t_bp_dha = t_bp + rng.choice([0.0, 0.5, 3.0]) * t_trans if usable and rng.random() < 0.9 else math.inf
        t_direct = t_bp + rng.uniform(-0.1, 1.0) * t_trans if contention and rng.random() < 0.7 else math.inf
        dha_bytes = 0 if not usable or not contention else int(min(nbytes, h2d * t_fp_dha) * rng.random())
        layers.append(
            LayerProfile(
                name=f"layer{i}",
                kind="Linear",
                bytes=nbytes,
                t_trans=t_trans,
                t_fp=t_fp,
                t_bp=t_bp,
                t_fp_dha=t_fp_dha,
                t_bp_dha=t_bp_dha,
                t_bp_grad_direct=max(0.0, t_direct),
                t_gap_fp=rng.choice([0.0, 1e-5]),
                t_gap_bp=rng.choice([0.0, 1e-5]),
                t_update=rng.choice([0.5, 1.0, 3.0]) * nbytes / h2d,
                dha_bytes=dha_bytes,
                shares=None if shares is None else shares.name,
                trainable=rng.random() < 0.85,
                recompute=rng.random() < 0.15,
                itemsize=2,
            )
        )
    base_bytes = rng.choice([0, 10**6])
    return with_launching(
        Profile(layers=tuple(layers), link=link, base_bytes=base_bytes), random.Random(~seed)
    )


def with_launching(profile: Profile, rng: random.Random) -> Profile:
    """The profile with random host times, from none to more than the device's, and half of the time with costs."""
    layers = []
    for x in profile.layers:
        share = rng.choice([0.0, 0.5, 1.0, 1.5])
        layers.append(replace(x, t_host_fp=share * x.t_fp, t_host_bp=share * x.t_bp))
    costs = {name: (rng.choice([0.0, 1e-5, 2e-4]), rng.choice([0.0, 1e-5, 2e-4])) for name in ALTERNATIVES}
    return replace(profile, layers=tuple(layers), launches=costs if rng.random() < 0.5 else {})


def bert_on_pcie3(blocks: int = 12, tokens: int = 8 * 128) -> Profile:
    """BERT-base in fp32 as on the paper's A100 with PCIe 3: about 12 GB/s each way, embeddings gathered by
    DHA.
    """
    link = LinkProfile(h2d=12e9, d2h=12e9, duplex=20e9, latency=1e-5, host_memory=100e9)
    width, flops, hbm = 768, 60e12, 1.2e12

    def embedding(name: str, rows: int) -> LayerProfile:
        nbytes, read = rows * width * 4, min(rows, tokens) * width * 4
        on_device, by_dha = 1e-5 + 2 * read / hbm, 2e-5 + read / link.h2d
        return build(name, "Embedding", nbytes, on_device, on_device, by_dha, on_device, read)

    def norm(name: str) -> LayerProfile:
        on_device = 1e-5 + 2 * tokens * width * 4 / hbm
        return build(name, "LayerNorm", 2 * width * 4, on_device, 2 * on_device, on_device + 1e-5,
                     2 * on_device + 1e-5, 2 * width * 4)  # fmt: skip

    def linear(name: str, inputs: int, outputs: int) -> LayerProfile:
        nbytes = (inputs + 1) * outputs * 4
        on_device = 1e-5 + 2 * tokens * inputs * outputs / flops
        reads = max(1, tokens // 128) * nbytes  # once per tile of rows
        return build(name, "Linear", nbytes, on_device, 2 * on_device, on_device + reads / link.h2d,
                     2 * on_device + reads / link.h2d, reads)  # fmt: skip

    def build(
        name: str, kind: str, nbytes: int, fp: float, bp: float, fp_dha: float, bp_dha: float, read: int
    ) -> LayerProfile:
        return LayerProfile(
            name=name, kind=kind, bytes=nbytes, t_trans=link.latency + nbytes / link.h2d, t_fp=fp, t_bp=bp,
            t_fp_dha=fp_dha, t_bp_dha=bp_dha, t_bp_grad_direct=bp + nbytes / link.d2h, t_gap_fp=0.0,
            t_gap_bp=0.0, t_update=nbytes / 4 / 2.0e9, dha_bytes=read, itemsize=4,
        )  # fmt: skip

    layers = [embedding("embeddings.word", 30522), embedding("embeddings.position", 512),
              embedding("embeddings.type", 2), norm("embeddings.norm")]  # fmt: skip
    for i in range(blocks):
        layers += [linear(f"layer.{i}.{x}", width, width) for x in ("query", "key", "value", "output")]
        layers += [norm(f"layer.{i}.norm1"), linear(f"layer.{i}.up", width, 4 * width),
                   linear(f"layer.{i}.down", 4 * width, width), norm(f"layer.{i}.norm2")]  # fmt: skip
    layers += [linear("head.transform", width, width), norm("head.norm")]
    return Profile(layers=tuple(layers), link=link, base_bytes=2**30)


def usable_decisions(profile: Profile, i: int, *, grads: bool = True) -> list[tuple[Mode, Grad, Update]]:
    """Every decision the layer may take, by the profile alone: written apart from the planner's own list."""
    x = profile.layers[i]
    tied = x.shares is not None or any(y.shares == x.name for y in profile.layers)
    modes = [Mode.GFGB, Mode.STREAM]
    if math.isfinite(x.t_fp_dha):
        modes.append(Mode.DFGB)
        if math.isfinite(x.t_bp_dha):
            modes.append(Mode.DHA)
    places = [Grad.STAGE]
    if profile.fabric is not None:
        return [(mode, Grad.STAGE, Update.HOST) for mode in modes]
    if grads and x.trainable:
        places.append(Grad.KEEP)
        if math.isfinite(x.t_bp_grad_direct) and not tied:
            places.append(Grad.DIRECT)
    found = [(mode, grad, Update.HOST) for mode in modes for grad in places]
    if x.trainable:
        found.append((Mode.GFGB, Grad.KEEP, Update.DEVICE))
    return found
