"""Memory and cores near the device, where the machine has several NUMA nodes and says which one the device hangs on.

A rank's host threads and slabs go to its device's node only where that costs no thread: a single process on a machine
with two sockets keeps both, since host updates are bound by memory bandwidth and the other socket has half of it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SYSTEM = Path("/sys")

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1


def node_of(pci_address: str | None, system: Path = SYSTEM) -> int | None:
    """The node of the device at a PCI address ("0000:3b:00.0"); None where the machine does not say."""
    if pci_address is None:
        return None
    node = _read(system / "bus/pci/devices" / pci_address.lower() / "numa_node")
    return (
        int(node) if node and int(node) >= 0 else None
    )  # the kernel says -1 where the firmware says nothing


def nodes(system: Path = SYSTEM) -> list[int]:
    """The nodes that the system shows, those without cores included."""
    return sorted(int(path.name[4:]) for path in (system / "devices/system/node").glob("node[0-9]*"))


def cores(node: int, system: Path = SYSTEM) -> frozenset[int]:
    """The cores of a node, empty for a node that has none or does not exist."""
    found: set[int] = set()
    for part in _read(system / f"devices/system/node/node{node}/cpulist").split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def choose(pci_address: str | None, threads: int, system: Path = SYSTEM) -> int | None:
    """The node that this process's `threads` host threads and its slabs should be on; None leaves them where they come.

    None on machines with one node, where the device's node is not known, and where the node has fewer cores in this
    process's affinity than `threads`.
    """
    node = node_of(pci_address, system)
    if node is None or not hasattr(os, "sched_getaffinity"):
        return None
    mine = os.sched_getaffinity(0)
    near = cores(node, system) & mine
    return node if threads <= len(near) < len(mine) else None


@contextmanager
def near(node: int | None, system: Path = SYSTEM) -> Iterator[None]:
    """Threads that the calling thread starts inside run on that node's cores (a thread inherits its maker's affinity)."""
    mine = os.sched_getaffinity(0) if node is not None else set()
    local = mine & cores(node, system) if node is not None else set()
    if not local:
        yield
        return
    os.sched_setaffinity(0, local)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def prefer(pages: torch.Tensor, node: int) -> bool:
    """Take the pages under a CPU tensor, none of which has been touched, from a node while it has room.

    False where the system refuses (some containers forbid it): pages then come from the node that touches them first.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < 64:
        return False
    page = os.sysconf("SC_PAGE_SIZE")
    start = pages.data_ptr() // page * page
    length = pages.data_ptr() + pages.nbytes - start
    mask = ctypes.c_ulong(1 << node)
    call = ctypes.CDLL(None).syscall
    arguments = ctypes.c_void_p(start), ctypes.c_ulong(length), ctypes.c_int(_PREFERRED), ctypes.byref(mask)
    # The kernel reads one bit less than it is told (get_nodes in mm/mempolicy.c).
    return bool(call(ctypes.c_long(number), *arguments, ctypes.c_ulong(65), ctypes.c_uint(0)) == 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
