"""One curve from full offload to plain training: device memory and iteration time over the reserve and over the budget.

Three parts, all in one process, so that one machine and one start serve them:

- plain training: the end of the curve
- `reserve` from 0 to 1 without a budget (the paper's Figs. 12b and 14): the allocator's peak and the iteration time
- `device_memory` from the smallest that works to plain training's peak and beyond: the same, and whether the peak kept the
  budget

    python -m memferry_ascend.bench.budget --model bert-base gpt2-medium --json OUT.json --plot OUT.png

Rows are the harness's rows (docs/benchmarks/README.md). On the CPU backend, whose device has no allocator to ask, the
peak is what the backend itself counts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import sizes
from memferry_ascend.files import write_json

from .measure import GIB, Timing, machine, row, versions
from .models import find
from .systems import Setup

RESERVES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
STEPS = 9
"""Budgets between the smallest and plain training's peak, evenly spaced."""
GENEROUS = 1.25
"""Of plain training's peak, a last budget: the engine counts a model's output as held while the backward runs, as a training
loop may hold it, and plain rows do not."""


def smallest_budget(model: str, system: str, setup: Setup, timing: Timing) -> int:
    """Bytes: what the refusal of a hopeless budget names.

    Raises:
        RuntimeError: it was not refused, or names nothing.
    """
    refused = row(model, system, replace(setup, device_memory="1KiB"), timing)
    found = re.search(r"smallest\b[^:;]*?\b(\d{4,}) bytes", refused["reason"])
    if refused["status"] == "ok" or found is None:
        raise RuntimeError(
            f"a budget of 1 KiB should be refused with the smallest that works: {refused['reason']}"
        )
    return int(found[1])


