"""Cases that run on every rank; `world.launch` names them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import make_model, small_units, toy_fabric
from memferry_ascend.topology.load import parse
from torch import nn

import memferry_ascend as mf
from memferry_ascend import causes, distributed_checkpoint, parallel, runtime, sharded, transfers
from memferry_ascend.backends.hostmem import SHARED_FOLDER

from .world import ROWS, LinkBytes, RankDelays, digest, plan_for, rows_of, train


def _message(call: Any) -> str:
    try:
        call()
    except mf.FerryError as error:
        return str(error)
    return "no error"


def _there(t: torch.Tensor) -> torch.Tensor:
    """On this rank's device."""
    return t.to(runtime.current().backend.device)


def _engine(model: nn.Module, modes: str = "random", unit_bytes: int = 1500, **config: Any) -> mf.Engine:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with small_units(unit_bytes):
        return mf.ferry(
            model, optimizer, config=mf.Config(**{"precision": "fp32"} | config), plan=plan_for(model, modes)
        )


# -- assisting devices -------------------------------------------------------------------------------------------------
EIGHT = toy_fabric(8, host=900)


def assisted(dispatch: str, modes: str, update: str = "step") -> dict[str, Any]:
    """Every rank trains with a device that assists it, or with none; and what its paths carried."""
    rt, moved = runtime.current(), {}
    close, chunk = transfers.Transfers.close, transfers.CHUNK

    def closing(self: transfers.Transfers) -> None:
        moved.update(self.moved)
        close(self)

    runtime._current = replace(rt, topology=parse(EIGHT))
    transfers.Transfers.close, transfers.CHUNK = closing, 512
    config: dict[str, Any] = {"precision": "bf16", "update": update}
    if dispatch != "none":
        config |= {"assist_devices": tuple(range(rt.world, 8)), "dispatch": dispatch}
    try:
        delays = 0.001 if dispatch != "none" else 0.0
        result = train(seed=4, modes=modes, steps=3, config=config, delays=delays, unit_bytes=20_000)
    finally:
        runtime._current = rt
        transfers.Transfers.close, transfers.CHUNK = close, chunk
    return {"losses": result["losses"], "state": result["state"], "moved": moved}


# -- bad input ---------------------------------------------------------------------------------------------------------
def different(what: str) -> str:
    """Rank 1 is given something else; every rank must say what."""
    odd = runtime.current().rank == 1
    model = make_model(0)
    config, modes, rate = {"precision": "fp32"}, "GFGB", 1e-2
    if what == "model":
        model = make_model(0)
        if odd:
            model.extra = nn.Linear(3, 5)
    elif what == "values" and odd:
        with torch.no_grad():
            model.final.weight[3] += 1
    elif what == "config" and odd:
        config["max_grad_norm"] = 1.5
    elif what == "plan" and odd:
        modes = "DHA"
    elif what == "optimizer" and odd:
        rate = 1e-3
    version = mf.__version__
    if what == "version" and odd:
        mf.__version__ = "9.9.9"
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return _message(
            lambda: mf.ferry(model, optimizer, config=mf.Config(**config), plan=plan_for(model, modes))
        )
    finally:
        mf.__version__ = version


def one_mode(modes: str) -> str:
    """What a device says of a plan that its ranks cannot run."""
    return _message(lambda: _engine(make_model(0), modes).close())


def whole_parameters_only() -> str:
    """An optimizer that looks at a parameter's matrix."""

    class Spectral(torch.optim.SGD):
        pass

    model = make_model(0)
    return _message(lambda: mf.ferry(model, Spectral(model.parameters(), lr=1e-2)))


def out_of_step() -> str:
    """Rank 0 runs one backward more than the others before its step."""
    rank = runtime.current().rank
    engine = _engine(make_model(0))

    def run() -> None:
        for _ in range(2 if rank == 0 else 1):
            engine.model(rows_of(0)).backward()
        engine.optimizer.step()

    said = _message(run)
    with contextlib.suppress(mf.FerryError):
        engine.close()
    return said


