"""Checkpoints of several ranks, in torch.distributed.checkpoint's format, under the original names.

Each parameter's master and state are put together on one rank and written by it, parameters dealt out by size, so that
no rank ever holds the whole model twice. What is written has whole tensors in it: it loads on another number of ranks,
on one, or without this library:

    torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, "state.pt")
    state = torch.load("state.pt")                      # {"model": {name: fp32 tensor}, "optimizer": {name: {...}}}
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint as dcp

from memferry_ascend import checkpoint
from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine
    from memferry_ascend.layers import Param

_META = "memferry"


def save(engine: Engine, folder: str | Path) -> None:
    """Write a checkpoint into `folder`. Every rank calls; all see the same folder.

    Raises:
        FerryError: it could not be written, or a peer failed.
    """
    engine.synchronize()
    ranks = engine.runtime.ranks
    mine, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    owner = _deal([p for r in engine._residents for p in r.unit.params], size)
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for r in engine._residents:
        for p in r.unit.params:
            value = r.master(p)
            moments = engine._updates[r.unit.index].state_of(p) if p.trainable else {}
            if owner[p.index] == mine:
                for name in (p.name, *p.aliases):
                    state["model"][name] = value
                state["optimizer"][p.name] = {
                    k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in moments.items()
                }
    if mine == 0:
        common = checkpoint.common_state(engine)
        state["model"] |= common["model"]  # buffers
    keys = {n: sorted(s) for n, s in state["optimizer"].items()}
    everyone = [keys] if ranks is None else ranks.gather_objects(keys)
    if mine == 0:
        head = {k: v for k, v in common.items() if k not in ("model", "optimizer")}
        head["state_keys"] = {n: k for part in everyone for n, k in part.items()}
        state[_META] = _packed(head)
    with _quiet():
        try:
            dcp.save(
                state, checkpoint_id=os.fspath(folder), process_group=None if ranks is None else ranks.main
            )
        except dcp.api.CheckpointException as e:
            raise FerryError(f"checkpoint {folder}: could not be written: {e}") from e


def load(engine: Engine, folder: str | Path) -> None:
    """Load what `save` wrote, on any number of ranks. Every rank calls.

    Raises:
        FerryError: there is no checkpoint, or it is of another model or optimizer; nothing has been changed then.
    """
    reader = dcp.FileSystemReader(os.fspath(folder))
    try:
        known = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError) as e:
        raise FerryError(f"checkpoint {folder}: expected a folder that save() wrote ({e})") from e
    if _META not in known:
        raise FerryError(f"checkpoint {folder}: another program wrote it (it has no entry {_META!r})")
    with _quiet():
        meta = {_META: _empty(known[_META])}
        dcp.load(meta, storage_reader=reader, no_dist=True)
        head = torch.load(io.BytesIO(meta[_META].numpy().tobytes()), weights_only=True)
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        for key, entry in known.items():
            if key.startswith("model."):
                state["model"][key.removeprefix("model.")] = _empty(entry)
        for name, keys in head["state_keys"].items():
            state["optimizer"][name] = {k: _empty(known[f"optimizer.{name}.{k}"]) for k in keys}
        dcp.load(state, storage_reader=reader, no_dist=True)
    engine.load_state_dict(state | {k: head[k] for k in ("format", "optimizer_class", "param_groups")})


def _packed(value: Any) -> torch.Tensor:
    """Plain values as bytes: DCP would take nested containers apart."""
    out = io.BytesIO()
    torch.save(value, out)
    return torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)


def _empty(entry: Any) -> Any:
    """What dcp.load fills: a tensor of the stored size, or nothing for a plain value."""
    if isinstance(entry, dcp.metadata.TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def _deal(params: list[Param], size: int) -> dict[int, int]:
    """Rank by parameter index: largest first, each to the rank with the least so far."""
    loads = [0] * size
    out = {}
    for p in sorted(params, key=lambda p: (-p.numel, p.index)):
        rank = loads.index(min(loads))
        loads[rank] += p.numel
        out[p.index] = rank
    return out


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns about what is meant here: no process group with one rank, and CPU tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
