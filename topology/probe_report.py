"""What a probe found, for people: a table, a matrix of paths that run at once, and bandwidth over size."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .fit import medians
from .measured import Measured
from .paths import DIRECTIONS


def table(measured: Measured) -> str:
    """One line per path and direction: latency, bandwidth, and what the smallest and largest copies reached."""
    rows = [["device", "path", "direction", "latency us", "GB/s", "smallest GB/s", "largest GB/s"]]
    for path in measured.measured:
        for direction, figures in (("h2d", path.h2d), ("d2h", path.d2h)):
            if figures is None:
                continue
            reached = [f"{n / t / 1e9:.2f}" for n, t in medians(figures.samples)]
            ends = [reached[0], reached[-1]] if reached else ["", ""]
            rows.append(
                [
                    path.device, path.name, direction, f"{figures.latency * 1e6:.1f}",
                    f"{figures.bandwidth / 1e9:.2f}", *ends,
                ]
            )  # fmt: skip
    lines = _columns(rows)
    if measured.machine.get("emulated"):
        scale = measured.machine.get("time_scale")
        lines.append(
            f"emulated links of {measured.name}, slowed {scale:.0f} times (seconds above are the emulated ones): not a "
            "measurement of a device"
        )
    duplex = measured.machine.get("duplex")
    if duplex:
        lines.append(f"direct, both directions at once: {duplex / 1e9:.2f} GB/s")
    return "\n".join(lines)


def matrix(measured: Measured) -> str:
    """GB/s of two paths at once, each path's own on the diagonal, with the shared bottlenecks that were found."""
    together = measured.machine.get("together") or []
    nbytes = measured.machine.get("together_bytes", 0)
    lines = []
    for direction in DIRECTIONS:
        names = [p.name for p in measured.measured if (p.h2d if direction == "h2d" else p.d2h) is not None]
        pairs = {
            tuple(sorted(entry["paths"])): entry["bandwidth"]
            for entry in together
            if entry["direction"] == direction
        }
        rows = [[f"{direction} GB/s", *names]]
        for path in measured.measured:
            figures = path.h2d if direction == "h2d" else path.d2h
            if figures is None:
                continue
            at = dict(medians(figures.samples)).get(nbytes)
            row = [path.name]
            for other in names:
                value = pairs.get(tuple(sorted((path.name, other))))
                if other == path.name:
                    value = nbytes / at if at else figures.bandwidth
                row.append("-" if value is None else f"{value / 1e9:.2f}")
            rows.append(row)
        lines += _columns(rows)
    for shared in measured.shared:
        names = [name for _, name in shared.paths]
        lines.append(
            f"{' and '.join(names)} share a bottleneck ({shared.direction}): {shared.bandwidth / 1e9:.2f} GB/s together"
        )
    return "\n".join(lines)


def draw(measured: Measured, path: str | os.PathLike[str]) -> None:
    """Bandwidth over size, the fitted line beside the samples. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'memferry_ascend[plot]'") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    for i, direction in enumerate(DIRECTIONS):
        axes = figure.add_subplot(1, 2, i + 1)
        for p in measured.measured:
            figures = p.h2d if direction == "h2d" else p.d2h
            if figures is None or not figures.samples:
                continue
            points = medians(figures.samples)
            (line,) = axes.plot(
                [n / 2**20 for n, _ in points], [n / t / 1e9 for n, t in points], "o", label=p.name
            )
            fitted = [n / (figures.latency + n / figures.bandwidth) / 1e9 for n, _ in points]
            axes.plot([n / 2**20 for n, _ in points], fitted, color=line.get_color(), lw=1)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("MiB")
        axes.set_ylabel("GB/s (emulated)" if measured.machine.get("emulated") else "GB/s")
        axes.set_title(f"{measured.name}, {direction}")
        axes.legend()
    figure.savefig(path)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines
