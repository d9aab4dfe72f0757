"""Which module reads which parameter: found by watching one forward pass.

A layer's own forward is not enough: `MultiheadAttention` reads its `out_proj`'s parameters without calling it, and a
tied head is often `F.linear(h, wte.weight)` in the root's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_LOOKS = """size dim numel nelement stride element_size is_floating_point is_complex is_contiguous is_pinned
get_device storage_offset type ndimension __len__ __hash__ requires_grad_ register_hook is_shared is_signed
untyped_storage data_ptr __repr__ has_names is_inference"""
_LOOKS_NOT_READS = frozenset(_LOOKS.split())
_READING_GETTERS = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])


def parameters_in(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors that are nn.Parameters among call arguments, also inside lists and tuples."""
    for a in args:
        if isinstance(a, nn.Parameter):
            yield a
        elif isinstance(a, list | tuple):
            yield from parameters_in(a)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings and objects with attributes (outputs of dataclass type)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def reads_values(func: Callable[..., Any]) -> bool:
    """False for calls that only look at shape, dtype, device and the like."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") in _READING_GETTERS
    return name not in _LOOKS_NOT_READS


class SwitchableMode(TorchFunctionMode):
    """A mode that is switched on and off at points that are not nested like `with` blocks."""

    active = False

    def on(self) -> None:
        """Begin to watch the calling thread."""
        if not self.active:
            self.active = True
            self.__enter__()

    def off(self) -> None:
        """Stop, wherever in the thread's stack of modes we are: the user may have entered modes after us."""
        if not self.active:
            return
        self.active = False
        above: list[TorchFunctionMode] = []
        while torch._C._len_torch_function_stack() > 0:
            mode = torch._C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)


class ReadTracer(SwitchableMode):
    """Records, in order, which module was innermost when a parameter was read.

    `reads[id(parameter)]` lists modules in the order of their first read of it; `order` lists parameter ids in the
    order of first reads over the whole pass.
    """

    def __init__(self, model: nn.Module, wanted: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._model = model
        self._wanted = {id(p) for p in wanted}
        self._stack: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self.reads: dict[int, list[nn.Module]] = {}
        self.order: list[int] = []
        self.called: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stack and reads_values(func):
            for p in parameters_in((*args, *kwargs.values())):
                if id(p) in self._wanted:
                    self._record(id(p))
        return func(*args, **kwargs)

    def _record(self, key: int) -> None:
        modules = self.reads.setdefault(key, [])
        if not modules:
            self.order.append(key)
        innermost = self._stack[-1]
        if all(m is not innermost for m in modules):
            modules.append(innermost)

    def watch(self) -> None:
        """Install the hooks that follow which module is running. They must be outside every other hook of ours."""

        def pre(module: nn.Module, _args: Any) -> None:
            self._stack.append(module)
            self.called.add(id(module))

        def post(module: nn.Module, _args: Any, _out: Any) -> None:
            while self._stack and self._stack.pop() is not module:
                pass

        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(pre, prepend=True))
            self._handles.append(module.register_forward_hook(post, always_call=True))

    def enter(self, module: nn.Module) -> None:
        """`module` is running already, its hooks came too late."""
        self._stack.append(module)
        self.called.add(id(module))

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
