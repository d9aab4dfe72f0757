"""loss.png: training loss, held-out loss and the unigram entropy over steps. matplotlib is optional."""

from __future__ import annotations

from pathlib import Path

from memferry_ascend import files
from memferry_ascend.train.metrics import Record


def save_loss(path: Path, records: list[Record], unigram_entropy: float) -> str | None:
    """Draws `records` to a PNG. Returns None, or a sentence saying why there is no plot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no loss.png: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [r["step"] for r in records],
        [r["loss"] for r in records],
        lw=0.8,
        color="tab:blue",
        label="training loss",
    )
    held_out = [(r["step"], r["held_out"]) for r in records if "held_out" in r]
    held_out = [(r["step"] - 1, r["held_out_start"]) for r in records if "held_out_start" in r] + held_out
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", ms=3, color="tab:orange", label="held-out loss")
    axes.axhline(unigram_entropy, ls="--", color="tab:gray", label=f"unigram entropy {unigram_entropy:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    axes.grid(alpha=0.3)
    with files.replacing(path) as stream:
        figure.savefig(stream, format="png", dpi=120)
    return None
