"""Getting a model in that need not exist in memory first: meta models and safetensors files, a module at a time.

A model built under `torch.device("meta")` has shapes and no values. While the arena is filled, each module's values are
made by its own `reset_parameters`, or read from a file, written to the arena and let go: beside the arena, host memory
holds one module. What nobody initialised is an error, never a silent zero.

Needs the `safetensors` package for files (`pip install memferry_ascend[weights]`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memferry_ascend.errors import FerryError
from memferry_ascend.layers import Layer, Param


def is_meta(model: nn.Module) -> bool:
    """True if any parameter or buffer has no values yet."""
    return any(t is not None and t.is_meta for t in (*model.parameters(), *model.buffers()))


class Weights:
    """A safetensors file, or a folder with `model.safetensors.index.json` or with several such files.

    Names are those of `model.state_dict()`; a tied parameter may bear any of its names. Tensors nobody asks for are
    left alone.

    Raises:
        FerryError: the package is missing, there is no such file, or two files hold the same name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as e:
            raise FerryError(
                "weights: reading safetensors files needs the safetensors package; pip install safetensors"
            ) from e
        self.path = Path(path)
        self._stack = ExitStack()
        self._at: dict[str, Any] = {}
        try:
            for file in _files(self.path):
                try:
                    opened = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                except Exception as e:  # the package has exceptions of its own
                    raise FerryError(f"weights: {file} is not a readable safetensors file: {e}") from e
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    if name in self._at:
                        raise FerryError(f"weights: {name!r} is in more than one file of {self.path}")
                    self._at[name] = opened
        except BaseException:
            self._stack.close()
            raise

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape, None if there is no such tensor."""
        return tuple(self._at[name].get_slice(name).get_shape()) if name in self._at else None

    def read(self, name: str) -> torch.Tensor:
        """A tensor, read now, in the dtype it was stored in."""
        return self._at[name].get_tensor(name)

    def close(self) -> None:
        self._at.clear()
        self._stack.close()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FerryError(f"weights: expected a safetensors file or a folder of them, found nothing at {path}")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
            files = [path / name for name in sorted(set(names))]
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise FerryError(f"weights: {index} is not an index of safetensors files: {e!r}") from e
        missing = [str(f) for f in files if not f.is_file()]
        if missing:
            raise FerryError(f"weights: {index} names files that are not there: {missing[:3]}")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FerryError(f"weights: no *.safetensors files in {path}")
    return files


class Source:
    """Where the values of a model come from while it is armed: the model itself, a file, or `reset_parameters`."""

    def __init__(self, model: nn.Module, layers: list[Layer], weights: Weights | None) -> None:
        self._model = model
        self._weights = weights
        self._names: dict[int, str] = {}
        if weights is not None:
            self._find(layers, weights)
        else:
            self._check_modules()

    def _find(self, layers: list[Layer], weights: Weights) -> None:
        missing, wrong = [], []
        for p in (p for layer in layers for p in layer.params):
            name = next((n for n in (p.name, *p.aliases) if weights.shape(n) is not None), None)
            if name is None:
                missing.append(p.name)
            elif weights.shape(name) != tuple(p.shape):
                wrong.append(f"{name}: {weights.shape(name)}, expected {tuple(p.shape)}")
            else:
                self._names[p.index] = name
        if missing or wrong:
            raise FerryError(
                f"weights: {weights.path} is of another model: missing {missing[:5]}, of another shape {wrong[:5]}"
            )

    def _check_modules(self) -> None:
        for name, module in self._model.named_modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            if any(t is not None and t.is_meta for t in own) and not hasattr(module, "reset_parameters"):
                raise FerryError(
                    f"ferry: module {name!r} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters; pass weights=PATH (safetensors), or build it on the CPU"
                )

    @contextmanager
    def values(self, layer: Layer) -> Iterator[dict[int, torch.Tensor]]:
        """The values of what the layer owns, by parameter index; CPU tensors that are let go on leaving."""
        owned = {p.index: p for p in layer.params}
        meta = any(t is not None and t.is_meta for t in
                   (*layer.module._parameters.values(), *layer.module._buffers.values()))  # fmt: skip
        if self._weights is not None:
            yield {index: self._weights.read(self._names[index]) for index in owned}
        elif meta:
            yield self._reset(layer, owned)
        else:
            yield {index: p.param.detach() for index, p in owned.items()}

    def _reset(self, layer: Layer, owned: dict[int, Param]) -> dict[int, torch.Tensor]:
        """Run the module's own initialisation on throwaway parameters. A tied parameter that another layer owns gets
        values too, which nobody takes: its owner's count."""
        module = layer.module
        mine = {id(p.param): index for index, p in owned.items()}
        before = dict(module._parameters)
        fresh: dict[str, nn.Parameter] = {}
        try:
            for name, p in before.items():
                if p is not None:
                    fresh[name] = nn.Parameter(_unset(p, p.dtype), requires_grad=False)
                    module._parameters[name] = fresh[name]
            self._materialise_buffers(module)
            with torch.no_grad():
                module.reset_parameters()  # type: ignore[operator]
        finally:
            module._parameters.update(before)
        out = {}
        for name, p in before.items():
            if p is not None and id(p) in mine:
                self._check_set(layer.name, module, name, fresh[name])
                out[mine[id(p)]] = fresh[name].detach()
        for name, b in module._buffers.items():
            if b is not None:
                self._check_set(layer.name, module, name, b)
        return out

    @staticmethod
    def _materialise_buffers(module: nn.Module) -> None:
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = _unset(b, b.dtype)

    @staticmethod
    def _check_set(layer: str, module: nn.Module, name: str, value: torch.Tensor) -> None:
        if value.numel() and value.is_floating_point() and bool(value.isnan().any()):
            raise FerryError(
                f"ferry: {type(module).__name__}.reset_parameters of module {layer!r} left {name!r} without values; "
                "pass weights=PATH (safetensors), or build it on the CPU"
            )

    def finish(self) -> None:
        """Give buffers their values: read them where the file has them, initialise those of modules without parameters.

        Raises:
            FerryError: a meta buffer nobody gives values to.
        """
        for prefix, module in self._model.named_modules():
            if self._weights is not None:
                self._read_buffers(prefix, module, self._weights)
            elif any(b is not None and b.is_meta for b in module._buffers.values()):
                self._reset(Layer(prefix, module, [], []), {})

    def _read_buffers(self, prefix: str, module: nn.Module, weights: Weights) -> None:
        for name, b in module._buffers.items():
            if b is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            if weights.shape(full) == tuple(b.shape):
                module._buffers[name] = weights.read(full).to(b.dtype)
            elif b.is_meta:
                raise FerryError(
                    f"weights: {weights.path} has no values of shape {tuple(b.shape)} for buffer {full!r}, which is on "
                    "the meta device; build the module's buffers on the CPU"
                )


def _unset(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(like.shape, dtype=dtype)
    return out.fill_(float("nan")) if dtype.is_floating_point else out


def bind(param: nn.Parameter, value: torch.Tensor) -> None:
    """`param.data = value`, also for a parameter that was on the meta device: the object stays the same."""
    if not param.is_meta:
        param.data = value
        return
    fresh = nn.Parameter(value, requires_grad=param.requires_grad)
    fresh.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, fresh)
