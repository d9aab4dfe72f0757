"""`memferry report DIR`: what a run did, measured beside predicted, as text, JSON and pictures.

The pictures are those of the study of offloaded training's I/O patterns (device memory over an iteration, link
throughput by phase, sizes of what is transferred), for the user's own run, and the predicted over the measured
timeline. matplotlib is optional.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memferry_ascend import files, sizes
from memferry_ascend.errors import FerryError
from memferry_ascend.planner.simulator import Timeline
from memferry_ascend.recording import RESOURCES, Recording, load

COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "recompute": "tab:olive",
    "gap": "lightsteelblue",
    "upload": "tab:green",
    "load": "tab:green",
    "reload": "tab:cyan",
    "download": "tab:red",
    "update": "tab:purple",
    "fold": "tab:pink",
    "device": "tab:brown",
}
DIRECTIONS = {"h2d": "to the device", "d2h": "to the host"}


def register(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]:
    """Adds the arguments of `memferry report`; returns the function that runs it."""
    parser.description = (
        "Shows what the recorded steps of a run did, beside what the plan predicted. Writes timeline.png and report.png "
        "into the folder (with matplotlib); trace.json there opens in ui.perfetto.dev."
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder of a `memferry train` run, or a trace.json"
    )
    return run


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Prints tables unless --json. Returns 0 and what they show."""
    recording = load(arguments.folder)
    folder = arguments.folder if arguments.folder.is_dir() else arguments.folder.parent
    found = summary(recording)
    notes = [
        draw_timeline(recording, folder / "timeline.png"),
        draw_report(recording, folder / "report.png"),
    ]
    found["files"] = [
        str(folder / n) for n in ("trace.json", "timeline.png", "report.png") if (folder / n).exists()
    ]
    if not arguments.json:
        console = Console(highlight=False)
        for table in tables(found):
            console.print(table)
        for note in filter(None, notes):
            console.print(note, markup=False)
        console.print("files: " + ", ".join(found["files"]), markup=False, soft_wrap=True)
    return 0, found


def summary(recording: Recording) -> dict[str, Any]:
    """Everything the report says, as JSON values: seconds, bytes, bytes/s. Raises FerryError for less than two steps."""
    measured = recording.timeline()
    predicted = recording.predicted
    found: dict[str, Any] = {
        "steps": len(recording.steps),
        "device": dict(recording.device),
        "period": {"measured": measured.period, "predicted": predicted.period if predicted else None},
        "busy": {"measured": measured.busy, "predicted": _busy(predicted)},
        "waits_for": measured.critical_path,
        "critical": {"measured": measured.critical, "predicted": predicted.critical if predicted else None},
        "peak_device_bytes": max((n for _, n in recording.device_memory), default=0),
        "peak_host_bytes": max((n for _, n in recording.host_memory), default=0),
        "throughput": recording.throughput(),
        "transfer_sizes": {d: [list(x) for x in recording.transfer_sizes(d)] for d in DIRECTIONS},
        "moved_per_step": {
            d: sum(x.nbytes for x in recording.intervals if x.resource == d) / len(recording.steps)
            for d in DIRECTIONS
        },
    }
    if predicted is not None:
        found["prediction_error"] = predicted.period / measured.period - 1
    return found


