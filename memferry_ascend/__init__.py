"""Train PyTorch models larger than device memory: parameters, gradients and optimizer state live in host memory.

import memferry_ascend as mf

mf.init()
engine = mf.ferry(model, optimizer)
for batch in loader:
    loss = engine.model(**batch).loss
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

# torch imports an installed torch_npu by itself, and then fails where CANN is missing. The Ascend backend imports it when
# it is asked for, and says in a sentence what is wrong.
if "torch" not in sys.modules and importlib.util.find_spec("torch_npu") is not None:
    _before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    if _before is None:
        del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    else:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _before

import torch
from torch import nn

from memferry_ascend.config import Config
from memferry_ascend.engine import Engine
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.planner import Plan, Profile
from memferry_ascend.runtime import Runtime, current, init
from memferry_ascend.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "FerryError",
    "Plan",
    "Profile",
    "Runtime",
    "ferry",
    "init",
]


def ferry(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sample_batch: Any = None,
    config: Config | None = None,
    plan: Plan | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> Engine:
    """Move `model` and the state of `optimizer` to host memory and arm them for training on the device.

    model: on the CPU or, without values, on the meta device; parameters float32 or bfloat16. They change storage in
        place and stay the model's own.
    optimizer: one torch optimizer over the model's trainable parameters.
    sample_batch: a dict (keyword arguments), a tuple (positional) or one tensor to call the model with; used to measure
        and to keep `Config.device_memory`.
    plan: overrides `Config.planner`.
    weights: a safetensors file or folder to take parameters and buffers from. Without it a meta model is initialised by
        each module's own `reset_parameters`.

    Raises:
        FerryError: the model, optimizer, plan or sizes do not fit together; nothing has been changed then.
    """
    if weights is None:
        return Engine(model, optimizer, current(), config or Config(), plan, sample_batch)
    opened = Weights(weights)
    try:
        return Engine(model, optimizer, current(), config or Config(), plan, sample_batch, opened)
    finally:
        opened.close()
