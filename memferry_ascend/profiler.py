"""The profiler: a model's layers, the link and the host, measured on this machine with the user's sample batch.

What a pass tells, with every layer's parameters in device memory and then in host memory, is in `trial.py` and
`marks.py`; here the passes are arranged, checked and turned into a `Profile`:

    order          the modules' first calls; a module that is never called stands behind its neighbour
    t_fp, t_bp     medians over passes with marks, less what the marks themselves cost (passes without them tell)
    t_fp_dha, ..   the same with parameters in host memory; inf where the result differs from the one on the device,
                   where the backend says so, and where a parameter is also read outside its layer (not measurable)
    t_trans        latency + bytes / bandwidth of the link
    t_update       the optimizer's own host update, from its rate and its overhead
    t_update_device   the same update as kernels on the device (`deviceupdate.py`), likewise
    t_bp_grad_direct   estimated: t_bp + bytes / bandwidth to the host; inf where nothing is written directly
    t_host_fp, ..  the launching threads' part of t_fp and t_bp, and `launches`: see `launchcosts.py`
    base_bytes     peak of a pass less the parameters; 0 on the CPU backend, which does not count activations
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn

from memferry_ascend import arming, launchcosts, placement, profile_cache, sizes
from memferry_ascend.averages import Averages
from memferry_ascend.backends.base import Backend
from memferry_ascend.config import Config, host_threads
from memferry_ascend.errors import FerryError
from memferry_ascend.hostreads import check_host_reads
from memferry_ascend.hostupdate import is_native
from memferry_ascend.layers import Layer, collect
from memferry_ascend.linkprobe import LinkFound, measure_link
from memferry_ascend.marks import Marks, Spent, ancestors, attribute
from memferry_ascend.outline import outline, shared_owners
from memferry_ascend.planner.profile import LayerProfile, Profile
from memferry_ascend.runtime import Runtime
from memferry_ascend.tracing import ReadTracer
from memferry_ascend.trial import Trial
from memferry_ascend.updateprobe import HostUpdates, Rates, device_update_rates

PASSES, DHA_PASSES, HOST_PASSES = 5, 3, 3
MORE_PASSES, QUICK = 15, 1.0
"""While a kind of pass has taken less than QUICK seconds it goes on up to MORE_PASSES: a busy host is noisy."""
SECONDS = 8.0
"""No further pass begins after so long; at least one of each kind always runs."""


@dataclass
class Measured:
    """A profile and what the measurement has to say that is no number of the planner's."""

    profile: Profile
    notes: list[str] = field(default_factory=list)
    cached: bool = False


def profile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sample_batch: Any,
    runtime: Runtime,
    config: Config | None = None,
    *,
    refresh: bool = False,
) -> Measured:
    """Profile a model that is not ferried, on the CPU as `ferry` wants it; everything is left as it was.

    refresh: measure even if the cache has it.

    Raises:
        FerryError: the model or the batch does not fit; see `collect` and `Trial`.
    """
    from memferry_ascend import hostmath

    config = config or Config()
    layers = collect(model, config.precision, config.keep_fp32)
    arming.assign_groups([p for layer in layers for p in layer.params], optimizer)
    hostmath.set_threads(host_threads(runtime.local_world, config.threads), runtime.backend.node)
    return measure(model, layers, optimizer, runtime, config, sample_batch, refresh=refresh)


def measure(
    model: nn.Module,
    layers: Sequence[Layer],
    optimizer: torch.optim.Optimizer,
    runtime: Runtime,
    config: Config,
    sample_batch: Any,
    *,
    refresh: bool = False,
) -> Measured:
    """The profile of `model`, from the cache or measured now. Layers are in forward order."""
    parts = depends_on(model, layers, optimizer, runtime, config, sample_batch)
    if not refresh:
        found = profile_cache.load(parts)
        if found is not None and {x.name for x in found[0].layers} == {layer.name for layer in layers}:
            return Measured(found[0], found[1], cached=True)
    measured = _Profiler(model, layers, optimizer, runtime, config, sample_batch).run()
    profile_cache.store(parts, measured.profile, measured.notes)
    return measured


