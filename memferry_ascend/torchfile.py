"""Writes what `torch.load(weights_only=True)` reads, tensor by tensor: the whole state is never in memory at once.

`torch.save` wants every tensor up front. Its file is a zip archive with one uncompressed record per storage and a
pickle (protocol 2) that refers to them, so tensors may be written in any order, each let go at once, and the pickle
last. Every record carries its CRC, which `verify` checks; `torch.load` does not.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any

import torch

from memferry_ascend.errors import FerryError

_ALIGNMENT = 64
"""Bytes; where storages start, so that `torch.load(mmap=True)` finds them aligned, as torch writes them."""

_LOCAL_HEADER = 30 + 20
"""Bytes of a zip local header with its 64-bit sizes, without the name and our padding."""


@dataclass(frozen=True)
class StorageRef:
    """A record of the archive: one storage."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """Stands for a contiguous tensor that was written already."""

    storage: StorageRef
    shape: tuple[int, ...]


class TorchFile:
    """One file being written to `stream` (seekable, binary). Used by one thread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._zip = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._stream = stream
        self._count = 0

    def add(self, tensor: torch.Tensor) -> TensorRef:
        """Write a CPU tensor's values; it may be let go afterwards."""
        flat = tensor.detach().contiguous().reshape(-1)
        ref = StorageRef(str(self._count), tensor.dtype, flat.numel())
        self._count += 1
        self._record(
            f"data/{ref.key}",
            memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
            if flat.numel()
            else b"",
        )
        return TensorRef(ref, tuple(tensor.shape))

    def finish(self, tree: Any) -> None:
        """Write the pickle of `tree`, plain containers and values with `TensorRef`s in them, and the directory."""
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=2).dump(tree)
        self._record("data.pkl", pickled.getvalue())
        self._record("byteorder", sys.byteorder.encode())
        self._record("version", b"3\n")
        self._zip.close()

    def abandon(self) -> None:
        """Writing has failed: let the stream alone from now on (a ZipFile would go on writing when it is collected)."""
        self._zip.fp = None

    def _record(self, name: str, data: bytes | memoryview) -> None:
        info = zipfile.ZipInfo(f"archive/{name}")
        pad = -(self._stream.tell() + _LOCAL_HEADER + len(info.filename) + 4) % _ALIGNMENT
        info.extra = struct.pack("<2sH", b"FB", pad) + b"\0" * pad
        with self._zip.open(info, "w", force_zip64=True) as record:
            record.write(data)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, StorageRef):
            kind = torch.storage._dtype_to_storage_type_map()[obj.dtype]
            return ("storage", getattr(torch, kind), obj.key, "cpu", obj.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorRef):
            strides, step = [], 1
            for size in reversed(obj.shape):
                strides.append(step)
                step *= size
            arguments: tuple[Any, ...] = (
                obj.storage,
                0,
                obj.shape,
                tuple(reversed(strides)),
                False,
                OrderedDict(),
            )
            return torch._utils._rebuild_tensor_v2, arguments
        if isinstance(obj, torch.Tensor):
            raise TypeError(
                "a tensor was not written before the pickle"
            )  # a mistake of ours, never of the user's
        return NotImplemented


def verify(path: str | os.PathLike[str]) -> None:
    """Read every record of a file that `torch.save` or we wrote and compare checksums.

    Raises:
        FerryError: the file is damaged; names the record. OSError as `open` does.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError) as error:
        raise FerryError(f"{os.fspath(path)} is damaged or no torch file: {error}") from error
    if damaged is not None:
        raise FerryError(f"{os.fspath(path)} is damaged: the checksum of record {damaged!r} is wrong")