def _busy(timeline: Timeline | None) -> dict[str, float] | None:
    return None if timeline is None else dict(timeline.busy)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The summary for a person."""
    period, busy = found["period"], found["busy"]
    first = Table("per iteration", title="time", title_justify="left")
    for name in ("measured", "predicted"):
        first.add_column(f"{name} ms", justify="right")
    first.add_row("period", _ms(period["measured"]), _ms(period["predicted"]))
    for name in RESOURCES:
        predicted = None if busy["predicted"] is None else busy["predicted"].get(name, 0.0)
        first.add_row(f"{name} busy", _ms(busy["measured"][name]), _ms(predicted))
    for name in RESOURCES[1:]:
        first.add_row(f"compute waits for {name}", _ms(found["waits_for"][name]), "")
    second = Table("phase", title="link throughput while the phase lasts", title_justify="left")
    for text in DIRECTIONS.values():
        second.add_column(f"{text}, GB/s", justify="right")
    for phase, rates in found["throughput"].items():
        second.add_row(phase, *(f"{rates[d] / 1e9:.2f}" for d in DIRECTIONS))
    second.add_row("moved a step", *(sizes.fmt(found["moved_per_step"][d]) for d in DIRECTIONS))
    third = Table("tensor size up to", title="transfers", title_justify="left")
    for text in DIRECTIONS.values():
        third.add_column(text, justify="right")
    counts = {d: dict(map(tuple, found["transfer_sizes"][d])) for d in DIRECTIONS}
    for bound in sorted(set().union(*counts.values())):
        third.add_row(sizes.fmt(bound), *(str(counts[d].get(bound, 0)) for d in DIRECTIONS))
    fourth = Table("memory", "peak", title="", show_header=False)
    fourth.add_row("device, allocated", sizes.fmt(found["peak_device_bytes"]))
    fourth.add_row("host, this process", sizes.fmt(found["peak_host_bytes"]))
    return [first, second, third, fourth]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


# -- pictures --------------------------------------------------------------------------------------------------------
def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with files.replacing(path) as stream:
        figure.savefig(stream, format="png", dpi=120)


def _bars(axes: Any, intervals: Mapping[str, Sequence[tuple[float, float, str]]], until: float) -> None:
    for row, resource in enumerate(RESOURCES):
        by_colour: dict[str, list[tuple[float, float]]] = {}
        for start, end, label in intervals.get(resource, ()):
            words = label.split(" ")
            key = "gap" if len(words) > 1 and words[1] == "gap" else words[0]
            if start < until:
                span = (start * 1e3, (min(end, until) - start) * 1e3)
                by_colour.setdefault(COLOURS.get(key, "tab:gray"), []).append(span)
        for colour, spans in by_colour.items():
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(RESOURCES)), RESOURCES)
    axes.invert_yaxis()
    axes.set_xlim(0, until * 1e3)


def draw_timeline(recording: Recording, path: Path) -> str | None:
    """One iteration, predicted above measured, on one time axis. Returns None, or why there is no picture."""
    figure = _figure(12, 5)
    if figure is None:
        return f"no {path.name}: matplotlib is not installed (pip install matplotlib)"
    try:
        measured = recording.timeline()
    except FerryError as e:
        return f"no {path.name}: {e}"
    predicted = recording.predicted
    length = recording.steps[-1] - recording.steps[-2]
    until = max(length, predicted.period if predicted else 0.0)
    axes = figure.subplots(2 if predicted else 1, 1, sharex=True, squeeze=False)[:, 0]
    if predicted is not None:
        _bars(axes[0], predicted.intervals, until)
        axes[0].set_title(f"predicted: {predicted.period * 1e3:.2f} ms per iteration")
    _bars(axes[-1], recording.last_iteration(), until)
    axes[-1].set_title(f"measured: {measured.period * 1e3:.2f} ms per iteration; the last one is shown")
    axes[-1].set_xlabel("ms from step()")
    from matplotlib.patches import Patch

    shown = ("forward", "backward", "gap", "upload", "reload", "download", "update", "fold")
    figure.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in shown], loc="outside right upper"
    )
    _save(figure, path)
    return None


def draw_report(recording: Recording, path: Path) -> str | None:
    """Memory over time, throughput by phase and transfer sizes. Returns None, or why there is no picture."""
    figure = _figure(12, 8)
    if figure is None:
        return f"no {path.name}: matplotlib is not installed (pip install matplotlib)"
    axes = figure.subplots(2, 2)
    _draw_memory(axes[0, 0], recording)
    _draw_rate(axes[0, 1], recording)
    rates = recording.throughput()
    for k, (direction, text) in enumerate(DIRECTIONS.items()):
        values = [rates[phase][direction] / 1e9 for phase in rates]
        axes[1, 0].bar([i + 0.4 * k - 0.2 for i in range(len(rates))], values, 0.4, label=text)
    axes[1, 0].set_xticks(range(len(rates)), list(rates))
    axes[1, 0].set_ylabel("GB/s while the phase lasts")
    axes[1, 0].set_title("link throughput by phase")
    axes[1, 0].legend()
    counts = {d: dict(recording.transfer_sizes(d)) for d in DIRECTIONS}
    bounds = sorted(set().union(*counts.values()))
    for k, (direction, text) in enumerate(DIRECTIONS.items()):
        heights = [counts[direction].get(bound, 0) for bound in bounds]
        axes[1, 1].bar([i + 0.4 * k - 0.2 for i in range(len(bounds))], heights, 0.4, label=text)
    axes[1, 1].set_xticks(range(len(bounds)), [sizes.fmt(b) for b in bounds], rotation=60, ha="right")
    axes[1, 1].set_ylabel("tensors")
    axes[1, 1].set_title("sizes of transferred tensors (up to)")
    axes[1, 1].legend()
    _save(figure, path)
    return None


def _draw_memory(axes: Any, recording: Recording) -> None:
    for name, samples in (("device", recording.device_memory), ("host", recording.host_memory)):
        if samples:
            axes.step(
                [t * 1e3 for t, _ in samples],
                [n / 2**20 for _, n in samples],
                where="post",
                label=f"{name}, measured",
            )
    if recording.predicted is not None and recording.steps:
        shift = recording.steps[0]
        points = [((t + shift) * 1e3, n / 2**20) for t, n in recording.predicted.device_bytes]
        axes.step(*zip(*points, strict=True), where="post", ls="--", label="device, predicted")
    for at in recording.steps:
        axes.axvline(at * 1e3, color="lightgray", lw=0.8)
    axes.set_yscale("symlog")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms (grey: step())")
    axes.set_ylabel("MiB")
    axes.set_title("memory over time")
    axes.legend()


def _draw_rate(axes: Any, recording: Recording, bins: int = 200) -> None:
    """Throughput of each direction over time."""
    end = max((x.end for x in recording.intervals), default=0.0)
    if end <= 0:
        return
    width = end / bins
    for direction, text in DIRECTIONS.items():
        moved = [0.0] * bins
        for x in recording.intervals:
            if x.resource != direction or x.end <= x.start:
                continue
            rate = x.nbytes / (x.end - x.start)
            for k in range(max(0, int(x.start / width)), min(bins, int(x.end / width) + 1)):
                moved[k] += rate * max(0.0, min(x.end, (k + 1) * width) - max(x.start, k * width))
        axes.plot(
            [k * width * 1e3 for k in range(bins)], [m / width / 1e9 for m in moved], lw=0.9, label=text
        )
    for at in recording.steps:
        axes.axvline(at * 1e3, color="lightgray", lw=0.8)
    axes.set_xlabel("ms (grey: step())")
    axes.set_ylabel("GB/s")
    axes.set_title("link throughput over time")
    axes.legend()
