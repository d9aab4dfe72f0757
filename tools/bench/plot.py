"""The paper's figures from the harness's JSON files: iteration time, memory, utilisation, scaling, loss agreement."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]
ORDER = (
    "plain", "plain-bf16", "native-offload", "deepspeed-z2", "deepspeed-z3", "fsdp2", "torchao", "memferry-step",
    "memferry-go", "memferry-backward",
)  # fmt: skip


def draw(folder: Path) -> list[str]:
    """Draw whatever the JSON files in `folder` allow; a line for each figure, or the reason for none."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return [
            "no figures: matplotlib is not installed (run `python tools/bench/plot.py FOLDER` where it is)"
        ]
    documents = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    records = [r for d in documents for r in d.get("records", []) if "system" in r and r["status"] == "ok"]
    figures: dict[str, Callable[[Any, Records], bool]] = {
        "iteration-time": lambda ax, rs: bars(ax, rs, "iter_ms", "ms an iteration"),
        "memory": lambda ax, rs: bars(ax, rs, "peak_device_gib", "peak device memory, GiB"),
        "utilization": lambda ax, rs: bars(
            ax, rs, "busy_share", "share of an iteration with kernels running"
        ),
        "scaling-batch": scaling_batch,
        "scaling-model": scaling_model,
        "losses": losses,
        "share-of-plain": share_of_plain,
    }
    return [
        f"{folder / name}.png"
        for name, paint in figures.items()
        if _figure(folder / f"{name}.png", paint, records)
    ]


def _figure(path: Path, paint: Callable[[Any, Records], bool], records: Records) -> bool:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if not paint(axes, records):
        return False
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)
    return True


def _systems(records: Records) -> list[str]:
    names = {r["system"] for r in records}
    return [n for n in ORDER if n in names] + sorted(names - set(ORDER))


def _first(records: Records, **match: Any) -> dict[str, Any] | None:
    return next((r for r in records if all(r[k] == v for k, v in match.items())), None)


def bars(axes: Any, records: Records, field: str, label: str) -> bool:
    """A group of bars a model, without clipping; each model at the first shape its file has."""
    rows = [r for r in records if r["clip"] is None and r["accumulate"] == 1 and r.get(field) is not None]
    if not rows:
        return False
    models = list(dict.fromkeys(r["model"] for r in rows))
    systems = _systems(rows)
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        found = [(k, _first(rows, model=m, system=system)) for k, m in enumerate(models)]
        bars = [(k, r[field]) for k, r in found if r is not None]
        axes.bar([k + i * width for k, _ in bars], [v for _, v in bars], width, label=system)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(models))], models)
    axes.set_ylabel(label)
    return True


def scaling_batch(axes: Any, records: Records) -> bool:
    """Iteration time over batch size, for the models measured at several."""
    rows = [r for r in records if r["clip"] is None and r["accumulate"] == 1]
    drawn = False
    for model in dict.fromkeys(r["model"] for r in rows):
        for system in _systems(rows):
            line = sorted(
                (r["batch"], r["iter_ms"]) for r in rows if r["model"] == model and r["system"] == system
            )
            if len({b for b, _ in line}) > 1:
                axes.plot(*zip(*line, strict=True), marker="o", label=f"{model}, {system}")
                drawn = True
    axes.set_xlabel("sequences a batch")
    axes.set_ylabel("ms an iteration")
    return drawn


def scaling_model(axes: Any, records: Records) -> bool:
    """Iteration time over parameters, Transformer-XL."""
    rows = [
        r for r in records if r["model"].startswith("txl-") and r["clip"] is None and r["accumulate"] == 1
    ]
    drawn = False
    for system in _systems(rows):
        line = {
            r["model"]: (r["parameters"] / 1e9, r["iter_ms"]) for r in reversed(rows) if r["system"] == system
        }
        if len(line) > 1:
            axes.plot(*zip(*sorted(line.values()), strict=True), marker="o", label=system)
            drawn = True
    axes.set_xlabel("billion parameters")
    axes.set_ylabel("ms an iteration")
    axes.set_ylim(bottom=0)
    return drawn


def losses(axes: Any, records: Records) -> bool:
    """Loss over steps, every system, for the model with the longest record."""
    rows = [r for r in records if r["clip"] is None and r["accumulate"] == 1 and r.get("losses")]
    if not rows:
        return False
    model = max(rows, key=lambda r: len(r["losses"]))["model"]
    for system in _systems(rows):
        r = _first(rows, model=model, system=system)
        if r is not None:
            axes.plot(r["losses"], label=system, linewidth=1)
    axes.set_title(model)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    return True


def share_of_plain(axes: Any, records: Records) -> bool:
    """Speed kept against plain training over tokens a step: by batch, and by accumulation."""
    rows = [r for r in records if r.get("share_of_plain") and r["system"] != "plain"]
    for system in _systems(rows):
        for how, wanted in (("larger batch", False), ("accumulation", True)):
            line = sorted(
                (r["tokens"], r["share_of_plain"])
                for r in rows
                if r["system"] == system and (r["accumulate"] > 1) is wanted
            )
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=f"{system}, {how}")
    axes.set_xlabel("tokens a step")
    axes.set_ylabel("speed, plain training = 1")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    return bool(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for line in draw(parser.parse_args().folder):
        print(line)
