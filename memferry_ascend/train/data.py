"""Text as bytes: a corpus, its held-out tail, and batches that depend on nothing but (seed, step)."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memferry_ascend.errors import ConfigError

Batch = dict[str, Tensor]

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_PROBE_BYTES = 8192  # a NUL byte in the first bytes marks a binary file, as in git and grep


@dataclass(frozen=True)
class Corpus:
    """All bytes of a text, in file order; the last `held_out` bytes are never trained on."""

    source: str
    bytes: np.ndarray  # uint8
    held_out: int
    files: int

    @property
    def train(self) -> np.ndarray:
        """The bytes to train on, uint8."""
        return self.bytes[: len(self.bytes) - self.held_out]

    @property
    def tail(self) -> np.ndarray:
        """The held-out bytes, uint8."""
        return self.bytes[len(self.bytes) - self.held_out :]

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of the best model that ignores context: what a trained model must get well below."""
        frequency = np.bincount(self.bytes, minlength=256) / len(self.bytes)
        seen = frequency[frequency > 0]
        return float(-(seen * np.log(seen)).sum()) + 0.0  # + 0.0: no "-0.0" for a constant text

    def check(self, context: int) -> None:
        """Raises ConfigError when a part is too short for one sequence of `context` bytes and its target."""
        for what, part in (("training", self.train), ("held-out", self.tail)):
            if len(part) < context + 1:
                raise ConfigError(
                    f"{self.source} is too short: its {what} part has {len(part)} bytes and one sequence "
                    f"needs {context + 1}; give more text or a shorter --context"
                )

    def batch(self, step: int, *, batch: int, context: int, seed: int = 0) -> Batch:
        """The training batch of `step`: `tokens` and `targets`, both (batch, context) int64.

        Sequences are drawn with replacement from a generator seeded by (seed, step), so that resuming needs
        only the step.
        """
        starts = np.random.default_rng((seed, step)).integers(0, len(self.train) - context, size=batch)
        return _sequences(self.train, starts, context)

    def held_out_batches(self, count: int, *, batch: int, context: int) -> Iterator[Batch]:
        """The same up to `count` batches every time, their sequences spread evenly over the held-out part."""
        most = max(1, (len(self.tail) - 1) // context)
        sequences = min(count * batch, most // batch * batch) or batch
        starts = np.linspace(0, len(self.tail) - context - 1, sequences).astype(np.int64)
        for first in range(0, sequences, batch):
            yield _sequences(self.tail, starts[first : first + batch], context)


def _sequences(text: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    rows_BT = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return {"tokens": rows_BT[:, :-1].contiguous(), "targets": rows_BT[:, 1:].contiguous()}


def load(text: str | os.PathLike[str], *, held_out: float = 0.05) -> Corpus:
    """Reads a file, every text file of a folder (recursive, sorted, hidden ones skipped), or, for "stdlib",
    the sources of this Python's standard library. The last `held_out` (a fraction) of the bytes is held out.

    Raises ConfigError when the text is missing, empty, unreadable, or a folder without text files.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"the held-out fraction lies between 0 and 1, not {held_out}")
    path = Path(sysconfig.get_paths()["stdlib"] if text == "stdlib" else text)
    if not path.exists():
        raise ConfigError(f'no text at {path}: give a file, a folder or "stdlib"')
    if path.is_dir():
        suffix = ".py" if text == "stdlib" else ""
        parts = [part for file in _walk(path, suffix) if (part := _read(file, text_only=True)).size]
        if not parts:
            raise ConfigError(f"{path} holds no text files: give a folder with text or a single file")
    else:
        parts = [_read(path, text_only=False)]
    everything = np.concatenate(parts)
    if not everything.size:
        raise ConfigError(f"{path} is empty: give a file with text")
    return Corpus(str(text), everything, round(len(everything) * held_out), len(parts))


def _walk(folder: Path, suffix: str) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise ConfigError(
            f"cannot read {error.filename}: {error.strerror}; fix its permissions or give other text"
        )

    for root, folders, files in os.walk(folder, onerror=stop):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith("."))
        for name in sorted(files):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(root) / name


def _read(file: Path, *, text_only: bool) -> np.ndarray:
    """The file's bytes; none at all for a binary or special file when only text is wanted."""
    try:
        if text_only and not file.is_file():
            return np.empty(0, np.uint8)  # a socket, a pipe, a link to nothing
        with file.open("rb") as stream:
            head = stream.read(_PROBE_BYTES)
            if text_only and b"\0" in head:
                return np.empty(0, np.uint8)
            return np.frombuffer(head + stream.read(), np.uint8)
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}; fix its permissions or give other text"
        ) from error
