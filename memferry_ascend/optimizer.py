"""FerryOptimizer: what the user steps. A true torch optimizer whose `step()` hands work to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine


class FerryOptimizer(torch.optim.Optimizer):
    """Shares its `param_groups` with the optimizer it replaces, so a scheduler made before `ferry` keeps working.

    `step()` returns at once: it snapshots every hyperparameter, marks where the compute stream stands and hands the
    updates to the worker. It consumes gradients: `p.grad` is None afterwards. `state_dict()` and `load_state_dict()`
    speak the original optimizer's format, with fp32 moments.
    """

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine) -> None:
        self._engine: Engine | None = None
        super().__init__([{"params": list(g["params"])} for g in inner.param_groups], dict(inner.defaults))
        self.param_groups = inner.param_groups
        self.inner = inner
        self._engine = engine
        # Hooks of the user's that came before us run around our step.
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks
        self._inner_step = inner.__dict__.get("step")  # a scheduler's wrapper, if there is one
        inner.step = self._refuse  # type: ignore[method-assign]
        inner._opt_called = True  # type: ignore[attr-defined]  # a scheduler made earlier looks for it

    @staticmethod
    def _refuse(*_: Any, **__: Any) -> NoReturn:
        raise FerryError(
            "the original optimizer's step() was called after ferry; call engine.optimizer.step() instead"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand one update to the engine.

        Raises:
            FerryError: no parameter has a gradient, the engine is closed, or an earlier update failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients. After `step()` there are none; with `set_to_none=False` a parameter that gets no gradient
        before the next step then counts as having a gradient of zeros, as in plain PyTorch."""
        self.engine._zero_grad(set_to_none)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise FerryError("the engine behind this optimizer is closed")
        return self._engine

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the engine is armed: its arena is laid out."""
        if self._engine is not None:
            raise FerryError("add_param_group after ferry: close the engine, add the group, and ferry again")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The original optimizer's format: `state` by parameter number, `param_groups` with numbers."""
        numbers: dict[int, int] = {}
        groups = []
        for g in self.param_groups:
            for p in g["params"]:
                numbers.setdefault(id(p), len(numbers))
            groups.append(
                {
                    **{k: v for k, v in g.items() if k != "params"},
                    "params": [numbers[id(p)] for p in g["params"]],
                }
            )
        state = {numbers[key]: value for key, value in self.engine._optimizer_state() if key in numbers}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` or the original optimizer's gave.

        Raises:
            FerryError: group sizes differ.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise FerryError(
                'optimizer state: expected a mapping with "state" and "param_groups", as optimizer.state_dict() gives'
            )
        groups = state_dict["param_groups"]
        ours = [len(g["params"]) for g in self.param_groups]
        theirs = [len(g["params"]) for g in groups]
        if ours != theirs:
            raise FerryError(f"optimizer state: expected param groups of sizes {ours}, found {theirs}")
        by_id: dict[int, dict[str, Any]] = {}
        for g, saved in zip(self.param_groups, groups, strict=True):
            for p, number in zip(g["params"], saved["params"], strict=True):
                by_id[id(p)] = state_dict["state"].get(number, {})
        self.engine._load_optimizer_state(by_id)
        for g, saved in zip(self.param_groups, groups, strict=True):
            g.update({k: v for k, v in saved.items() if k != "params"})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise FerryError(
            "GradScaler is not supported: bf16 and fp32 gradients need no scaling; step the optimizer"
        )

    def _detach(self) -> torch.optim.Optimizer:
        if self._inner_step is None:
            self.inner.__dict__.pop("step", None)
        else:
            self.inner.step = self._inner_step  # type: ignore[method-assign]
        self._engine = None
        return self.inner


# A scheduler made before `ferry` warns when the step it has wrapped is replaced, unless it finds its mark.
FerryOptimizer._refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
