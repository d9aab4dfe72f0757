"""Four devices train, four assist, on emulated CloudMatrix384 links: the share of an iteration that copies take.

Four engines in one process train a replica each, every one on its own CPU backend with its own streams, workers and
staging buffers; all their copies cross one set of emulated links, so that devices share what the fabric shares (two
training dies a CPU). Iterations begin together, as data parallel training makes them; gradients are not exchanged. What
a layer computes is real but small; its time on a device is a pause of stated length. Links and pauses are slowed by the
time scale, so that this machine's own work (host updates, real copies, late wake-ups) hardly shows.

The prediction is the planner's simulator, given the pauses, the measured host updates, and for the link what the fabric's
figures say: all four devices loading at once, by max-min sharing. Every run must end with the same bits.

    python tools/bench/assisted.py --json docs/benchmarks/assisted-emulated.json --plot docs/benchmarks/assisted-emulated.png

It shows what the dispatcher makes of links with the fabric file's figures. It is no measurement of an NPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import platform
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from memferry_ascend.topology import EmulatedLinks, Fabric, PathSet, load
from memferry_ascend.topology.node_plan import beside
from memferry_ascend.topology.paths import DIRECTIONS
from torch import nn

from memferry_ascend.assist import who_assists
from memferry_ascend.backends.base import Stream
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.config import Config
from memferry_ascend.engine import Engine
from memferry_ascend.files import write_json
from memferry_ascend.planner import LayerProfile, LinkProfile, Mode, Plan, Profile, simulate
from memferry_ascend.planner.plan import LayerPlan
from memferry_ascend.recording import covered
from memferry_ascend.runtime import Runtime
from memferry_ascend.transfers import STREAMS, Transfers

TRAIN, ASSIST = 4, (4, 5, 6, 7)
SCHEMES = ("direct", "static", "dynamic")
WARMUP = 2  # iterations: the first forward learns the windows


@dataclass(frozen=True)
class Work:
    """`layers` square matrices of `width` (fp32); seconds that each takes on a device, forward and backward."""

    layers: int = 4
    width: int = 2048
    forward: float = 0.15e-3
    backward: float = 0.3e-3
    steps: int = 6
    time_scale: float = 1000.0

    @property
    def nbytes(self) -> int:
        return 4 * self.width**2


class Pause(torch.autograd.Function):
    """The identity, which takes its time in both passes (wall-clock seconds)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class Block(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.linear = nn.Linear(work.width, work.width, bias=False)
        self.pauses = (work.forward * work.time_scale, work.backward * work.time_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Pause.apply(self.linear(x), *self.pauses))


def node() -> Fabric:
    """cm384 with the devices that train first and those that assist next, as local ranks and `assist_devices` count."""
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    first = [f"node0/npu{i}/die0" for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    return replace(
        fabric, nodes={name: fabric.nodes[name] for name in dict.fromkeys([*first, *fabric.nodes])}
    )


@dataclass
class Ran:
    """One device's training: what it ended with, and seconds by iteration (wall-clock over the time scale)."""

    digest: str = ""
    losses: list[float] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)
    copying: list[float] = field(default_factory=list)  # part of each iteration in which some copy ran
    updates: list[float] = field(default_factory=list)  # each host update
    moved: dict[str, int] = field(default_factory=dict)


def train(work: Work, scheme: str, fabric: Fabric) -> list[Ran]:
    """All devices, under one scheme."""
    barrier = threading.Barrier(TRAIN)
    with EmulatedLinks(fabric, work.time_scale) as links, ThreadPoolExecutor(TRAIN) as pool:
        jobs = [pool.submit(_train_one, work, scheme, fabric, links, i, barrier) for i in range(TRAIN)]
        return [job.result() for job in jobs]


def _train_one(
    work: Work, scheme: str, fabric: Fabric, links: EmulatedLinks, index: int, barrier: threading.Barrier
) -> Ran:
    backend = CpuBackend()
    backend.links = links
    runtime = Runtime(backend, fabric.name, fabric, 0, 1, index, TRAIN)
    ran, spans = Ran(), list[tuple[float, float, str]]()
    generator = torch.Generator().manual_seed(index)
    model = nn.Sequential(*(Block(work) for _ in range(work.layers)))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, work.width**-0.5, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Config(precision="fp32", threads=1)
    alone = None
    if scheme == "direct":  # the same code with one path
        alone = Transfers(
            backend, {d: paths_of(fabric, index, d, assisted=False) for d in DIRECTIONS}, links=links
        )
        alone.install()
    else:
        config = replace(config, assist_devices=ASSIST, dispatch=scheme)
    plan = Plan(tuple(LayerPlan(f"{i}.linear", Mode.GFGB) for i in range(work.layers)))
    try:
        engine = Engine(model, optimizer, runtime, config, plan, None)
        with _observed(engine, spans, ran.updates):
            marks = []
            for _ in range(work.steps):
                barrier.wait()
                marks.append(time.perf_counter())
                x = torch.randn(8, work.width, generator=generator)
                loss = engine.model(x).square().mean()
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                ran.losses.append(float(loss.detach()))
            barrier.wait()
            marks.append(time.perf_counter())
            engine.synchronize()
            used = alone or engine._transfers
            assert used is not None
            ran.moved = dict(used.moved)
        ran.digest = _digest(engine.state_dict())
        engine.close()
    except BaseException:
        barrier.abort()
        raise
    finally:
        if alone is not None:
            alone.close()
        backend.close()
    for begin, end in list(itertools.pairwise(marks))[WARMUP:]:
        inside = [(max(a, begin), min(b, end), name) for a, b, name in spans if a < end and b > begin]
        ran.iterations.append((end - begin) / work.time_scale)
        ran.copying.append(covered(inside) / work.time_scale)
    return ran


@contextlib.contextmanager
def _observed(engine: Engine, spans: list[tuple[float, float, str]], updates: list[float]) -> Iterator[None]:
    """Notes when the streams copy, and how long host updates take."""
    for name in STREAMS:
        stream = engine.runtime.backend.stream(name)
        inner = stream.carrier
        assert inner is not None

        def carry(stream: Stream, dst: torch.Tensor, src: torch.Tensor, inner: Any = inner) -> bool:
            begin = time.perf_counter()
            carried = inner(stream, dst, src)
            spans.append((begin, time.perf_counter(), stream.name))
            return carried

        stream.carrier = carry
    plain = engine.recorder.host

    @contextlib.contextmanager
    def host(what: str, name: str, nbytes: int = 0) -> Iterator[None]:
        begin = time.perf_counter()
        with plain(what, name, nbytes):
            yield
        if what == "update":
            updates.append(time.perf_counter() - begin)

    engine.recorder.host = host  # type: ignore[method-assign]
    yield


def _digest(state: dict[str, Any]) -> str:
    """One hash of masters and moments."""
    found = dict(state["model"])
    for name, values in state["optimizer"].items():
        found |= {f"{name} {key}": torch.as_tensor(value) for key, value in values.items()}
    h = hashlib.sha256()
    for name in sorted(found):
        h.update(name.encode() + found[name].detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


# -- what the simulator says -------------------------------------------------------------------------------------------
def paths_of(fabric: Fabric, index: int, direction: Any, *, assisted: bool) -> PathSet:
    """A training device's paths beside those of the others."""
    names = fabric.devices[:TRAIN]
    peers = [fabric.devices[i] for i in ASSIST] if assisted else []
    return beside(fabric, who_assists(fabric, names, peers), names[index], direction)


def predict(work: Work, fabric: Fabric, update: float, *, assisted: bool) -> dict[str, float]:
    """Seconds of an iteration, and the share of it in which some copy runs. `update`: seconds of one host update."""
    slowest: dict[str, float] = {}
    latency = 0.0
    for direction in DIRECTIONS:
        rates = []
        for index in range(TRAIN):
            paths = paths_of(fabric, index, direction, assisted=assisted).together()
            both = sum(p.bandwidth for p in paths)
            # Paths that end together act like one: T = (bytes + sum of B L) / sum of B.
            latency = max(latency, sum(p.bandwidth * p.latency for p in paths) / both)
            rates.append(both)
        slowest[direction] = min(rates)
    h2d, d2h = slowest["h2d"], slowest["d2h"]
    link = LinkProfile(h2d=h2d, d2h=d2h, duplex=h2d + d2h, latency=latency)
    inf = float("inf")
    layers = [
        LayerProfile(
            name=f"{i}.linear", kind="Linear", bytes=work.nbytes, t_trans=latency + work.nbytes / h2d, t_fp=work.forward,
            t_bp=work.backward, t_fp_dha=inf, t_bp_dha=inf, t_bp_grad_direct=inf, t_gap_fp=0.0, t_gap_bp=0.0,
            t_update=update, dha_bytes=0, itemsize=4,
        )
        for i in range(work.layers)
    ]  # fmt: skip
    plan = Plan(tuple(LayerPlan(layer.name, Mode.GFGB) for layer in layers))
    timeline = simulate(Profile(tuple(layers), link), plan)
    spans = [*timeline.intervals["h2d"], *timeline.intervals["d2h"]]
    copying = covered(spans) / timeline.cycle
    return {"iteration": timeline.period, "share": copying / timeline.period, "h2d": h2d, "d2h": d2h}


# -- the benchmark -----------------------------------------------------------------------------------------------------
def measure(work: Work, rounds: int) -> dict[str, Any]:
    """Every scheme `rounds` times in turn; medians over all iterations of all devices."""
    fabric = node()
    runs: dict[str, list[Ran]] = {scheme: [] for scheme in SCHEMES}
    for _ in range(rounds):
        for scheme in SCHEMES:
            runs[scheme] += train(work, scheme, fabric)
            print(f"{scheme}: {_median(runs[scheme], 'iterations') * 1e3:.3f} ms an iteration", flush=True)
    update = statistics.median(u for ran in runs["direct"] for u in ran.updates) / work.time_scale
    rows = []
    for scheme, ran in runs.items():
        predicted = predict(work, fabric, update, assisted=scheme != "direct")
        iteration, copying = _median(ran, "iterations"), _median(ran, "copying")
        moved: dict[str, int] = {}
        for one in ran:
            for name, nbytes in one.moved.items():
                moved[name] = moved.get(name, 0) + nbytes
        rows.append({
            "scheme": scheme, "iteration": iteration, "share": copying / iteration,
            "predicted_iteration": predicted["iteration"], "predicted_share": predicted["share"],
            "predicted_h2d": predicted["h2d"], "predicted_d2h": predicted["d2h"],
            "iterations": [one.iterations for one in ran], "copying": [one.copying for one in ran], "bytes": moved,
        })  # fmt: skip
    return {
        "benchmark": "assisted",
        "emulated": True,
        "fabric": "cm384",
        "train": list(fabric.devices[:TRAIN]),
        "assist": {k: list(v) for k, v in who_assists(
            fabric, fabric.devices[:TRAIN], [fabric.devices[i] for i in ASSIST]).items()},
        "work": work.__dict__,
        "rounds": rounds,
        "host_update": update,
        "same_bits": len({tuple((one.digest, *one.losses) for one in ran[i : i + TRAIN])
                          for ran in runs.values() for i in range(0, len(ran), TRAIN)}) == 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }  # fmt: skip


def _median(runs: Sequence[Ran], what: str) -> float:
    return statistics.median(value for ran in runs for value in getattr(ran, what))


def table(result: dict[str, Any]) -> str:
    lines = ["scheme    iteration ms (predicted)   share of copies (predicted)"]
    for r in result["rows"]:
        lines.append(
            f"{r['scheme']:8}  {r['iteration'] * 1e3:8.3f} ({r['predicted_iteration'] * 1e3:.3f})"
            f"         {r['share']:8.1%} ({r['predicted_share']:.1%})"
        )
    lines.append(f"time scale {result['work']['time_scale']:g}; same bits: {result['same_bits']}")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    names = [r["scheme"] for r in result["rows"]]
    shown = (("iteration", 1e3, "ms an iteration"), ("share", 100.0, "% of an iteration in which copies run"))
    for i, (what, unit, label) in enumerate(shown):
        axes = figure.add_subplot(1, 2, i + 1)
        for j, (key, name) in enumerate(((what, "measured"), (f"predicted_{what}", "simulated"))):
            at = [k + 0.4 * j for k in range(len(names))]
            axes.bar(at, [unit * r[key] for r in result["rows"]], width=0.38, label=name)
        axes.set_xticks([k + 0.2 for k in range(len(names))], names)
        axes.set_ylabel(label)
        axes.legend()
    scale = result["work"]["time_scale"]
    figure.suptitle(f"four train, four assist, emulated cm384 links slowed {scale:g} times")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every scheme, in turn")
    parser.add_argument(
        "--time-scale", type=float, default=Work.time_scale, help="wall-clock seconds per second"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(Work(time_scale=arguments.time_scale), arguments.rounds)
    print(table(result))
    if arguments.json:
        write_json(Path(arguments.json), result)
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
