"""Bad settings: fields of Config, `init`, plan files."""

from __future__ import annotations

from typing import Any

import memferry_ascend as mf
from memferry_ascend import runtime, sizes
from memferry_ascend.errors import ConfigError

from .world import CASES, Case, World, case, cases

BAD_FIELDS: dict[str, list[Any]] = {
    "precision": ["fp16", None, 32, ""],
    "update": ["later", None],
    "dispatch": ["fast", 1],
    "planner": ["", None, 3],
    "device_memory": ["24G", "much", -1, 0, 1.5, True, "nanGiB", "-1GiB"],
    "host_memory": ["1 XiB", 0, -5, float("inf"), "GiB"],
    "keep_fp32": ["norm", 3, None],
    "assist_devices": ["1,2", 1],
    "reserve": [-0.1, 1.5, float("nan"), "half", True],
    "accumulate": [0, -1, 1.5, True, None, "2"],
    "max_grad_norm": [0, -1.0, float("inf"), float("nan"), "1", True],
    "threads": [0, -2, 1.5, True, "4"],
}
for name, values in BAD_FIELDS.items():
    for value in values:
        CASES.append(
            Case(
                f"Config.{name}={value!r}",
                ConfigError,
                f"Config.{name}",
                lambda w, name=name, value=value: mf.Config(**{name: value}),  # type: ignore[misc]
            )
        )

cases(
    ConfigError,
    {
        "an unknown key": (
            "did you mean 'precision'",
            lambda w: mf.Config.from_mapping({"precison": "bf16"}),
        ),
        "a key of nothing": ("unknown configuration key", lambda w: mf.Config.from_mapping({"zzz": 1})),
        "an unknown backend": ("unknown backend 'gpu'", lambda w: runtime.make_backend("gpu")),
        "a second init with another backend": ("init was called with", lambda w: mf.init(backend="cuda")),
        "a second init with another topology": ("init was called with", lambda w: mf.init("cm384", "cpu")),
        "a size without a unit's base": ("ambiguous", lambda w: sizes.parse("24G")),
        "a size that is no number": ("cannot read", lambda w: sizes.parse("a lot")),
        "a budget without a sample batch": (
            "sample_batch",
            lambda w: w.ferry(config=mf.Config(device_memory="1GiB")),
        ),
        "a plan file that is not there": (
            "none.json",
            lambda w: w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "none.json"))),
        ),
    },
)


@case("a plan file that is no JSON", ConfigError, "plan file")
def _(w: World) -> None:
    (w.folder / "p.json").write_text("{")
    w.remember()
    w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "p.json")))


@case("a plan file of another kind", ConfigError, "plan file")
def _(w: World) -> None:
    (w.folder / "p.json").write_text('{"format": "memferry profile", "version": 1, "layers": []}')
    w.remember()
    w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "p.json")))


@case("a plan file with an unknown mode", ConfigError, "mode must be one of")
def _(w: World) -> None:
    (w.folder / "p.json").write_text(
        '{"format": "memferry plan", "version": 1, "layers": [{"name": "0", "mode": "FAST"}]}'
    )
    w.remember()
    w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "p.json")))
