"""Options of `memferry train`: one dataclass that the command line, a YAML file and a resumed run all fill.

The command line wins over `--config FILE.yaml`, that over what the resumed run was made with.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from memferry_ascend import sizes
from memferry_ascend.errors import ConfigError, unknown
from memferry_ascend.train.models import PRESETS, shape_of

Parse = Callable[[str], Any]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_EXPECTED: dict[Parse, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    sizes.parse: 'a size such as "24GiB"',
    _words: "names separated by commas",
    _numbers: "whole numbers separated by commas",
    _truth: "true or false",
}


def _option(
    default: Any,
    help: str,
    parse: Parse = str,
    *,
    flag: str = "",
    engine: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field; `engine` marks those handed to `Config`, where None leaves the engine's own default."""
    meta = {"help": help, "parse": parse, "flag": flag, "engine": engine, "choices": choices}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run does. Sizes are bytes; a field that is None is left to the preset or to the engine."""

    text: str = _option(
        "stdlib", "a text file, a folder of them, or stdlib: the standard library's own sources"
    )
    model: str = _option("gpt-1m", f"preset: {', '.join(PRESETS)}")
    context: int | None = _option(None, "bytes a sequence (default: the preset's own)", int)
    steps: int = _option(500, "optimizer steps", int)
    batch: int = _option(
        16, "global batch: sequences a step, over all devices and accumulated backwards", int
    )
    lr: float = _option(3e-3, "peak learning rate", float)
    warmup: int | None = _option(None, "steps of linear warm-up (default: a twentieth of --steps)", int)
    weight_decay: float = _option(0.1, "AdamW's weight decay, on matrices only", float)
    seed: int = _option(0, "seed of the initialisation and of the batches", int)
    eval_every: int = _option(100, "steps between held-out evaluations; there is one at either end", int)
    eval_batches: int = _option(8, "batches a held-out evaluation reads", int)
    save_every: int | None = _option(
        None, "steps between checkpoints (default: one at the end; 0: none at all)", int
    )
    keep: int = _option(2, "newest checkpoints to keep (0: all)", int)
    plain: bool = _option(False, "train with plain PyTorch instead of the engine, to compare", _truth)
    topology: str = _option("auto", "fabric: auto, a built-in name such as cm384, or a YAML file")
    backend: str | None = _option(None, "cpu, cuda or ascend (default: what this machine has)")

    precision: str | None = _option(None, "bf16 or fp32", engine=True, choices=("bf16", "fp32"))
    keep_fp32: tuple[str, ...] | None = _option(None, "layers that stay in fp32", _words, engine=True)
    device_memory: int | None = _option(None, 'device byte budget, such as "24GiB"', sizes.parse, engine=True)
    host_memory: int | None = _option(None, "host byte budget", sizes.parse, engine=True)
    reserve: float | None = _option(
        None, "reserve factor for gradients kept on the device", float, engine=True
    )
    planner: str | None = _option(None, "search, paper, rules or a plan file", engine=True)
    update: str | None = _option(
        None, "when host updates start: step or backward", engine=True, choices=("step", "backward")
    )
    accumulate: int = _option(1, "backwards a step; --batch is split over them", int, engine=True)
    max_grad_norm: float | None = _option(
        None, "clip the global gradient norm", float, flag="clip", engine=True
    )
    assist_devices: tuple[int, ...] | None = _option(
        None, "peers that relay transfers", _numbers, engine=True
    )
    dispatch: str | None = _option(
        None,
        "how transfers are split over paths: static or dynamic",
        engine=True,
        choices=("static", "dynamic"),
    )
    threads: int | None = _option(None, "host update threads (default: the affinity's)", int, engine=True)

    def __post_init__(self) -> None:
        shape_of(self.model, self.context)
        for name in ("steps", "batch", "accumulate", "eval_every", "eval_batches"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("warmup", "save_every", "keep", "seed", "weight_decay"):
            value = getattr(self, name)
            _require(name, value, value is None or 0 <= value < math.inf, "0 or more")
        for name in ("lr", "max_grad_norm"):
            value = getattr(self, name)
            _require(name, value, value is None or 0 < value < math.inf, "above 0")
        _require(
            "batch",
            self.batch,
            self.batch % self.accumulate == 0,
            f"a multiple of {self.accumulate} backwards",
        )

    def engine_config(self) -> dict[str, Any]:
        """Keyword arguments for `memferry_ascend.Config`: only what was set."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.metadata["engine"] and getattr(self, f.name) is not None
        }

    def as_dict(self) -> dict[str, Any]:
        """All options as JSON values; `resolve` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def _require(name: str, found: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{_flag(FIELDS[name])} must be {expected}, not {found}")


FIELDS = {f.name: f for f in dataclasses.fields(TrainOptions)}


def _flag(option: dataclasses.Field[Any]) -> str:
    return "--" + (option.metadata["flag"] or option.name.replace("_", "-"))


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """One flag an option. Flags that are not given leave no attribute, so that lower sources show through."""
    for option in FIELDS.values():
        meta = option.metadata
        shown = "" if option.default in (None, False) else f" (default: {option.default})"
        common = {"dest": option.name, "default": argparse.SUPPRESS, "help": meta["help"] + shown}
        if meta["parse"] is _truth:
            parser.add_argument(_flag(option), action="store_true", **common)
        else:
            parser.add_argument(_flag(option), metavar=_metavar(meta), **common)


def _metavar(meta: Mapping[str, Any]) -> str:
    if meta["choices"]:
        return "|".join(meta["choices"])
    return {int: "N", float: "X", sizes.parse: "SIZE"}.get(meta["parse"], "NAME")


def read_yaml(path: Path) -> dict[str, Any]:
    """The options of a YAML file; keys are the field names. Raises ConfigError for a bad file or key."""
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must hold `key: value` lines, not {type(found).__name__}")
    for key in found:
        if key not in FIELDS:
            raise unknown(f"key in {path}", str(key), FIELDS)
    return found


def resolve(*sources: Mapping[str, Any]) -> TrainOptions:
    """Options from mappings of field names, the first source that has a name wins. Raises ConfigError.

    Strings are parsed, whichever source they come from: YAML reads `3e-4` and `24GiB` as strings.
    """
    values: dict[str, Any] = {}
    for source in reversed(sources):
        values |= source
    return TrainOptions(**{name: _value(FIELDS[name], value) for name, value in values.items()})


def _value(option: dataclasses.Field[Any], found: Any) -> Any:
    meta = option.metadata
    if found is None and option.default is None:
        return None
    text = ",".join(str(item) for item in found) if isinstance(found, list | tuple) else str(found)
    try:
        value = meta["parse"](text)
    except ConfigError as error:
        raise ConfigError(f"{_flag(option)}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{_flag(option)} must be {_EXPECTED[meta['parse']]}, not {found!r}") from error
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{_flag(option)} must be {' or '.join(meta['choices'])}, not {found!r}")
    return value
