"""States that an engine cannot load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memferry_ascend.errors import FerryError

from .world import World, cases, put


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        state = w.engine.state_dict()
        replaced = change(state)
        w.engine.load_state_dict(state if replaced is None else replaced)

    return do


def optimizer_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        state = w.engine.optimizer.state_dict()
        replaced = change(state)
        w.engine.optimizer.load_state_dict(state if replaced is None else replaced)

    return do


NAN = torch.tensor(float("nan"))
cases(
    FerryError,
    {
        "state: a list": ("expected a mapping", edited(lambda s: [1])),  # type: ignore[arg-type,return-value]
        "state: empty": ("expected a mapping", edited(lambda s: {})),
        "state: of a plain model": ('"format"', edited(lambda s: s["model"])),
        "state: an older format": ("expected format 1, found 0", edited(put("format", 0))),
        "state: a newer format": ("expected format 1, found 9", edited(put("format", 9))),
        "state: no parameters": ('"format" and "model"', edited(put("model", None))),
        "state: parameters in a list": ("map parameter names", edited(put("model", [1]))),
        "state: a parameter missing": (r"missing \['0.bias'\]", edited(put("model", "0.bias", None))),
        "state: a parameter more": (
            r"unexpected \['9.bias'\]",
            edited(put("model", "9.bias", torch.zeros(1))),
        ),
        "state: a parameter of another shape": (
            "'0.bias' has shape",
            edited(put("model", "0.bias", torch.zeros(7))),
        ),
        "state: a number for a parameter": ("'0.bias' to be a tensor", edited(put("model", "0.bias", 3.0))),
        "state: of another optimizer": ("its optimizer is SGD", edited(put("optimizer_class", "SGD"))),
        "state: moments in a list": ("map parameter names", edited(put("optimizer", [1]))),
        "state: one parameter's moments are a number": (
            "'2.bias': expected a mapping",
            edited(put("optimizer", "2.bias", 1)),
        ),
        "state: moments of another shape": (
            "exp_avg.* of shape|exp_avg has shape",
            edited(put("optimizer", "2.bias", "exp_avg", torch.zeros(9))),
        ),
        "state: a moment missing": (
            r"missing \['exp_avg_sq'\]",
            edited(put("optimizer", "2.bias", "exp_avg_sq", None)),
        ),
        "state: a moment that is no tensor": (
            "exp_avg is no tensor",
            edited(put("optimizer", "2.bias", "exp_avg", 1.0)),
        ),
        "state: half a step": ("whole number", edited(put("optimizer", "2.bias", "step", 1.5))),
        "state: a negative step": ("whole number", edited(put("optimizer", "2.bias", "step", -1))),
        "state: a NaN step": ("whole number", edited(put("optimizer", "2.bias", "step", NAN))),
        "state: a step in words": ("whole number", edited(put("optimizer", "2.bias", "step", "two"))),
        "state: another group layout": ("param groups", edited(put("param_groups", []))),
        "state: a group of other parameters": (
            "param groups",
            edited(put("param_groups", 0, "params", ["0.weight"])),
        ),
        "state: amsgrad": ("amsgrad differs", edited(put("param_groups", 0, "amsgrad", True))),
        "optimizer: a list": ("expected a mapping", optimizer_state(lambda s: [])),  # type: ignore[arg-type,return-value]
        "optimizer: no groups": ('"param_groups"', optimizer_state(put("param_groups", None))),
        "optimizer: fewer groups": ("param groups of sizes", optimizer_state(put("param_groups", []))),
        "optimizer: a moment of another shape": (
            "exp_avg",
            optimizer_state(put("state", 5, "exp_avg", torch.zeros(5))),
        ),
        "optimizer: a moment missing": ("missing", optimizer_state(put("state", 5, "exp_avg", None))),
        "optimizer: half a step": ("whole number", optimizer_state(put("state", 5, "step", 0.5))),
    },
)
