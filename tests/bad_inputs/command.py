"""The command line: damaged checkpoints, bad flags, and faults of `memferry train`."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import files

from .world import Said, World, case, cases, put


def damaged(name: str, change: Callable[[bytes], bytes]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        path = w.newest / name
        path.write_bytes(change(path.read_bytes()))
        w.resume("--steps", "9")

    return do


def flipped(at: float) -> Callable[[bytes], bytes]:
    return lambda b: b[: int(len(b) * at)] + bytes([b[int(len(b) * at)] ^ 16]) + b[int(len(b) * at) + 1 :]


READ = r"cannot read checkpoint .*step-000004 .*resume from an older one"
cases(
    Said,
    {
        **{
            f"state.pt cut at {at}": (READ, damaged("state.pt", lambda b, at=at: b[: int(len(b) * at)]))  # type: ignore[misc]
            for at in (0.0, 0.1, 0.5, 0.9, 0.999)
        },
        **{
            f"state.pt with a bit flipped at {at}": (READ, damaged("state.pt", flipped(at)))
            for at in (0.2, 0.4, 0.6)
        },
        "state.pt of noise": (READ, damaged("state.pt", lambda b: bytes(range(256)) * 20)),
        "state.pt of text": (READ, damaged("state.pt", lambda b: b"PK\x03\x04 hello")),
        "meta.json empty": (READ, damaged("meta.json", lambda b: b"")),
        "meta.json cut": (READ, damaged("meta.json", lambda b: b[: len(b) // 2])),
        "meta.json of another program": ("no options", damaged("meta.json", lambda b: b'{"a": 1}')),
        "meta.json with a list": ("no options", damaged("meta.json", lambda b: b"[1]")),
        "meta.json of another version": (
            "another version.*warp",
            damaged("meta.json", lambda b: json.dumps({"options": {"warp": 9}}).encode()),
        ),
        "meta.json with a bad option": (
            "--lr must be a number",
            damaged("meta.json", lambda b: json.dumps({"options": {"lr": "high"}}).encode()),
        ),
    },
)


def state_file(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        path = w.newest / "state.pt"
        state = torch.load(path, weights_only=True)
        replaced = change(state)
        torch.save(state if replaced is None else replaced, path)
        w.resume("--steps", "9")

    return do


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


cases(
    Said,
    {
        "a plain model's state": ("no training state", state_file(lambda s: s["engine"]["model"])),
        "a state without rng": ("no training state", state_file(put("rng", None))),
        "an older engine state": ("expected format 1, found 0", state_file(put("engine", "format", 0))),
        "another model's state": ("another model", state_file(put("engine", "model", "ln.weight", None))),
    },
)


@case("a state that runs code", Said, READ)
def _(w: World) -> None:
    torch.save({"engine": Evil(w.folder / "evil"), "rng": 1}, w.newest / "state.pt")
    w.resume("--steps", "9")  # and no file "evil" appears


@case("state.pt is missing", Said, READ)
def _(w: World) -> None:
    (w.newest / "state.pt").unlink()
    w.resume("--steps", "9")


@case("meta.json is missing", Said, READ)
def _(w: World) -> None:
    (w.newest / "meta.json").unlink()
    w.resume()


cases(
    Said,
    {
        "resume from nowhere": (
            "nothing to resume",
            lambda w: w.cli("train", "--resume", str(w.folder / "none")),
        ),
        "resume what is done": ("nothing is left", lambda w: w.resume()),
        "resume with another model": ("was trained with --model", lambda w: w.resume("--model", "gpt-1m")),
        "resume with another context": ("--context", lambda w: w.resume("--context", "4")),
        "resume in a folder of another run": (
            "already holds a run",
            lambda w: w.cli(
                "train", "--resume", str(w.newest), "--steps", "9", "--out", str(w.folder / "second")
            ),
        ),
        "a run that is there": ("already holds a run", lambda w: w.train("--out", str(w.run))),
        "no text": ("no text at", lambda w: w.train("--out", str(w.folder / "n"), text="none")),
        "empty text": ("is empty", lambda w: w.train("--out", str(w.folder / "n"), text="empty")),
        "text shorter than a sequence": (
            "too short",
            lambda w: w.train("--out", str(w.folder / "n"), text="short"),
        ),
        "a folder without text": (
            "no text files",
            lambda w: w.train("--out", str(w.folder / "n"), text="hollow"),
        ),
        "an unknown preset": (
            "unknown model preset 'gpt-2m'",
            lambda w: w.cli("train", "--model", "gpt-2m", "--out", str(w.folder / "n")),
        ),
        "an unknown flag": ("--wings", lambda w: w.train("--wings", "2")),
        "an unknown command": ("unknown command 'trian'.*'train'", lambda w: w.cli("trian")),
        "no number": ("--steps must be a whole number", lambda w: w.train("--steps", "ten")),
        "no steps": ("--steps must be at least 1", lambda w: w.train("--steps", "0")),
        "a negative rate": ("--lr must be above 0", lambda w: w.train("--lr", "-1")),
        "an unknown precision": ("bf16 or fp32", lambda w: w.train("--precision", "fp8")),
        "a bad size": ("--host-memory", lambda w: w.train("--host-memory", "9G")),
        "a batch that does not divide": ("multiple of 3", lambda w: w.train("--accumulate", "3")),
        "a budget of one byte": (
            "smallest workable host_memory",
            lambda w: w.train("--out", str(w.folder / "n"), "--host-memory", "1"),
        ),
        "a YAML file that is not there": (
            "cannot read --config",
            lambda w: w.train("--config", str(w.folder / "no")),
        ),
        "YAML that is none": ("is not YAML", lambda w: w.train("--config", str(w.folder / "bad.yaml"))),
        "YAML with a list": (
            "`key: value` lines",
            lambda w: w.train("--config", str(w.folder / "list.yaml")),
        ),
        "YAML with an unknown key": (
            "did you mean 'steps'",
            lambda w: w.train("--config", str(w.folder / "key.yaml")),
        ),
        "an output that is a file": ("text", lambda w: w.train("--out", str(w.folder / "text"))),
        "an output that cannot be written": ("/proc", lambda w: w.train("--out", "/proc/run")),
    },
)


@case("NaN gradients and loss", Said, "became nan at step .*--lr", may_add="n")
def _(w: World) -> None:
    w.train("--out", w.folder / "n", "--lr", "1e30", "--warmup", "0", "--steps", "8")


def fill_the_disk(w: World) -> None:
    """No room for a checkpoint's state."""
    replacing = files.replacing

    def full(path: Path) -> Any:
        if path.name == "state.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path)

    w.patch.setattr(files, "replacing", full)


for asynchronous in (True, False):

    @case(
        f"disk full in training, {'beside' if asynchronous else 'between'} steps",
        Said,
        "No space left",
        may_add="n",
    )
    def _(w: World, asynchronous: bool = asynchronous) -> None:
        fill_the_disk(w)
        w.train("--out", w.folder / "n", "--save-every", "1", *([] if asynchronous else ["--plain"]))


@case("disk full, the older checkpoints stay", Said, "No space left", may_add="run/checkpoints/.tmp")
def _(w: World) -> None:
    fill_the_disk(w)
    metrics = w.run / "metrics.jsonl"
    text = metrics.read_bytes()
    try:
        w.resume("--steps", "6", "--save-every", "1")
    finally:
        assert metrics.read_bytes().startswith(text)
        metrics.write_bytes(text)  # a step was trained and recorded, rightly