def one_more_forward(modes: str) -> str:
    """Rank 0 runs a forward pass with gradients that the others do not."""
    rank = runtime.current().rank
    engine = _engine(make_model(0), modes, unit_bytes=1)

    def run() -> None:
        for _ in range(2 if rank == 0 else 1):
            loss = engine.model(rows_of(0))
        loss.backward()
        engine.optimizer.step()

    said = _message(run)
    with contextlib.suppress(mf.FerryError):
        engine.close()
    return said


def alone_without_gradients(modes: str) -> dict[str, Any]:
    """Rank 0 evaluates now and then, between forward and backward too; what all ranks do is the same as without."""
    rank = runtime.current().rank
    engine = _engine(make_model(1), modes, unit_bytes=1)

    def evaluate() -> None:
        if rank == 0:
            with torch.no_grad():
                evaluated.append(float(engine.model(rows_of(7))))

    out = {}
    for often in (False, True):
        evaluated: list[float] = []
        for step in range(3):
            loss = engine.model(rows_of(step))
            if often:
                evaluate()
            loss.backward()
            engine.optimizer.step()
            evaluate()
        out[often] = (engine.state_dict(), evaluated)
        engine.close()
        engine = _engine(make_model(1), modes, unit_bytes=1)
    engine.close()
    return {"plain": out[False], "often": out[True]}


def reading_gradients() -> list[str]:
    """`p.grad` is not there to be read; the engine goes on after somebody has tried."""
    engine = _engine(make_model(0))
    engine.model(rows_of(0)).backward()
    said = [
        _message(lambda: torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)),
        _message(lambda: next(engine.model.parameters()).grad.norm()),
    ]
    engine.optimizer.step()
    engine.synchronize()
    engine.close()
    return said