def measure_base(
    model: nn.Module, layers: Sequence[Layer], backend: Backend, sample_batch: Any, budget: int
) -> int:
    """Device bytes of activations, buffers and workspace: the peak of a trial step, less its parameters. 0 on the CPU
    backend, which does not count them. budget: bytes that the trial keeps to as far as it can.

    Raises:
        FerryError: the model or the batch does not fit; see `Trial`.
    """
    stats = backend.memory_stats()
    with torch.enable_grad(), Trial(model, layers, backend, sample_batch, min(stats.free, budget)) as trial:
        trial.place()
        marks = Marks(layers, backend)
        trial.run(marks)  # libraries take their workspace in the first pass
        backend.reset_peak()
        trial.run(marks)
        found = backend.memory_stats().peak - stats.allocated - trial.held_bytes
    backend.reset_peak()
    return sizes.coarse(max(0, found))


def depends_on(
    model: nn.Module,
    layers: Sequence[Layer],
    optimizer: torch.optim.Optimizer,
    runtime: Runtime,
    config: Config,
    sample_batch: Any,
) -> dict[str, Any]:
    """What a profile's numbers depend on: the cache's key."""
    from memferry_ascend import __version__, hostmath

    return {
        "memferry": __version__,
        "torch": torch.__version__,
        "device": runtime.backend.identity(),
        "topology": runtime.topology_name,
        "host": [hostmath.simd_level(), hostmath.threads(), torch.get_num_threads()],
        "ranks": runtime.local_world,
        "precision": [config.precision, list(config.keep_fp32)],
        "device_memory": config.device_bytes,
        "optimizer": [type(optimizer).__qualname__, is_native(optimizer)],
        "batch": profile_cache.batch_shape(sample_batch),
        "model": profile_cache.model_shape(model, layers),
    }