def curves(model: str, system: str, setup: Setup, timing: Timing, budgets: int = STEPS) -> dict[str, Any]:
    """Rows of plain training, of every reserve and of every budget."""
    plain = _said(row(model, "plain", replace(setup, planner=None), timing), "plain")
    reserves = []
    for reserve in RESERVES:
        found = row(model, system, replace(setup, reserve=reserve), timing)
        reserves.append(_said(found | {"reserve": reserve}, f"reserve {reserve}"))
    least = smallest_budget(model, system, setup, timing)
    most = int((plain["peak_device_gib"] or 0) * GIB)
    if most <= least:  # no allocator to ask: everything on the device, twice over
        most = 2 * least + 32 * int(plain.get("parameters", 0))
    rows = []
    for budget in [
        *(least + (most - least) * i // budgets for i in range(budgets + 1)),
        int(GENEROUS * most),
    ]:
        found = row(model, system, replace(setup, device_memory=f"{budget}"), timing)
        rows.append(_said(found | {"budget": budget, "kept": kept(found, budget)}, sizes.fmt(budget)))
    return {"model": model, "smallest": least, "plain": plain, "reserve": reserves, "budget": rows}


def kept(found: dict[str, Any], budget: int) -> bool | None:
    """Whether the peak stayed at or under the budget; None where there is no peak to compare."""
    peak = found.get("peak_device_gib_with_start") or found["peak_device_gib"]
    return None if peak is None else peak * GIB <= budget


def findings(document: dict[str, Any], noise: float = 0.03) -> dict[str, Any]:
    """What issue and paper ask of the curves, of one model.

    straight: the largest distance of a peak from the straight line through the first and the last reserve, over the
        line's rise. rises: budgets at which an iteration takes more than `noise` longer than at a smaller one.
    over: budgets that were not kept. end: iteration time at the largest budget over plain training's.
    """
    points = [(r["reserve"], r["peak_device_gib"]) for r in document["reserve"] if r["peak_device_gib"]]
    straight = None
    if len(points) > 2 and points[-1][1] > points[0][1]:
        (x0, y0), (x1, y1) = points[0], points[-1]
        line = [y0 + (y1 - y0) * (x - x0) / (x1 - x0) for x, _ in points]
        straight = max(abs(y - at) for (_, y), at in zip(points, line, strict=True)) / (y1 - y0)
    timed = [(r["budget"], r["iter_ms"]) for r in document["budget"] if r["iter_ms"]]
    best = float("inf")
    rises = []
    for budget, ms in timed:
        if ms > best * (1 + noise):
            rises.append(budget)
        best = min(best, ms)
    plain = document["plain"]["iter_ms"]
    return {
        "peak_over_reserve_off_the_line": straight,
        "budgets_slower_than_a_smaller_one": rises,
        "budgets_not_kept": [r["budget"] for r in document["budget"] if r["kept"] is False],
        "last_budget_over_plain": timed[-1][1] / plain if timed and plain else None,
        "rows_that_failed": [
            r["reason"] for r in document["reserve"] + document["budget"] if r["status"] != "ok"
        ],
    }


def draw(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """Peak over reserve, time over reserve, time over budget; a line a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    peak, reserve, budget = figure.subplots(1, 3)
    for d in documents:
        fine = [r for r in d["reserve"] if r["iter_ms"]]
        if any(r["peak_device_gib"] for r in fine):
            peak.plot(
                [r["reserve"] for r in fine], [r["peak_device_gib"] for r in fine], "o-", label=d["model"]
            )
        reserve.plot([r["reserve"] for r in fine], [r["iter_ms"] for r in fine], "o-", label=d["model"])
        fine = [r for r in d["budget"] if r["iter_ms"]]
        (line,) = budget.plot(
            [r["budget"] / GIB for r in fine], [r["iter_ms"] for r in fine], "o-", label=d["model"]
        )
        if d["plain"]["iter_ms"]:
            budget.axhline(
                d["plain"]["iter_ms"], ls="--", color=line.get_color(), label=f"{d['model']}, plain"
            )
    peak.set(xlabel="reserve", ylabel="peak device memory, GiB")
    reserve.set(xlabel="reserve", ylabel="ms an iteration", ylim=(0, None))
    budget.set(xlabel="device_memory, GiB", ylabel="ms an iteration", ylim=(0, None))
    for axes in (peak, reserve, budget):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def _said(found: dict[str, Any], what: str) -> dict[str, Any]:
    ms = f"{found['iter_ms']:.1f} ms" if found["iter_ms"] else f"{found['status']}: {found['reason']}"
    peak = f", peak {sizes.fmt(int(found['peak_device_gib'] * GIB))}" if found["peak_device_gib"] else ""
    print(f"{found['model']} {what}: {ms}{peak}", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", nargs="+", default=["bert-base"])
    add("--system", default="memferry-backward", help="one of ours (default memferry-backward)")
    add("--planner", default="rules", help='who fills a budget: "rules" (default) or "search"')
    add("--batch", type=int)
    add("--seq", type=int)
    add(
        "--budgets",
        type=int,
        default=STEPS,
        help=f"steps between the smallest and the largest (default {STEPS})",
    )
    add("--iterations", type=int, default=12)
    add("--warmup", type=int, default=4)
    add("--backend", choices=("cpu", "cuda"))
    add("--json", type=Path)
    add("--plot", type=Path)
    given = parser.parse_args(arguments)
    backend = given.backend or ("cuda" if torch.cuda.is_available() else "cpu")
    documents = []
    result = {"benchmark": "reserve and budget curves, one machine, one run", "machine": machine()}
    for name in given.model:
        model = find(name)
        setup = Setup(
            given.batch or model.batch, given.seq or model.seq, backend=backend, planner=given.planner
        )
        timing = Timing(given.warmup, given.iterations, profile=False)
        found = curves(name, given.system, setup, timing, given.budgets)
        documents.append(found | {"findings": findings(found)})
        result |= {"versions": versions(given.system), "models": documents}
        print(name, documents[-1]["findings"], file=sys.stderr, flush=True)
        if given.json:
            write_json(given.json, result)
    if given.plot:
        draw(given.plot, documents)
    return int(any(d["findings"]["rows_that_failed"] for d in documents))


if __name__ == "__main__":
    sys.exit(main())
