"""`metrics.jsonl`: one JSON object a step, written as it happens, cut back to a step when a run resumes."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from memferry_ascend import files

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The complete records of a metrics file; a last line torn by a crash is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def cut(source: Path, target: Path, step: int) -> None:
    """Writes to `target` what `source` recorded up to and including `step`. They may be the same file."""
    kept = [record for record in read(source) if record["step"] <= step]
    with files.replacing(target) as stream:
        stream.writelines(_line(record).encode() for record in kept)


class MetricsFile:
    """Appends records; each is in the file, readable by others, when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Appends one record. Raises ValueError when a number is not finite: NaN is not JSON."""
        self._stream.write(_line(record))

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
