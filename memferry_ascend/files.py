"""Writing files so that a reader, or a crash, never meets half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary stream that becomes `path` when the block ends: flushed, fsynced, then renamed over it.

    When the block raises, `path` is untouched and nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON. Raises ValueError for NaN or infinity: they are not JSON."""
    with replacing(path) as stream:
        stream.write(json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def cache_folder(part: str) -> Path | None:
    """Where findings about this machine are kept: $MEMFERRY_CACHE, else $XDG_CACHE_HOME/memferry, else ~/.cache/memferry,
    and `part` in it. None when the cache is off: MEMFERRY_CACHE is set to nothing."""
    given = os.environ.get("MEMFERRY_CACHE")
    if given is not None:
        return Path(given).expanduser() / part if given else None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "memferry" / part


def sync_folder(folder: Path) -> None:
    """Makes renames and new names inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
