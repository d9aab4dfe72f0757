"""The checkpoints folder: `checkpoints/step-000123/` with `state.pt` (tensors) and `meta.json` (options).

A checkpoint is written under a temporary name, fsynced and renamed, so a folder named `step-N` is complete,
whenever the process dies. Folders are taken away the same way round: renamed first, then deleted.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import files, torchfile
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.train.options import FIELDS

_COMPLETE = re.compile(r"step-(\d+)")
_TEMPORARY = ".tmp-"


def step_of(checkpoint: Path) -> int:
    """The number of updates a checkpoint folder holds, from its name."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    if match is None:
        raise ConfigError(f"{checkpoint} is not a checkpoint: expected a folder named step-N")
    return int(match.group(1))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a checkpoints folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((c for c in folder.iterdir() if _COMPLETE.fullmatch(c.name) and c.is_dir()), key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete(folder)), None)


def find(path: Path) -> Path:
    """The checkpoint that `--resume PATH` means: a run's folder, its checkpoints folder or one checkpoint.

    Raises ConfigError when there is none.
    """
    if _COMPLETE.fullmatch(path.resolve().name) and (path / "meta.json").is_file():
        return path.resolve()
    newest = latest(path / "checkpoints") or latest(path)
    if newest is None:
        raise ConfigError(
            f"nothing to resume in {path}: it holds no complete checkpoint (checkpoints/step-N)"
        )
    return newest


def save(folder: Path, step: int, state: dict[str, Any], meta: dict[str, Any], *, keep: int = 2) -> Path:
    """Writes checkpoint `step`, then deletes all but the newest `keep` (0: keeps all). Returns its folder.

    `state` holds what `torch.load(weights_only=True)` can read; `meta` is JSON. A step that is there already
    is left as it is: replacing it would leave a moment without it.
    """
    state_file = begin(folder, step)
    if state_file is None:
        return folder / _name(step)
    try:
        with files.replacing(state_file) as stream:
            torch.save(state, stream)
        return commit(state_file, meta, keep=keep)
    except (OSError, RuntimeError) as error:  # torch's writer turns some failed writes into RuntimeErrors
        raise FerryError(
            f"cannot save {folder / _name(step)}: {error}; the checkpoints before it are untouched"
        ) from error


def begin(folder: Path, step: int) -> Path | None:
    """Where the state file of checkpoint `step` is to be written before `commit`; None when the step is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_TEMPORARY}*"):  # of a process that died, or a save that failed
        shutil.rmtree(leftover)
    if (folder / _name(step)).exists():
        return None
    temporary = folder / f"{_TEMPORARY}{_name(step)}"
    temporary.mkdir()
    return temporary / "state.pt"


def commit(state_file: Path, meta: dict[str, Any], *, keep: int = 2) -> Path:
    """The state file is complete: makes the checkpoint visible as a whole and deletes old ones, as `save` does."""
    temporary = state_file.parent
    folder, target = temporary.parent, temporary.with_name(temporary.name.removeprefix(_TEMPORARY))
    files.write_json(temporary / "meta.json", meta | {"step": step_of(target)})
    os.rename(temporary, target)
    files.sync_folder(folder)
    for old in complete(folder)[:-keep] if keep else ():
        remove(old)
    return target


def _name(step: int) -> str:
    return f"step-{step:06d}"


def set_aside_after(folder: Path, step: int) -> None:
    """Renames checkpoints later than `step`: who goes on from there must not resume from the old future."""
    for later in complete(folder):
        if step_of(later) > step:
            aside = folder / f"superseded-{later.name}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(later, aside)


def load(checkpoint: Path, *, tensors: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(state, meta)` of a checkpoint, tensors on the CPU; with `tensors=False` the state is empty.

    Raises FerryError when a file is missing or damaged.
    """
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
        state = {}
        if tensors:
            torchfile.verify(checkpoint / "state.pt")
            state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FerryError(
            f"cannot read checkpoint {checkpoint} ({reason}): resume from an older one, "
            f"--resume {checkpoint.parent}/step-N"
        ) from error
    return state, meta


def options_of(checkpoint: Path) -> dict[str, Any]:
    """The options of the run that wrote a checkpoint. Raises FerryError when another version wrote it."""
    meta = load(checkpoint, tensors=False)[1]
    options = meta.get("options") if isinstance(meta, dict) else None
    if not isinstance(options, dict):
        raise FerryError(f"{checkpoint}/meta.json holds no options: it is of another program or version")
    unknown = sorted(set(options) - set(FIELDS))
    if unknown:
        raise FerryError(
            f"{checkpoint} was written by another version: it has the options {', '.join(unknown)}, unknown here"
        )
    return options


def training_state(checkpoint: Path) -> dict[str, Any]:
    """The state that a run goes on from: "engine" and "rng". Raises FerryError when it is damaged or another's."""
    state = load(checkpoint)[0]
    if not isinstance(state, dict) or not {"engine", "rng"} <= set(state):
        raise FerryError(f'{checkpoint}/state.pt is no training state: expected "engine" and "rng" in it')
    return state


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; it stops being complete before its first file goes."""
    doomed = checkpoint.with_name(f"{_TEMPORARY}old-{checkpoint.name}")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed)
