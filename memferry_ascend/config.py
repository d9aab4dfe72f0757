"""What a user may choose. One frozen, keyword-only dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from memferry_ascend import sizes
from memferry_ascend.errors import ConfigError, unknown


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `ferry`. Sizes take bytes or strings such as "24GiB"."""

    precision: str = "bf16"
    """"bf16": parameters and gradients in bfloat16 with fp32 masters kept as bf16 + 16-bit remainder. "fp32": all
    fp32."""

    keep_fp32: tuple[str, ...] = ()
    """Layers whose parameters stay fp32 under "bf16": patterns (fnmatch) over qualified module names or class names."""

    device_memory: int | str | None = None
    """Bytes: bound on the device allocator's peak. Needs a sample batch. None: what is free less a margin when a
    sample batch is given; everything stays on the host otherwise, only what the plan needs goes to the device."""

    host_memory: int | str | None = None
    """Bytes: bound on what the arena may take. None: RAM and cgroup limits, less a margin."""

    reserve: float | None = None
    """The paper's reserve factor, 0 to 1: the share of gradient bytes kept on the device (section IV-D), the rest written
    to the host by kernels where they can. With planner="search" the most that may be kept. None: as the planner finds,
    which is to stage all with "paper"."""

    planner: str = "search"
    """"search", "paper", "rules", or the path of a plan file. "search" and "paper" need a sample batch to profile
    with; without one the rules decide."""

    update: str = "step"
    """"step": host updates start when `optimizer.step()` is called. "backward": a unit updates as soon as its
    gradient is final; `accumulate` must then be exact."""

    accumulate: int = 1
    """Backwards per step. A hint to the planner with update="step", a promise with update="backward"."""

    max_grad_norm: float | None = None
    """Clip the global gradient norm (fp32, all parameters) to this in every step; None means no clipping."""

    assist_devices: tuple[int, ...] = ()
    """Indices of peer devices whose links may carry part of each transfer (paper section IV-E): idle ones, or, on CPU and
    Ascend, those that other ranks of this machine train on. Ranks may be given different ones."""

    dispatch: str = "static"
    """"static": shares of the paths fixed from their latency and bandwidth. "dynamic": chunks go to the free path."""

    threads: int | None = None
    """Host update threads. None: the cores of the process's affinity divided by the local ranks."""

    def __post_init__(self) -> None:
        def one_of(field: str, allowed: tuple[str, ...]) -> None:
            if getattr(self, field) not in allowed:
                raise ConfigError(f"Config.{field}: expected one of {allowed}, got {getattr(self, field)!r}")

        one_of("precision", ("bf16", "fp32"))
        one_of("update", ("step", "backward"))
        one_of("dispatch", ("static", "dynamic"))
        if not isinstance(self.planner, str) or not self.planner:
            raise ConfigError(
                f'Config.planner: expected "search", "paper", "rules" or a path, got {self.planner!r}'
            )
        for field in ("device_memory", "host_memory"):
            value = getattr(self, field)
            if value is not None:
                try:
                    nbytes = sizes.parse(value)
                except ConfigError as e:
                    raise ConfigError(f"Config.{field}: {e}") from None
                if nbytes == 0:
                    raise ConfigError(f"Config.{field}: expected more than zero bytes; None means no bound")
                object.__setattr__(self, field, nbytes)
        for field in ("keep_fp32", "assist_devices"):
            value = getattr(self, field)
            if isinstance(value, str) or not isinstance(value, tuple | list):
                raise ConfigError(f"Config.{field}: expected a tuple, got {value!r}")
            object.__setattr__(self, field, tuple(value))
        if self.reserve is not None and not (_is_number(self.reserve) and 0 <= self.reserve <= 1):
            raise ConfigError(f"Config.reserve: expected a number from 0 to 1, got {self.reserve!r}")
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ConfigError(
                f"Config.accumulate: expected an integer of at least 1, got {self.accumulate!r}"
            )
        if self.max_grad_norm is not None and not (
            _is_number(self.max_grad_norm) and 0 < self.max_grad_norm < math.inf
        ):
            raise ConfigError(
                f"Config.max_grad_norm: expected a positive number or None, got {self.max_grad_norm!r}"
            )
        if self.threads is not None and (
            isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1
        ):
            raise ConfigError(
                f"Config.threads: expected an integer of at least 1 or None, got {self.threads!r}"
            )

    @property
    def device_bytes(self) -> int | None:
        """`device_memory` in bytes."""
        return None if self.device_memory is None else sizes.parse(self.device_memory)

    @property
    def host_bytes(self) -> int | None:
        """`host_memory` in bytes."""
        return None if self.host_memory is None else sizes.parse(self.host_memory)

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Config:
        """A Config from plain data (YAML); an unknown key is an error that names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise unknown("configuration key", key, known)
        return cls(**values)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x)


MANY_CORES = 8


def host_threads(local_ranks: int = 1, configured: int | None = None) -> int:
    """Threads for host updates: this rank's part of the affinity's cores, whatever OMP_NUM_THREADS says. Where there are
    many, two are left to the threads that launch kernels and that run jobs: with all of 32 an iteration of BERT-large took
    6 % longer (docs/benchmarks/threads-bert-large.json)."""
    if configured is not None:
        return configured
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    mine = max(1, cores // max(1, local_ranks))
    return mine - 2 if mine >= MANY_CORES else mine