# -- unusual passes ----------------------------------------------------------------------------------------------------
class Branches(nn.Module):
    """Rows decide which branch runs, so ranks use different parameters; `never` gets no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = {"left": self.left, "right": self.right}[branch](h)
        return self.last(h).square().mean()


def branches(modes: str, update: str = "step", twice: bool = False, delays: float = 0.0) -> dict[str, Any]:
    """Rank 0 goes left, the others right; after two steps all go left. With one rank both branches run in one loss,
    weighted as the average over `ranks` ranks would. `twice`: a second backward through the same graph."""
    rt = runtime.current()
    size = rt.world
    model = Branches()
    engine = _engine(model, modes, unit_bytes=1, update=update)
    hashes = []
    if delays:
        rt.backend.disturb = RankDelays(rt.rank, 1, delays)
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        x = _there(torch.randn(4, 8, generator=g))
        branch = "left" if rt.rank == 0 or step >= 2 else "right"
        loss = engine.model(x, branch)
        if twice:
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        else:
            loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        with torch.no_grad():
            hashes.append(digest(dict(engine.model.named_parameters())))
    state = engine.state_dict()
    rt.backend.disturb = None
    engine.close()
    return {"hashes": hashes, "state": state, "size": size}


class Tail(Branches):
    """Some ranks go further than others."""

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        h = self.last(torch.tanh(self.first(x))).expand(-1, 8)
        return (self.right(h) if branch == "right" else h).square().mean()


def meetings(modes: str) -> dict[str, Any]:
    """Ranks meet between forward, backward and step (as one does to report a loss), although rank 0 needs less than the
    others in the forward pass, and only rank 1 needs the first layer's weight in the backward pass."""
    rt = runtime.current()
    assert rt.ranks is not None
    engine = _engine(Tail(), modes, unit_bytes=1)
    for step in range(3):
        x = _there(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        loss = engine.model(x.requires_grad_(rt.rank == 1), "left" if rt.rank == 0 else "right")
        rt.ranks.barrier()
        loss.backward()
        rt.ranks.barrier()
        engine.optimizer.step()
    state = engine.state_dict()
    engine.close()
    return {"state": state}


def tiny(modes: str) -> dict[str, Any]:
    """Fewer parameters than ranks: one of two elements."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, -2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).square().mean()

    engine = _engine(Two(), modes)
    for step in range(3):
        engine.model(_there(torch.full((2,), 1.0 + step))).backward()
        engine.optimizer.step()
    state = engine.state_dict()
    engine.close()
    return {"w": state["model"]["w"], "m": state["optimizer"]["w"]["exp_avg"]}


def no_sync_travels_once(modes: str) -> dict[str, Any]:
    """Gradient bytes to this rank's host in a plain pass, in two backwards under no_sync, and in one outside it and the
    step after those."""
    engine = _engine(make_model(0), modes)
    with LinkBytes() as plain:
        engine.model(rows_of(0)).backward()
        engine.optimizer.step()
        engine.synchronize()
    with LinkBytes() as inside:
        with engine.no_sync():
            for step in (0, 1):
                engine.model(rows_of(step)).backward()
        engine.synchronize()
    with LinkBytes() as outside:
        engine.model(rows_of(2)).backward()
        engine.optimizer.step()
        engine.synchronize()
    kept = engine._arena.bytes_by_kind["unsynced"]
    engine.close()
    return {
        "plain": plain.by_stream["download"],
        "inside": inside.by_stream.get("download", 0),
        "outside": outside.by_stream["download"],
        "kept": kept,
    }


def edits(modes: str, precision: str) -> dict[str, Any]:
    """Edit, load, zero and go on; every rank does the same."""
    engine = _engine(make_model(2), modes, precision=precision)
    engine.model(_there(rows_of(0))).backward()
    engine.optimizer.step()
    with engine.edit() as model, torch.no_grad():
        for p in model.parameters():
            p.view(-1)[::3].mul_(0.5)
    edited = engine.state_dict()["model"]
    engine.model(_there(rows_of(1))).backward()
    engine.optimizer.zero_grad()  # discarded on all ranks
    engine.model(_there(rows_of(2))).backward()
    engine.optimizer.step()
    engine.model.load_state_dict(edited)
    loss = float(engine.model(_there(rows_of(3))).detach())
    optimizer = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(optimizer)
    state = engine.state_dict()
    engine.close()
    return {"edited": edited, "loss": loss, "state": state}


# -- checkpoints -------------------------------------------------------------------------------------------------------
def save_and_go_on(folder: str, modes: str, precision: str = "bf16") -> dict[str, Any]:
    """Two steps, a distributed checkpoint, two more."""
    engine = _engine(make_model(4), modes, precision=precision)
    rt = runtime.current()
    each = ROWS // rt.world

    def steps(first: int) -> None:
        for step in (first, first + 1):
            engine.model(_there(rows_of(step)[rt.rank * each : (rt.rank + 1) * each])).backward()
            engine.optimizer.step()

    steps(0)
    distributed_checkpoint.save(engine, folder)
    saved = engine.state_dict()
    steps(2)
    state = engine.state_dict()
    engine.close()
    return {"saved": saved, "state": state}


def load_and_go_on(folder: str, modes: str, precision: str = "bf16", steps: int = 2) -> dict[str, Any]:
    """A new engine with other initial values takes the checkpoint and does the last two steps."""
    model = make_model(4)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine = _engine(model, modes, precision=precision)
    distributed_checkpoint.load(engine, folder)
    loaded = engine.state_dict()
    rt = runtime.current()
    each = ROWS // rt.world
    for step in range(2, 2 + steps):
        engine.model(_there(rows_of(step)[rt.rank * each : (rt.rank + 1) * each])).backward()
        engine.optimizer.step()
    state = engine.state_dict()
    engine.close()
    return {"loaded": loaded, "state": state}


def traffic(modes: str) -> dict[str, Any]:
    """For a model of half a MiB and ordinary units: bytes of this rank's arena by kind, names left under /dev/shm, and
    bytes over the link by direction in three steps and with what is loaded ahead for a fourth."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    engine = _engine(model, modes, unit_bytes=1 << 18, precision="bf16")
    with LinkBytes() as counted:
        for _ in range(3):
            engine.model(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
            engine.optimizer.step()
        engine.synchronize()
        memory = dict(engine._arena.bytes_by_kind)
        if engine._parallel is not None:  # what was counted before anything was allocated
            counted_before = sharded.device_need(engine._units, engine._parallel.ranks.local)
            assert engine._parallel.device_bytes == counted_before
        left = [n for n in engine._arena.shared_names if os.path.exists(os.path.join(SHARED_FOLDER, n))]
        engine.close()
    by = counted.by_stream
    down = by.get("upload", 0) + by.get("reload", 0)
    return {"memory": memory, "names left": len(left), "up": by["download"], "down": down}


def budgeted(planner: str, limit: int) -> dict[str, Any]:
    """Bytes that the engine holds on the device under a byte budget, and the modes that takes."""
    backend = runtime.current().backend
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1800, 1800) for _ in range(6)))  # units of 13 MB
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = mf.Config(precision="fp32", planner=planner, device_memory=limit)
    before = backend.memory_stats().allocated
    engine = mf.ferry(model, optimizer, sample_batch=(torch.ones(2, 1800),), config=config)
    for _ in range(2):
        engine.model(torch.ones(2, 1800)).sum().backward()
        engine.optimizer.step()
    engine.synchronize()
    held = backend.memory_stats().allocated - before
    engine.close()
    return {"held": held, "modes": [str(x.mode) for x in engine.plan.layers]}


