"""Gradient placement "direct", the paper's GO-MemFerry (section IV-D): kernels write weight gradients to host memory.

A layer planned so runs one of our autograd functions instead of its own forward. It computes what the layer does, in
the operations autograd uses, operand for operand, so forward, input gradient and weight gradient have the same bits;
only the last product is told to write to the device's alias of the arena. Autograd gets None for the weight, so no
device gradient exists at any time.

    Linear, Conv1D       the weight's matrix product and the bias's sum write the alias
    Embedding            the rows that occur are summed in a tensor as long as the batch, and scattered to the alias,
                         which the host has cleared behind the update that consumed the rows before
    LayerNorm, RMSNorm   their kernel makes input and weight gradients at once; a copy kernel moves the latter (a few KB)

A staged Embedding does the same while its batch is short against its rows, so that only touched rows cross the link: a
copy engine would need them gathered and counted, and the host to scatter them before anybody may look at `p.grad`.

Where one pass produces a gradient in several pieces, or a user's hook looks at it, the function gives autograd a
device gradient after all, which is then staged: never is anything read back over the link. What comes before the
first step is staged too, because it shows who else reads the parameter.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from memferry_ascend.backends.base import DIRECT_KINDS, Backend
from memferry_ascend.gradients import Gradients
from memferry_ascend.gradstate import GradState, UnitGrads
from memferry_ascend.layers import Layer
from memferry_ascend.planner.plan import Grad
from memferry_ascend.tracing import ReadTracer

MOST_ROWS = 0.5
"""Tokens per row of a staged table up to which its touched rows are written alone: each token costs a row on the link,
and the host clears the whole table after its update."""

Compute = Callable[[torch.Tensor | None], Any]
"""Computes a gradient into the tensor it is given, or into a new one that it returns."""


def why_not(module: nn.Module) -> str | None:
    """None if the module's weight gradient can be written directly, else the reason, for a person."""
    kind = type(module).__name__
    if kind not in DIRECT_KINDS:
        return f"no kernel of {kind} writes its weight gradient to host memory"
    if kind == "Conv1D":
        if not _is_transposed_linear(module):
            return "not a Conv1D as transformers has it: weight (in, out), bias (out), nf = out"
    elif type(module) is not getattr(nn, kind):
        return f"its class is called {kind}, but is not torch.nn.{kind}: its forward may be another"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module._parameters.get("weight") is None:
        return "its weight is not a parameter of its own"
    if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
        return "an embedding with sparse gradients or max_norm"
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return "an embedding with scale_grad_by_freq"
    return None


def _is_transposed_linear(module: nn.Module) -> bool:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or bias is None or weight.dim() != 2:
        return False
    return bias.shape == (weight.shape[1],) and getattr(module, "nf", None) == weight.shape[1]


class _Token:
    """One forward call whose backward may still come; forgotten when its graph goes away."""

    __slots__ = ("sink",)

    def __init__(self, sink: Sink) -> None:
        self.sink: Sink | None = sink
        sink.open += 1

    def finish(self) -> None:
        if self.sink is not None:
            self.sink.open -= 1
            self.sink = None

    __del__ = finish


class Sink:
    """Where one parameter's gradient goes."""

    def __init__(self, gradients: Gradients, ug: UnitGrads, state: GradState) -> None:
        self._gradients = gradients
        self._ug = ug
        self.state = state
        self.open = 0
        """Forward calls whose backward may still come."""

    def begin(self) -> tuple[_Token, Any]:
        """A forward call uses the parameter: what its backward needs for `write`."""
        return _Token(self), torch.autograd.graph.get_gradient_edge(self.state.p.param).node

    def write(self, begun: tuple[_Token, Any], compute: Compute) -> torch.Tensor | None:
        """In the backward: have the gradient computed into the arena and return None, or return it."""
        token, node = begun
        token.finish()
        try:
            # Not with autograd.grad() or backward(inputs=...) for other tensors.
            if not torch._C._will_engine_execute_node(node):
                return None
        except RuntimeError:  # autograd.grad() for this very parameter
            return compute(None)
        target = self._gradients.direct_target(self._ug, self.state) if self.open == 0 else None
        if target is None:
            self.state.partial = True
            return compute(None)
        compute(target)
        self._gradients.direct_written(self._ug, self.state)
        return None


class _Uses:
    """The sinks of one layer for one forward call."""

    def __init__(self, weight: Sink | None, bias: Sink | None) -> None:
        self._sinks = (weight, bias)
        self._begun = tuple(sink.begin() if sink is not None else None for sink in self._sinks)

    def write(self, which: int, needed: bool, compute: Compute) -> torch.Tensor | None:
        if not needed:
            return None
        sink, begun = self._sinks[which], self._begun[which]
        if sink is None or begun is None:
            return compute(None)
        return sink.write(begun, compute)

    def begin_rows(self) -> bool:
        """The weight's kernel is about to write touched rows only: zeros shall be left there from now on. True if what
        it writes to is zero already."""
        assert self._sinks[0] is not None
        state = self._sinks[0].state
        state.rows = True
        return state.clean


