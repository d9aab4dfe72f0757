"""Cases on every rank in which ranks lend each other their devices."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from dataclasses import replace
from typing import Any

import torch
from harness import make_model, small_units, toy_fabric
from memferry_ascend.topology import Figures, Measured, MeasuredPath
from memferry_ascend.topology.load import parse

import memferry_ascend as mf
from memferry_ascend import lender, runtime, transfers
from memferry_ascend.engine import Engine

from .world import plan_for, rows_of, train

TOY = toy_fabric(4, host=900)
"""Every device's link carries 200 GB/s, and a path at most 50: a device that trains has room for others."""


class Seen:
    """What transfers and lenders did, looked at as they close."""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}
        self.lent: list[int] = []

    def __enter__(self) -> Seen:
        self._close, self._chunks = transfers.Transfers.close, (transfers.CHUNK, transfers.RELAY_CHUNK)
        self._grant, seen = lender.Lender.grant, self

        def close(made: transfers.Transfers) -> None:
            for name, n in made.moved.items():
                seen.moved[name] = n
            seen._close(made)

        def grant(made: lender.Lender, slots: int, nbytes: int) -> int:
            got = seen._grant(made, slots, nbytes)
            seen.lent.append(made.lent)
            return got

        transfers.Transfers.close, lender.Lender.grant = close, grant  # type: ignore[method-assign]
        transfers.CHUNK = transfers.RELAY_CHUNK = 512
        return self

    def __exit__(self, *_: object) -> None:
        transfers.Transfers.close, lender.Lender.grant = self._close, self._grant  # type: ignore[method-assign]
        transfers.CHUNK, transfers.RELAY_CHUNK = self._chunks


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("memferry-lend", "memferry-borrow"))]


def descriptors() -> int:
    """Descriptors of memory that has no name, which live as long as mappings of it."""
    gc.collect()
    found = 0
    for one in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:memferry" in os.readlink(f"/proc/self/fd/{one}")
        except OSError:
            continue  # the one that lists
    return found


def lent(
    wishes: list[list[int]],
    modes: str,
    dispatch: str = "static",
    update: str = "step",
    precision: str = "bf16",
    delays: float = 0.0005,
    budget: int | None = None,
) -> dict[str, Any]:
    """Train while ranks lend to each other: rank r asks for the devices `wishes[r]`."""
    rt, before = runtime.current(), lender.BUDGET
    runtime._current = replace(rt, topology=parse(TOY))
    config: dict[str, Any] = {"precision": precision, "update": update}
    if wishes:
        config |= {"assist_devices": tuple(wishes[rt.rank]), "dispatch": dispatch}
    lender.BUDGET = before if budget is None else budget
    try:
        with Seen() as seen, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = train(
                seed=4,
                modes=modes,
                steps=3,
                config=config,
                delays=delays if wishes else 0.0,
                unit_bytes=20_000,
            )
    finally:
        runtime._current, lender.BUDGET = rt, before
    return {
        "losses": result["losses"],
        "state": result["state"],
        "moved": seen.moved,
        "lent": seen.lent,
        "told": [str(w.message) for w in told if w.category is RuntimeWarning],
        "threads": threads(),
        "descriptors": descriptors(),
    }


def one_way() -> Measured:
    """A probe's figures that know no path to device 1 through device 0."""
    figures = Figures(0.0, 5e10)
    known = (("direct", 0, None), ("via npu:1", 0, "npu:1"), ("direct", 1, None))
    return Measured(
        "one way", tuple(MeasuredPath(n, "host", f"npu:{d}", v, figures, figures) for n, d, v in known)
    )


def refused(wishes: list[list[int]], probe: bool = False) -> str:
    """What `ferry` says."""
    rt = runtime.current()
    runtime._current = replace(rt, topology=one_way() if probe else parse(TOY))
    model = make_model(0)
    try:
        config = mf.Config(precision="fp32", assist_devices=tuple(wishes[rt.rank]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mf.ferry(model, optimizer, config=config, plan=plan_for(model, "GFGB")).close()
    except mf.FerryError as error:
        return str(error)
    finally:
        runtime._current = rt
    return "no error"


def leaves_early(first: int) -> dict[str, Any]:
    """Rank `first` closes its engine while the other one's still stands, and both had copies relayed."""
    rt = runtime.current()
    assert rt.ranks is not None
    runtime._current = replace(rt, topology=parse(TOY))
    model = make_model(1)
    try:
        with Seen() as seen, small_units(20_000):
            config = mf.Config(precision="fp32", assist_devices=(1 - rt.rank,))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine: Engine = mf.ferry(model, optimizer, config=config, plan=plan_for(model, "STREAM"))
            for step in range(2):
                rows = rows_of(step)[rt.rank * 12 :][:12].to(rt.backend.device)
                engine.model(rows).backward()
                engine.optimizer.step()
            engine.synchronize()
            if rt.rank == first:
                engine.close()
            rt.ranks.barrier()
            engine.close()
            rt.ranks.barrier()
            del engine, optimizer
    finally:
        runtime._current = rt
    return {"moved": seen.moved, "threads": threads(), "descriptors": descriptors()}
