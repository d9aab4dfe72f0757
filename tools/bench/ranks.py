"""The processes of one machine that train together, or one that a system wants to believe is such a process."""

from __future__ import annotations

import socket


def environments(count: int) -> list[dict[str, str]]:
    """What torchrun would set for each of `count` processes, rank 0 first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [world | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]
