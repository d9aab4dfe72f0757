"""Where the model reads its parameters: a window around every module that does.

Before the first pass a parameter is thought to be read by the module that owns it. That pass is traced; from the next step
on windows are where parameters are really read, and units are in the order of their first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from memferry_ascend.layers import Layer, Param
from memferry_ascend.saved import SavedHooks
from memferry_ascend.shadow import Resident
from memferry_ascend.swapped import Swaps
from memferry_ascend.tracing import ReadTracer
from memferry_ascend.windows import Window


class Reads:
    """All windows of one engine. `swaps`: how moving units move (`Backend.swaps`).

    Attributes:
        order: units by their first read.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], residents: Sequence[Resident], *, swaps: bool
    ) -> None:
        self.order = list(residents)
        self._model = model
        self._moves: SavedHooks | Swaps = Swaps() if swaps else SavedHooks()
        self._params = {id(p.param): p for r in residents for p in r.unit.params}
        self._resident_of = {id(p.param): r for r in residents for p in r.unit.params}
        self._by_module = {id(layer.module): (layer.module, list(layer.reads)) for layer in layers}
        self._unread: list[Resident] = []
        """Units that no window waits for."""
        self._tracer: ReadTracer | None = None
        self._traced = False
        self._learned: ReadTracer | None = None
        self._windows: list[Window] = []

    def install(self) -> None:
        """Put the windows where parameters are thought to be read."""
        for window in self._windows:
            window.remove()
        self._windows = []
        for module, params in self._by_module.values():
            reads: dict[int, tuple[Resident, list[Param]]] = {}
            for p in params:
                r = self._resident_of[id(p.param)]
                reads.setdefault(r.order, (r, []))[1].append(p)
            window = Window(module, list(reads.values()), self._moves)
            window.install()
            self._windows.append(window)

    # -- passes --------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A forward pass begins."""
        for r in self._unread:
            r.wait()
        if not self._traced and self._tracer is None:
            self._tracer = ReadTracer(self._model, [p.param for p in self._params.values()])
            self._tracer.watch()
            self._tracer.on()
            self._tracer.enter(self._model)

    def abandon(self) -> None:
        """Ctrl-C ends a forward pass without running a hook: take away what it has left. Nothing to do otherwise."""
        self._moves.reset()
        for window in self._windows:
            window.reset()
        if self._tracer is not None:
            self._tracer.off()
            self._tracer.unwatch()
            self._tracer = None

    def end(self, output: Any) -> None:
        """It has ended. `output` is None where it raised: torch walks over its hooks right now, so the next is traced."""
        tracer = self._tracer
        if tracer is None:
            return
        tracer.off()
        if output is not None:
            tracer.unwatch()
            self._tracer = None
            self._traced = True
            # Windows may not change under a graph: checkpoint's second forward must save what its first one did.
            self._learned = tracer

    def end_backward(self) -> None:
        """The backward pass has ended."""
        self._moves.end_backward()

    # -- between passes ------------------------------------------------------------------------------------------------
    def learn(self) -> ReadTracer | None:
        """After a step: move windows to where parameters are really read, and order units by their first read. Returns
        what was traced, None where there is nothing new."""
        tracer, self._learned = self._learned, None
        if tracer is None:
            return None
        by_module: dict[int, tuple[nn.Module, list[Param]]] = {}
        for key, modules in tracer.reads.items():
            for module in modules:
                by_module.setdefault(id(module), (module, []))[1].append(self._params[key])
        for module, params in self._by_module.values():
            if id(module) in tracer.called:  # its own forward may read them another time
                known = by_module.setdefault(id(module), (module, []))[1]
                known += [p for p in params if p not in known]
        self._by_module = by_module
        rank = {key: i for i, key in enumerate(tracer.order)}
        last = len(rank)
        self.order.sort(key=lambda r: (min(rank.get(id(p.param), last) for p in r.unit.params), r.unit.index))
        for position, r in enumerate(self.order):
            r.order = position
        self._unread = [r for r in self.order if any(id(p.param) not in rank for p in r.unit.params)]
        self.install()
        return tracer

    def wait(self, key: int) -> None:
        """The parameter with this id is about to be read outside a pass."""
        r = self._resident_of.get(key)
        if r is not None and r.pending:
            r.wait()

    def close(self) -> None:
        """Remove every window and let go of every unit."""
        for window in self._windows:
            window.close()
        self._moves.end_backward()
        self._moves.close()
        self._windows, self.order, self._unread = [], [], []
        self._by_module, self._resident_of, self._params = {}, {}, {}
