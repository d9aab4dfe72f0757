"""A measured profile as a table for a person."""

from __future__ import annotations

from memferry_ascend import launchcosts, sizes
from memferry_ascend.profiler import Measured


def describe(measured: Measured) -> str:
    """The profile as a table for a person: times in milliseconds, then the link and the notes."""
    rows: list[tuple[str, ...]] = [
        ("layer", "kind", "MiB", "FP", "FP host", "BP", "BP host", "gap FP", "copy", "update", "on device")
    ]
    for x in measured.profile.layers:
        times = (
            x.t_fp, x.t_fp_dha, x.t_bp, x.t_bp_dha, x.t_gap_fp, x.t_trans, x.t_update, x.t_update_device
        )  # fmt: skip
        shown = tuple("-" if t is None or t == float("inf") else f"{t * 1e3:.3f}" for t in times)
        rows.append((x.name or "(root)", x.kind, f"{x.bytes / 2**20:.2f}", *shown))
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width, strict=True))
        )
        for row in rows
    ]
    link = measured.profile.link
    lines.append(
        f"times in ms; link {link.h2d / 1e9:.2f} GB/s down, {link.d2h / 1e9:.2f} up, {link.duplex / 1e9:.2f} both, "
        f"latency {link.latency * 1e6:.1f} us; activations and workspace {sizes.fmt(measured.profile.base_bytes)}"
    )
    if measured.profile.launches:
        lines.append(launchcosts.describe(measured.profile.launches))
    return "\n".join(lines + [f"note: {note}" for note in measured.notes])
