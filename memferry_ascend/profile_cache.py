"""Profiles on disk: measured once for a model, batch, device and installation.

The folder is $MEMFERRY_CACHE, else $XDG_CACHE_HOME/memferry, else ~/.cache/memferry; MEMFERRY_CACHE set to nothing
means no cache. A file is a profile that `Profile.load` reads, beside what it depends on and the notes of the
measurement. A file that cannot be read, or written, is as good as none: measuring again is always right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memferry_ascend import files
from memferry_ascend.layers import Layer
from memferry_ascend.planner.files import read_json, write_json
from memferry_ascend.planner.profile import Profile

MEASUREMENT = 3
"""Version of how things are measured: raised when old profiles should not be used any more."""


def folder() -> Path | None:
    """Where profiles are kept; None when the cache is off."""
    return files.cache_folder("profiles")


def model_shape(model: nn.Module, layers: Sequence[Layer]) -> list[Any]:
    """Modules by type, parameters by shape, dtype and ties, and whether dropout and the like are on."""
    modules = [(name, type(m).__qualname__, m.training) for name, m in model.named_modules()]
    params = [
        (layer.name, [(p.name, list(p.shape), str(p.dtype), p.trainable) for p in layer.reads])
        for layer in layers
    ]
    buffers = [(n, list(b.shape), str(b.dtype)) for n, b in model.named_buffers()]
    extra = [(name, m.extra_repr()) for name, m in model.named_modules()]
    return [modules, params, buffers, extra]


def batch_shape(value: Any) -> Any:
    """Shapes and dtypes of a batch; values that are no tensors count as they are."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, Mapping):
        return {str(k): batch_shape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [batch_shape(v) for v in value]
    return repr(value)


def key_of(parts: Mapping[str, Any]) -> str:
    """The file name for what a profile depends on."""
    text = json.dumps({"measurement": MEASUREMENT, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(parts: Mapping[str, Any]) -> tuple[Profile, list[str]] | None:
    """The cached profile and its notes, or None."""
    place = folder()
    if place is None:
        return None
    path = place / f"{key_of(parts)}.json"
    try:
        document = read_json(path, "profile")
        notes = [str(x) for x in document.get("notes", [])]
        return Profile.from_json(document), notes
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def store(parts: Mapping[str, Any], profile: Profile, notes: Sequence[str]) -> Path | None:
    """Write the profile; returns its path, None when there is no cache or it cannot be written."""
    place = folder()
    if place is None:
        return None
    path = place / f"{key_of(parts)}.json"
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        shown = {k: v for k, v in parts.items() if k != "model"}
        write_json(path, {**profile.to_json(), "notes": list(notes), "measured_on": shown})
        return path
    return None