def searched() -> dict[str, Any]:
    """The plan is searched on a profile that says what connects the ranks, and is the same on all of them."""
    model = make_model(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = mf.ferry(model, optimizer, sample_batch=(rows_of(0),), config=mf.Config(precision="fp32"))
    assert engine.profile is not None
    engine.model(rows_of(0)).backward()
    engine.optimizer.step()
    engine.synchronize()
    plan = [(x.name, str(x.mode), str(x.grad), str(x.update)) for x in engine.plan.layers]
    engine.close()
    return {"fabric": engine.profile.fabric, "plan": plan, "period": engine.plan.predicted_period}


def planned() -> list[str]:
    """The rules' modes, each layer a unit, run for two steps."""
    model = make_model(1)
    with small_units(1):
        engine = mf.ferry(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), config=mf.Config(precision="fp32")
        )
    for step in range(2):
        engine.model(_there(rows_of(step))).backward()
        engine.optimizer.step()
    modes = [str(x.mode) for x in engine.plan.layers]
    engine.close()
    return modes


def nodes(ranks_per_node: int) -> tuple[int, int, int, list[int]]:
    """From here on this machine is several nodes; how ranks see them."""
    os.environ["MEMFERRY_RANKS_PER_NODE"] = str(ranks_per_node)
    backend = runtime.current().backend.name
    runtime.reset()
    ranks = runtime.init(backend=backend).ranks
    assert isinstance(ranks, parallel.Ranks)
    return ranks.node, ranks.nodes, ranks.index, ranks.members


def gives_up() -> str:
    """Rank 1 says that it stops, and stays until the others have noticed."""
    rt, store = runtime.current(), causes.store()
    others = [f"noticed/{r}" for r in range(rt.world) if r != 1]
    engine = _engine(make_model(0), "GFGB")
    engine.model(_there(rows_of(0))).backward()
    assert engine._parallel is not None and rt.ranks is not None
    engine._parallel.lane.finish()
    rt.ranks.barrier()  # no device waits for what a rank has not queued: that would end the process
    if rt.rank == 1:
        runtime.announce(OSError("the disk with the text is full"))
        store.wait(others)
        said = "gave up"
    else:
        said = _message(engine.optimizer.step)
    with contextlib.suppress(mf.FerryError):
        engine.close()
    store.set(f"noticed/{rt.rank}", "1")
    if rt.rank == 0:  # holds the store
        store.wait([*others, "noticed/1"])
    return said


def fails_alone(folder: str) -> str:
    """Rank 1's update fails; the others must name it."""
    rt = runtime.current()
    engine = _engine(make_model(0), "random")

    def disturb(point: str) -> None:
        if rt.rank == 1 and point == "update":
            raise OSError("the disk with the moments is gone")

    rt.backend.disturb = disturb
    try:
        for step in range(3):
            engine.model(rows_of(step)).backward()
            engine.optimizer.step()
        engine.synchronize()
    except mf.FerryError as error:
        runtime.announce(error)
        Path(folder, f"said-{rt.rank}").write_text(str(error))
        os._exit(0)  # as an uncaught error would, but with a result for the test
    return "nothing failed"
