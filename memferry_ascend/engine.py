"""The engine: arms a model with a plan and conducts forward, backward and step. Nothing else.

One iteration, in the words of `shadow.py`:

    forward    a window's hook waits for its unit's pending update, binds moving units, prefetches the next
    backward   a gradient leaves for the arena as soon as its unit's last one was produced (`arrivals.py`)
    step       hyperparameters are copied, an event marks the compute stream, one job per unit goes to the worker,
               ordered by position in the forward pass; control returns at once
    worker     waits for download and event, updates the unit, starts its upload; the next forward meets it there
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memferry_ascend import (
    agreement,
    arming,
    assist,
    checkpoint,
    disarm,
    hostmath,
    limits,
    saving,
    sharded,
)
from memferry_ascend.arena import Arena, UnitMemory
from memferry_ascend.budget import sizing
from memferry_ascend.clipping import Clipper
from memferry_ascend.config import Config, host_threads
from memferry_ascend.deviceupdate import DeviceUpdate
from memferry_ascend.direct import DirectLayers
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.gradients import Gradients, GradState, UnitGrads
from memferry_ascend.guard import ReadGuard
from memferry_ascend.handover import hand_over
from memferry_ascend.hostupdate import is_native, refuse, snapshot
from memferry_ascend.integrity import Integrity, check_trainable
from memferry_ascend.layers import collect, distant, units
from memferry_ascend.memory_rows import memory_rows
from memferry_ascend.nativejobs import make_jobs
from memferry_ascend.optimizer import FerryOptimizer
from memferry_ascend.placement import exchanged, settle
from memferry_ascend.planner.plan import Plan
from memferry_ascend.planning import choose_plan
from memferry_ascend.reads import Reads
from memferry_ascend.recorder import Recorder
from memferry_ascend.runtime import Runtime
from memferry_ascend.shadow import Resident
from memferry_ascend.transfers import Transfers
from memferry_ascend.weights import Source, Weights
from memferry_ascend.windows import Hook

_armed: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


class Engine:
    """Made by `ferry`. `model` and `optimizer` are what the training loop uses.

    Attributes:
        model: the user's module, its parameters now on the device.
        optimizer: a torch optimizer over the same `param_groups`.
        plan: the decisions in force. profile: the measurements behind them, None when the rules decided.
        recorder: what ran when.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        config: Config,
        plan: Plan | None,
        sample_batch: Any,
        weights: Weights | None = None,
    ) -> None:
        refuse(optimizer)
        arming.refuse_model(model)
        if model in _armed:
            raise FerryError("ferry: this model is ferried already; close() its engine first")
        if config.device_memory is not None and sample_batch is None:
            raise ConfigError(
                "Config.device_memory needs a sample_batch: activations must be measured to be bounded"
            )
        self.model = model
        self.config = config
        self.runtime = runtime
        self._backend = backend = runtime.backend
        hostmath.set_threads(host_threads(runtime.local_world, config.threads), backend.node)
        layers = collect(model, config.precision, config.keep_fp32)
        self._params = [p for layer in layers for p in layer.params]
        self._dtypes = {p.index: p.param.dtype for p in self._params}
        self._grads_before = {p.index: p.param.grad for p in self._params}
        arming.assign_groups(self._params, optimizer)
        if not any(p.trainable for p in self._params):
            raise FerryError("ferry: expected at least one trainable parameter, all are frozen")
        source = Source(model, layers, weights)
        ranks = runtime.ranks
        if ranks is not None:
            agreement.meet(ranks, layers, model, optimizer, config, plan)
        self.profile, self.plan, base = choose_plan(
            plan, layers, model, optimizer, runtime, config, sample_batch
        )
        if ranks is not None:
            self.plan = exchanged(agreement.choose(ranks, plan, self.plan))
        self.plan = settle(self.plan, layers, backend, optimizer)
        by_name = {lp.name: lp for lp in self.plan.layers}
        self._units = units(layers, by_name, alone=distant(layers))
        exchange = sharded.device_need(self._units, ranks.local) if ranks is not None else 0
        self._sizing = sizing(
            self._units, config.device_bytes, accumulate=config.accumulate, base=base + exchange
        )
        native = is_native(optimizer)
        self.recorder = Recorder(backend)
        self._parallel: sharded.DataParallel | None = None
        limits.check_device(self._units, backend, self._sizing.slots, config.accumulate, exchange)
        if ranks is None:
            need = limits.arena_bytes(self._units, native, config.accumulate)
            limits.check_host(need | limits.state_bytes(self._units, optimizer), config.host_bytes)
            limits.check_locked(need, backend.locked_memory_limit())
            self._arena = Arena(backend, config.host_bytes)
            self._jobs = make_jobs(backend, len(self._units), self.recorder, native)
        else:
            need = sharded.need(self._units, ranks, optimizer, config)
            limits.check_locked(need, backend.locked_memory_limit())
            self._arena = Arena(backend, config.host_bytes, sharded.token(ranks))
            self._parallel = sharded.DataParallel(ranks, self._units, backend, self.recorder)
            self._jobs = self._parallel.jobs
        self._closed = self._tidied = False
        self._memories: list[UnitMemory] = []
        self._originals: dict[int, torch.Tensor] = {}
        self._residents: list[Resident] = []
        self._handles: list[RemovableHandle] = []
        self.optimizer: FerryOptimizer = None  # type: ignore[assignment]
        self._saving: saving.Save | None = None
        self._transfers: Transfers | None = None
        try:
            self._transfers = assist.for_engine(runtime, config)
            lending = self._transfers.lending if self._transfers is not None else None
            if lending is not None and lending.links:
                self._arena.segments = lending.segments
            self._arm(layers, optimizer, native, source)
        except BaseException:
            if self._parallel is not None:
                self._parallel.quiesce()
            disarm.undo(self)
            raise
        self._originals, self._grads_before = {}, {}
        _armed[model] = self

    # -- arming --------------------------------------------------------------------------------------------------------
    def _arm(self, layers: list[Any], optimizer: torch.optim.Optimizer, native: bool, source: Source) -> None:
        backend, config = self._backend, self.config
        parallel, memories = self._parallel, self._memories
        if parallel is None:
            self._ring = arming.make_ring(self._units, backend, self._sizing.slots)
            arming.fill(self._units, self._arena, backend, native, source, memories, self._originals)
            arming.move_buffers(self.model, backend.device)
            self._residents = [
                Resident(u, m, backend, self._jobs, self._ring)
                for u, m in zip(self._units, memories, strict=True)
            ]
            self._updates = arming.make_updates(memories, optimizer)
        else:
            self._ring = parallel.make_ring(self._units, self._sizing.slots)
            arming.move_buffers(self.model, backend.device)
            self._residents, self._updates = parallel.arm(
                self._units, self._arena, native, self._ring, optimizer
            )
        if self._ring is not None:
            self._ring.arrange([r for r in self._residents if r.ring is not None])
        for r in self._residents:
            r.upload()
            r.bind_rest()
        backend.synchronize()
        early = config.update == "backward" and config.max_grad_norm is None
        make = Gradients if parallel is None else parallel.make_gradients
        self._gradients = make(
            self._residents,
            self._arena,
            backend,
            self._jobs,
            accumulate=config.accumulate,
            publish=config.update == "step",
            window=self._sizing.window,
            final=self._update_now if early else None,
        )
        for ug in self._gradients.units:
            update = self._updates[ug.resident.unit.index]
            if isinstance(update, DeviceUpdate):
                assert ug.kept is not None
                update.kept = ug.kept
        self._gradients.backward_ended = self._backward_ended
        self._clipper = Clipper(self._gradients, self._arena, backend, self._jobs, config.max_grad_norm)
        self._direct = DirectLayers(layers, self._gradients, backend, tables=parallel is None)
        self._direct.install()
        self._handles += self._gradients.install()
        self._integrity = Integrity(
            [(p, r.rest[p.index]) for r in self._residents for p in r.unit.params], self._handles
        )
        self._reads = Reads(self.model, layers, self._residents, swaps=backend.swaps)
        self._reads.install()
        self._handles.append(self.model.register_forward_pre_hook(Hook(self._before_forward), prepend=True))
        self._handles.append(self.model.register_forward_hook(Hook(self._after_forward), always_call=True))
        # Two, used in turn: jobs of the step before may still wait for the other.
        self._step_events = (backend.event(), backend.event())
        self._step_tickets: list[list[tuple[int, int]]] = [[], []]
        self._steps = 0
        self._updating: list[UnitGrads] = []
        self._guard = ReadGuard(self._reads.wait, self._is_pending)
        self.optimizer = FerryOptimizer(optimizer, self)
        self._handles += checkpoint.install_state_dict_hooks(self)
        for p in self._params:  # gradients from before ferry count for the first step
            grad = self._grads_before[p.index]
            if grad is not None and p.trainable:
                p.param.grad = grad.to(backend.device, p.dtype)
        self.recorder.attach(self, layers)

    # -- forward -------------------------------------------------------------------------------------------------------
    def _before_forward(self, *_: Any) -> None:
        self._check_open()
        self._jobs.check()
        self._guard.off()
        self._reads.abandon()
        self._backward_ended()
        self._integrity.check()
        if torch.is_autocast_enabled(self._backend.device.type) and torch.is_autocast_cache_enabled():
            raise FerryError(
                "autocast with its weight cache would keep copies of parameters; ferry trains in bf16 already: leave "
                "autocast out, or pass cache_enabled=False"
            )
        if torch.is_grad_enabled():
            self._gradients.finish("forward")
        if self._parallel is not None:
            self._parallel.loads.forward(torch.is_grad_enabled())
        self._reads.begin()

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._parallel is not None:
            self._parallel.loads.forward_ended()
        if self._is_pending():  # this pass did not need every unit: reads must still wait
            self._guard.on()
        self._reads.end(output)

    def _is_pending(self) -> bool:
        return any(r.pending for r in self._residents)

    # -- backward ------------------------------------------------------------------------------------------------------
    def _backward_ended(self) -> None:
        """Also called where one must have: `autograd.grad` for an input takes no gradient that would tell us."""
        self._reads.end_backward()
        if self._ring is not None:
            self._ring.end_backward()

    def _update_now(self, ug: UnitGrads) -> None:
        """update="backward": every gradient of this unit is final."""
        hypers = snapshot(self.optimizer.param_groups)
        hand_over(self, ug, list(ug.states), hypers, self._jobs.new_scale(), None)
        self._updating.append(ug)

    # -- step ----------------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        self._check_open()
        self._jobs.check()
        check_trainable(self._params)
        self._guard.off()
        self._backward_ended()
        self._integrity.check()
        self._gradients.finish("step")
        early, self._updating = self._updating, []
        done = {id(ug) for ug in early}
        parts = [(ug, part) for ug, part in self._gradients.collect() if id(ug) not in done]
        if not parts and not early:
            raise FerryError(
                "step(): expected at least one parameter with a gradient, found none; call backward first"
            )
        if self.config.update == "backward":
            self._check_counts(parts)
        turn = self._steps % 2
        self._steps += 1
        for unit, ticket in self._step_tickets[turn]:
            self._jobs.wait_ticket(unit, ticket)
        self._backend.compute.record(self._step_events[turn])
        hypers = snapshot(self.optimizer.param_groups)
        scale = self._clipper.begin(parts, self._step_events[turn])
        for ug, part in parts:
            hand_over(self, ug, part, hypers, scale, self._step_events[turn])
        if self._parallel is not None:
            changed = [ug.resident for ug in early] + [ug.resident for ug, _ in parts]
            self._parallel.spread(changed, self._step_events[turn])
        # Behind the step's event, before the next forward needs the memory: its first unit waits for these downloads anyway.
        self._gradients.release_device()
        self._step_tickets[turn] = [
            (ug.resident.unit.index, self._jobs.ticket(ug.resident.unit.index)) for ug, _ in parts
        ]
        self._jobs.next_epoch()
        stepped = [s for ug in early for s in ug.states] + [s for _, part in parts for s in part]
        torch.autograd.graph.increment_version([s.p.param for s in stepped])
        self._gradients.consumed(stepped)
        self._integrity.note()
        if self._ring is not None:
            self._ring.expect_forward()
        learned = self._reads.learn()
        if learned is not None:
            if self._ring is not None:
                self._ring.arrange([r for r in self._reads.order if r.ring is not None])
            self._direct.learned(learned)
        if self._parallel is not None:
            self._parallel.next_pass(self._ring)
        self._guard.on()

    def _check_counts(self, parts: list[tuple[UnitGrads, list[GradState]]]) -> None:
        for _, part in parts:
            for s in part:
                if s.arrivals != self.config.accumulate:
                    raise FerryError(
                        f"step() after {s.arrivals} backwards for {s.p.name!r}, but accumulate="
                        f'{self.config.accumulate} was declared with update="backward"; nothing of it was updated'
                    )

    def _zero_grad(self, set_to_none: bool) -> None:
        self._check_open()
        self._gradients.discard()
        watching = self._guard.active
        self._guard.off()  # it would look at every `p.grad` below
        self._gradients.zero(set_to_none, self._updating)
        if watching:
            self._guard.on()

    # -- what users call -----------------------------------------------------------------------------------------------
    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step (fp32, before clipping); None without `max_grad_norm`. Waits for it."""
        return self._clipper.last_norm()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients that are there now to a global norm of `max_norm`, as the coming `step()` applies them:
        one fp32 norm per parameter, combined in registration order. Returns the norm before clipping. `p.grad` itself
        is not scaled. Only with update="step"; with update="backward" set Config.max_grad_norm."""
        self._check_open()
        return self._clipper.clip_now(max_norm)

    def synchronize(self) -> None:
        """Block until every update and upload in flight is done; raises what went wrong."""
        if self._parallel is not None:
            self._parallel.loads.drain()
        self._jobs.drain()
        for r in self._residents:
            r.wait()
        self._backend.synchronize()

    @contextlib.contextmanager
    def edit(self) -> Iterator[nn.Module]:
        """Change parameters in place: inside, they are the arena's; on leaving, edited masters are exactly what was
        written and device copies are refreshed. Untouched parameters keep the low half of their masters."""
        self._check_open()
        if self._parallel is not None:
            with self._parallel.edit(self) as model:
                yield model
            return
        self.settle()
        before = [r.snapshot() for r in self._residents]
        for r in self._residents:
            r.bind_alias()
        try:
            yield self.model
        finally:
            self._backend.compute.synchronize()
            checkpoint.reconcile(self, before)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block keep their gradients on this rank, as fp32 sums in host memory (4 bytes a parameter
        on every rank), and the next backward outside it, or the step, exchanges all at once. One rank: no effect.
        Only with update="step"."""
        self._check_open()
        with self._gradients.no_sync():
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The arena is about to be written from the user's thread."""
        if self._parallel is None:
            self.settle()
            yield
        else:
            with self._parallel.writing(self.synchronize):
                yield

    def state_dict(self) -> dict[str, Any]:
        """Masters (fp32), buffers, optimizer state and counters under the original names; plain tensors and numbers,
        copies of their own. Loads into another plan, budget, precision or number of ranks. With several ranks all of
        them call, and each gets everything; `distributed_checkpoint` writes without that."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Nothing is changed if it does not fit.

        Raises:
            FerryError: names or shapes differ, or it is no engine state.
        """
        checkpoint.load_state_dict(self, state)

    def save_async(self, path: str | os.PathLike[str], **options: Any) -> saving.Save:
        """Write `state_dict()` as it is now to the file `path` while training goes on (`saving.py` says how, and what
        memory it takes). `result()` of what is returned waits for the file; close() does too. A second save waits for
        the first. Options: `key` puts the state under that key, `extra` is a mapping written beside it, `then` is
        called on the writer's thread when the file is complete, `staging` bounds the memory (bytes).

        Raises:
            SaveError: the folder cannot be written to, or the save before this one failed.
        """
        self._check_open()
        return saving.start(self, path, **options)

    def settle(self) -> None:
        """`synchronize`, and let a save in flight copy what it still needs: the arena may be written to then."""
        self.synchronize()
        if self._saving is not None:
            self._saving.settle()

    def memory_report(self) -> list[tuple[str, str, int]]:
        """Where every byte lives: (place, what, bytes)."""
        rows = memory_rows(self._arena, self._residents, self._gradients, self._ring)
        if self._parallel is not None:
            rows.append(("device", "exchange buffers", self._parallel.device_bytes))
        return rows

    def close(self) -> None:
        """Return the model to plain CPU parameters in their original dtype and give all memory back. Idempotent; never
        hides what went wrong, but tidies up first."""
        if self._tidied:
            return
        self._closed = True
        self._guard.off()
        self._reads.abandon()
        if self._parallel is not None:
            self._parallel.quiesce()
        try:
            error = disarm.close(self)
        finally:
            _armed.pop(self.model, None)
        self._parallel = None
        self._tidied = True
        if error is not None:
            raise FerryError(f"the engine is closed; before that something had failed: {error}") from error

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise FerryError("the engine is closed")

    # -- for the optimizer ---------------------------------------------------------------------------------------------
    def _optimizer_state(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self.synchronize()
        for r in self._residents:
            for p in r.unit.params:
                if p.trainable:
                    state = self._updates[r.unit.index].state_of(p)
                    if state:
                        yield (
                            id(p.param),
                            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()},
                        )

    def _load_optimizer_state(self, by_id: dict[int, dict[str, Any]]) -> None:
        self.settle()
        mine = [
            (self._updates[r.unit.index], p) for r in self._residents for p in r.unit.params if p.trainable
        ]
        for update, p in mine:  # all are looked at before the first is changed
            update.check_state(p, by_id.get(id(p.param), {}))
        for update, p in mine:
            update.load_state(p, by_id.get(id(p.param), {}))