def _product(a: torch.Tensor, b: torch.Tensor) -> Compute:
    def compute(out: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)

    return compute


def _row_sum(g: torch.Tensor) -> Compute:
    def compute(out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            return g.sum(0, keepdim=True).view(-1)
        return torch.sum(g, 0, keepdim=True, out=out.view(1, -1))

    return compute


class _Linear(torch.autograd.Function):
    """x (..., in), 2 or 3 dimensions, contiguous; weight (out, in), or (in, out) where `transposed`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        uses: _Uses,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.uses, ctx.transposed = uses, transposed
        ctx.save_for_backward(x, weight)
        flat = x.view(-1, x.shape[-1])
        if transposed:
            assert bias is not None
            y = torch.addmm(bias, flat, weight)
        else:
            y = F.linear(flat, weight, bias)
        if x.dim() == 2:
            return y
        # A view made here could not be changed in place by what follows.
        return torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], y.shape[-1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g = grad.reshape(-1, grad.shape[-1]) if grad.dim() > 2 else grad
        flat = x.view(-1, x.shape[-1])
        matrix = weight if ctx.transposed else weight.t()  # the second operand of the forward's product
        dx = None
        if needs_x:
            # As torch does: a gradient comes in its operand's memory order.
            dx = matrix.mm(g.t()).t() if _column_major(flat) else g.mm(matrix.t())
            dx = dx.view(x.shape) if x.dim() > 2 else dx
        if _column_major(matrix) == ctx.transposed:
            # A single row or column has both orders at once: let autograd's copy decide the layout.
            dw = ctx.uses.write(0, needs_weight, _copied(_second_grad(flat, g, matrix, ctx.transposed)))
        elif ctx.transposed:
            dw = ctx.uses.write(0, needs_weight, _product(flat.t(), g))
        else:
            dw = ctx.uses.write(0, needs_weight, _product(g.t(), flat))
        db = ctx.uses.write(1, needs_bias, _row_sum(g))
        return dx, dw, db, None, None


def _column_major(t: torch.Tensor) -> bool:
    return t.stride(0) == 1 and t.stride(1) == t.size(0)


def _second_grad(
    flat: torch.Tensor, g: torch.Tensor, matrix: torch.Tensor, transposed: bool
) -> Callable[[], torch.Tensor]:
    def compute() -> torch.Tensor:
        d = g.t().mm(flat).t() if _column_major(matrix) else flat.t().mm(g)
        return d if transposed else d.t()

    return compute


def _copied(make: Callable[[], torch.Tensor]) -> Compute:
    def compute(out: torch.Tensor | None) -> torch.Tensor:
        return make() if out is None else out.copy_(make())

    return compute


class _Embedding(torch.autograd.Function):
    """indices of any shape; weight (rows, width)."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding: int | None, uses: _Uses
    ) -> torch.Tensor:
        ctx.uses, ctx.rows, ctx.padding = uses, weight.shape[0], padding
        ctx.save_for_backward(indices)
        y = F.embedding(indices.reshape(-1), weight, padding)
        return torch.ops.aten._unsafe_view.default(y, [*indices.shape, weight.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding

        def compute(out: torch.Tensor | None) -> torch.Tensor:
            if out is None:
                return torch.ops.aten.embedding_dense_backward(grad, indices, ctx.rows, padding, False)
            return _scatter_rows(grad, indices, padding, out, clean=ctx.uses.begin_rows())

        return ctx.uses.write(0, ctx.needs_input_grad[0], compute), None, None, None


def _scatter_rows(
    grad: torch.Tensor, indices: torch.Tensor, padding: int, out: torch.Tensor, *, clean: bool = False
) -> torch.Tensor:
    """The gradient of `F.embedding` into `out`, without a device tensor of its size. `clean`: `out` is zero, so that
    only the rows that occur move.

    Rows that occur are numbered in their order (a sort, so nothing waits for the host) and summed by the same kernel
    under these numbers: each row's terms come in the same sequence, so the sums have the same bits.
    """
    if not clean:
        out.zero_()
    flat = indices.reshape(-1)
    if flat.numel() == 0:
        return out
    ordered, order = torch.sort(flat, stable=True)
    new = torch.ones_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    number = torch.empty_like(ordered)
    number[order] = new.cumsum(0).to(number.dtype) - 1
    sums = torch.ops.aten.embedding_dense_backward(grad, number.view(indices.shape), flat.numel(), -1, False)
    # A row that occurs several times is written several times, with the same value. Not by index_copy_: torch_npu has a
    # loop over the rows there, which waits for the host in each, and rewrites the whole table.
    out.index_put_((flat.to(torch.int64),), sums.index_select(0, number))
    if padding >= 0:
        out[padding].zero_()
    return out


class _Tap(torch.autograd.Function):
    """The parameter itself on the way in; on the way back its gradient, which is small, is copied to the arena."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, uses: _Uses, which: int) -> torch.Tensor:
        ctx.uses, ctx.which = uses, which
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.uses.write(ctx.which, ctx.needs_input_grad[0], _copied(lambda: grad)), None, None


def _own_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


class DirectForward:
    """Stands in for `forward` of one module. A copy or pickle of the model gets its class's own forward back."""

    def __init__(
        self, module: nn.Module, weight: Sink | None, bias: Sink | None, *, sparse: bool = False
    ) -> None:
        self._module = module
        self._sparse = sparse  # a staged table: only batches that touch few rows are better off here
        self._own = module.forward
        self._sinks = (weight, bias)
        self._run = {
            "Linear": self._linear,
            "Conv1D": self._linear,
            "Embedding": self._embedding,
            "LayerNorm": self._norm,
            "RMSNorm": self._norm,
        }[type(module).__name__]
        self.enabled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self.enabled
            and len(args) == 1
            and not kwargs
            and torch.is_grad_enabled()
            and type(args[0]) is torch.Tensor
            and args[0].device == self._module._parameters["weight"].device  # type: ignore[union-attr]
            and not torch.is_autocast_enabled(args[0].device.type)
        ):
            return self._run(args[0])
        return self._own(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _own_forward, (self._module,)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        # What is not one plain matrix product for torch has another order of operations.
        weight, bias = self._module._parameters["weight"], self._module._parameters.get("bias")
        if x.dim() not in (2, 3) or not x.is_contiguous() or x.dtype != weight.dtype or not x.numel():  # type: ignore[union-attr]
            return self._own(x)
        transposed = type(self._module).__name__ == "Conv1D"
        return _Linear.apply(x, weight, bias, _Uses(*self._sinks), transposed)

    def _embedding(self, indices: torch.Tensor) -> torch.Tensor:
        module: Any = self._module
        if self._sparse and indices.numel() > module.num_embeddings * MOST_ROWS:
            return self._own(indices)
        weight = module._parameters["weight"]
        return _Embedding.apply(weight, indices, module.padding_idx, _Uses(*self._sinks))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        module: Any = self._module
        uses = _Uses(*self._sinks)
        weight, bias = (
            p if p is None or sink is None else _Tap.apply(p, uses, which)
            for which, (p, sink) in enumerate(
                zip((module._parameters["weight"], module._parameters.get("bias")), self._sinks, strict=True)
            )
        )
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
        return F.rms_norm(x, module.normalized_shape, weight, module.eps)


class DirectLayers:
    """All layers of an engine whose gradients kernels write to the arena."""

    def __init__(
        self, layers: list[Layer], gradients: Gradients, backend: Backend, *, tables: bool = True
    ) -> None:
        self._forwards: list[tuple[nn.Module, DirectForward, list[Sink]]] = []
        units = {id(s): ug for ug in gradients.units for s in ug.states}
        planned = {
            layer.name: ug.resident.unit.plan.grad
            for ug in gradients.units
            for layer in ug.resident.unit.layers
            if not ug.updates_on_device
        }
        kinds = backend.capabilities().direct_kinds
        for layer in layers:
            grad = planned.get(layer.name, Grad.KEEP)
            table = tables and grad is Grad.STAGE and isinstance(layer.module, nn.Embedding)
            table = table and not kinds.isdisjoint(("Embedding", "*"))
            if not (grad is Grad.DIRECT or table) or why_not(layer.module) is not None:
                continue
            sinks: dict[str, Sink] = {}
            for p in layer.params:
                state = gradients.by_param.get(p.index)
                if state is not None and not p.aliases:
                    sinks[p.name.rpartition(".")[2]] = Sink(gradients, units[id(state)], state)
            if sinks:
                forward = DirectForward(layer.module, sinks.get("weight"), sinks.get("bias"), sparse=table)
                self._forwards.append((layer.module, forward, list(sinks.values())))

    def install(self) -> None:
        """Replace the forwards. Before `Gradients.install`, which hooks parameters by what is direct."""
        for module, forward, sinks in self._forwards:
            for sink in sinks:
                sink.state.direct = True
            module.forward = forward

    def learned(self, tracer: ReadTracer) -> None:
        """A forward pass has shown who reads what: begin, except where another module reads the parameter too. Not
        between a forward and its backward: a checkpoint that recomputes must find what it saved."""
        for module, forward, sinks in self._forwards:
            for sink in sinks:
                readers = tracer.reads.get(id(sink.state.p.param), [])
                if any(reader is not module for reader in readers):
                    sink.state.direct = False
            forward.enabled = any(sink.state.direct for sink in sinks)

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module, forward, _ in self._forwards:
            forward.enabled = False
            if module.__dict__.get("forward") is forward:
                del module.forward
        self._forwards.clear()