class _Profiler:
    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        config: Config,
        batch: Any,
    ) -> None:
        self.model, self.layers, self.optimizer, self.batch = model, list(layers), optimizer, batch
        self.backend: Backend = runtime.backend
        self.runtime, self.config = runtime, config
        stats = self.backend.memory_stats()
        self.budget = min(stats.free, config.device_bytes or stats.free)
        self._allocated_before = stats.allocated
        self.inside = ancestors(self.layers)
        self.notes: list[str] = []
        self.unusable: dict[int, str] = {}
        self.read_elsewhere: set[int] = set()
        """Layers of which other modules read parameters too: their gradients are staged."""
        self._began = time.perf_counter()
        self._quiet = runtime.rank != 0

    def run(self) -> Measured:
        console = Console(stderr=True)
        bar = Progress(
            TextColumn("profiling: {task.description}"),
            BarColumn(),
            console=console,
            disable=self._quiet or not console.is_terminal,
            transient=True,
        )
        self._bar, self._task = bar, bar.add_task("first pass", total=5 + 2 * PASSES + DHA_PASSES)
        with bar, self._tied_down():
            with Trial(self.model, self.layers, self.backend, self.batch, self.budget) as trial:
                spent, by_dha = self._passes(trial)
            link, rates, on_device = self._machine()
            self._advance("launching")
            launches = launchcosts.measure(self.runtime, self.config, device_updates=on_device is not None)
        profile = self._profile(spent, by_dha, link, rates, on_device)
        profile = replace(profile, launches=launches)
        return Measured(placement.offered(profile, self.layers, self.backend, self.optimizer), self.notes)

    def _tied_down(self) -> AbstractContextManager[Any]:
        """Passes run with gradients even if ferry is called under no_grad."""
        return torch.enable_grad() if not torch.is_inference_mode_enabled() else nullcontext()

    def _advance(self, what: str) -> None:
        self._bar.update(self._task, advance=1, description=what)

    def _late(self) -> bool:
        return time.perf_counter() - self._began > SECONDS

    # -- the model -------------------------------------------------------------------------------------------------
    def _passes(self, trial: Trial) -> tuple[Spent, Spent]:
        try:
            trial.place()
        except FerryError as e:
            raise FerryError(f"profiling: the largest layer does not fit on the device: {e}") from e
        self._trace(trial)
        self._advance("device memory")
        trial.place()
        marks = Marks(self.layers, self.backend)
        trial.run(marks)
        self.backend.reset_peak()
        plain, marked, began = [], [], time.perf_counter()
        for k in range(MORE_PASSES):
            if k >= PASSES and time.perf_counter() - began > QUICK:
                break
            trial.run(marks)
            plain.append(self._spent(marks))
            self._advance("device memory")
            marks.install()
            trial.run(marks)
            marked.append(self._spent(marks))
            marks.remove()
            marks.active = True
            self._advance("device memory")
            if self._late():
                break
        peak = self.backend.memory_stats().peak
        self.base_bytes = sizes.coarse(max(0, peak - self._allocated_before - trial.held_bytes))
        if self.base_bytes == 0:
            self.notes.append("activations are not counted as device memory here: base_bytes is 0")
        if trial.streamed:
            self.notes.append("parameters do not fit on the device: measured layer by layer through a slot")
        self._shapes = marks.shapes
        averages = Averages(self.layers, marks.shapes, plain, marked)
        spent = averages.of(marked)
        passes = 1 if self._late() else HOST_PASSES
        self._launched = launchcosts.of_layers(trial, self._spent, averages, passes)
        wrong, notes = check_host_reads(trial, self.unusable)
        self.unusable |= wrong
        self.notes += notes
        self._advance("host memory")
        usable = frozenset(i for i in range(len(self.layers)) if i not in self.unusable)
        if not usable:
            return spent, spent
        trial.place(usable)
        found, began = [], time.perf_counter()
        for k in range(MORE_PASSES):
            if k >= DHA_PASSES and time.perf_counter() - began > QUICK:
                break
            marks.install()
            trial.run(marks)
            marks.remove()
            marks.active = True
            found.append(self._spent(marks))
            self._advance("host memory")
            if self._late() and found:
                break
        return spent, averages.of(found[1:] or found)

    def _trace(self, trial: Trial) -> None:
        """One forward pass that tells who reads what, and warms everything up."""
        tracer = ReadTracer(self.model, [p.param for layer in self.layers for p in layer.params])
        tracer.watch()
        tracer.on()
        tracer.enter(self.model)
        try:
            trial.forward()
        finally:
            tracer.off()
            tracer.unwatch()
        number = {id(layer.module): i for i, layer in enumerate(self.layers)}
        for i, layer in enumerate(self.layers):
            if id(layer.module) not in tracer.called:
                self.unusable[i] = "its forward is never called, its parameters are read elsewhere"
            for p in layer.params:
                for module in tracer.reads.get(id(p.param), []):
                    if module is not layer.module:
                        self.read_elsewhere.add(i)
                    j = number.get(id(module))
                    if j is None:
                        self.unusable[i] = f"{p.name} is also read by a module that owns no parameters"
                    elif all(p is not known for known in trial.reads[j]):
                        trial.also_reads(j, p)

    def _spent(self, marks: Marks) -> Spent:
        start = marks.found[0].event
        found = [(m.what, m.layer, start.elapsed(m.event)) for m in marks.found]
        spent = attribute(found, self.inside)
        at = {what: t for what, _, t in found if what in ("loss", "done")}
        spent.totals = (at["loss"], at["done"] - at["loss"])
        return spent

    # -- the machine -----------------------------------------------------------------------------------------------
    def _machine(self) -> tuple[LinkFound, Rates | None, Rates | None]:
        updates = HostUpdates(self.layers, self.optimizer, self.backend, is_native(self.optimizer))
        try:
            rates = updates.rates()
            self._advance("the link")
            contender = (updates.run_largest, updates.traffic) if rates is not None else None
            link = measure_link(self.backend, self.budget, contender)
            self._advance("the link")
        finally:
            updates.close()
        on_device = None
        if placement.device_update_obstacle(self.optimizer) is None:
            try:
                on_device = device_update_rates(self.layers, self.optimizer, self.backend, self.budget)
            except Exception as e:  # a stack without one of its operators, or too little memory
                self.notes.append(f"updates on the device are not usable here: {type(e).__name__}: {e}")
        self.notes += link.notes
        self.notes.append(
            "gradients written directly are estimated: backward + bytes / bandwidth to the host"
        )
        return link, rates, on_device

    # -- putting it together ---------------------------------------------------------------------------------------
    def _profile(
        self, spent: Spent, by_dha: Spent, found: LinkFound, rates: Rates | None, on_device: Rates | None
    ) -> Profile:
        link = found.link
        shares = shared_owners(self.layers)
        out = []
        for i in _all_in_order(len(self.layers), spent.order):
            layer = self.layers[i]
            nbytes = sum(p.nbytes for p in layer.reads)
            own = [p for p in layer.params if p.trainable]
            trainable = any(p.trainable for p in layer.reads)
            elements = sum(p.numel for p in layer.reads if p.trainable)
            infinite = i in self.unusable or not nbytes
            direct = spent.backward[i] + (nbytes / link.d2h if trainable else 0.0)
            t_fp_dha = float("inf") if infinite else by_dha.forward[i]
            t_bp_dha = float("inf") if infinite else by_dha.backward[i]
            out.append(
                LayerProfile(
                    name=layer.name,
                    kind=layer.kind,
                    bytes=nbytes,
                    t_trans=link.latency + nbytes / link.h2d,
                    t_fp=spent.forward[i],
                    t_bp=spent.backward[i],
                    t_fp_dha=t_fp_dha,
                    t_bp_dha=t_bp_dha,
                    t_bp_grad_direct=float("inf") if i in self.read_elsewhere else direct,
                    t_gap_fp=spent.gap_forward[i],
                    t_gap_bp=spent.gap_backward[i],
                    t_update=rates.seconds(elements, nbytes) if rates is not None else 0.0,
                    dha_bytes=self._dha_bytes(i, nbytes, spent.forward[i], t_fp_dha, link.h2d),
                    shares=shares.get(i),
                    trainable=trainable and (bool(own) or i in shares),
                    recompute=i in spent.recomputed,
                    itemsize=max(layer.reads, key=lambda p: p.numel).dtype.itemsize,
                    t_update_device=float("inf")
                    if on_device is None
                    else on_device.seconds(elements, nbytes),
                    # The device's times have the waiting for launches in them, the host's some of the hooks'.
                    t_host_fp=min(spent.forward[i], self._launched.forward[i]),
                    t_host_bp=min(spent.backward[i], self._launched.backward[i]),
                )
            )
        return Profile(tuple(out), link, self.base_bytes, parameters=outline(self.layers))

    def _dha_bytes(self, number: int, nbytes: int, t_fp: float, t_fp_dha: float, h2d: float) -> int:
        """A gather reads its rows; anything else at least its parameters, and what the extra time could bring in."""
        if t_fp_dha == float("inf"):
            return 0
        layer = self.layers[number]
        if isinstance(layer.module, nn.Embedding | nn.EmbeddingBag):
            rows = math.prod(shape[0]) if (shape := self._shapes.get(number)) else 0
            weight = layer.module.weight
            return min(nbytes, rows * weight.shape[1] * max(p.dtype.itemsize for p in layer.reads) or nbytes)
        return max(nbytes, int((t_fp_dha - t_fp) * h2d))


def _all_in_order(count: int, called: Sequence[int]) -> list[int]:
    """Every layer: those called in the order of their calls, the others behind the one registered before them."""
    out = list(called)
    for i in range(count):
        if i not in called:
            at = next((out.index(j) + 1 for j in range(i - 1, -1, -1) if j in out), 0)
            out.insert(at, i)
    return out
