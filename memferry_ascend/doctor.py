"""`memferry doctor`: what this machine and this installation offer, and what bounds the memory a run may take."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memferry_ascend import __version__, files, numa, sizes
from memferry_ascend.errors import FerryError

_UNLIMITED = 2**60  # cgroup v1 writes a number near 2^63 for "no limit"


def register(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]:
    """The self-test is asked for: it uses the device for a minute."""
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="test coherence, direct host access and all modes on this machine, and write a report",
    )
    parser.add_argument("--backend", help="cpu, cuda or ascend (default: what this machine has)")
    parser.add_argument(
        "--out", type=Path, default=Path("memferry-selftest.json"), help="the self-test's report"
    )
    return run


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Prints the findings as a table unless --json. Returns 0 and the findings; with --selftest, 1 if it failed."""
    found = examine()
    if not arguments.json:
        table = Table("what", "found", show_header=False, box=None)
        for name, value in found.items():
            table.add_row(name.removesuffix("_bytes").replace("_", " "), escape(_shown(name, value)))
        Console(highlight=False).print(table)
    if not arguments.selftest:
        return 0, found
    from memferry_ascend import selftest

    found["selftest"] = selftest.run(arguments.backend, (lambda _line: None) if arguments.json else print)
    files.write_json(arguments.out, found)
    if not arguments.json:
        print(f"the report is in {arguments.out}")
    return (0 if found["selftest"]["ok"] else 1), found


def examine() -> dict[str, Any]:
    """All findings as JSON values: versions, devices, the native arithmetic, threads, limits in bytes (None: none)."""
    ascend = _ascend()  # first: torch knows of NPUs once torch_npu is imported
    devices = torch.accelerator.device_count()
    accelerator = torch.accelerator.current_accelerator() if devices else None
    return {
        "memferry": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": f"{devices} x {accelerator.type}" if accelerator else "none: the cpu backend trains",
        "ascend": ascend,
        "host_arithmetic": _host_arithmetic(),
        "threads_in_affinity": len(os.sched_getaffinity(0)),
        "numa_nodes": len(numa.nodes()),
        "matplotlib": "installed"
        if _installed("matplotlib")
        else "missing: no plots (pip install matplotlib)",
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "ram_available_bytes": _available(),
        "cgroup_limit_bytes": cgroup_limit(),
        "memlock_limit_bytes": _rlimit(resource.RLIMIT_MEMLOCK),
        "address_space_limit_bytes": _rlimit(resource.RLIMIT_AS),
    }


def cgroup_limit(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The tightest memory limit (bytes) of this process's cgroup and its ancestors, v1 or v2; None without one."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's: what is not there is skipped, and the root still counts.
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            limits.append(_number(level / name))
            if level == root:
                break
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _rlimit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _ascend() -> str:
    """The NPU, and how its host memory is mapped; or the sentence that says what is missing."""
    from memferry_ascend.backends.ascend import AscendBackend

    try:
        backend = AscendBackend()
    except FerryError as error:
        return str(error).removeprefix("backend 'ascend': ")
    try:
        return "; ".join(backend.capabilities().notes)
    finally:
        backend.close()


def _host_arithmetic() -> str:
    """How host updates are computed."""
    try:
        hostmath: Any = importlib.import_module("memferry_ascend.hostmath")
    except ImportError as error:
        return f"missing: {error}"
    level = hostmath.simd_level()
    if level == "torch":
        return "torch, several times slower: the C++ extension was not built (needs a C++17 compiler)"
    return f"native, {level}, {hostmath.threads()} threads"


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return "no limit" if value is None else sizes.fmt(value)
    return str(value)
