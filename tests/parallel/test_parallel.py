"""Several ranks compute what one does, and every plan the same bits, on 2, 3 and 4 processes over gloo."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import make_model, small_units

import memferry_ascend as mf
from memferry_ascend import distributed_checkpoint, runtime
from memferry_ascend.planner import Mode

from .world import Case, launch_all, plan_for, train

SIZES = (2, 3, 4)
MODES = ("GFGB", "DHA", "DFGB", "STREAM", "random")
UPDATES = ("step", "backward")

# Runs of one group must agree bit for bit, whatever their plan, their delays and when updates start.
GROUPS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"modes": m} for m in MODES] + [{"modes": "random", "delays": 0.002, "unit_bytes": 1}],
    "bf16 accumulated and clipped": [
        {"modes": m, "micro": 2, "config": {"precision": "bf16", "max_grad_norm": 0.05}, **more}
        for m, more in (("GFGB", {}), ("random", {"delays": 0.002}), ("DHA", {"delays": 0.001}))
    ],
    "in backward": [
        {"modes": m, "micro": 2, "seed": 3, "config": {"update": u}, **more}
        for m, u, more in (
            ("GFGB", "step", {}),
            ("random", "backward", {"delays": 0.002}),
            ("STREAM", "backward", {"unit_bytes": 1}),
            ("DFGB", "backward", {"delays": 0.001}),
        )
    ],
    "loads": [
        {"modes": m, "seed": 7, **more}
        for m, more in (
            ("GFGB", {}),
            ("STREAM", {"delays": 0.002, "unit_bytes": 1}),
            ("DFGB", {"delays": 0.002, "unit_bytes": 1}),
        )
    ],
    "no_sync": [
        {"modes": m, "micro": 2, "seed": 2, "no_sync": True, **more}
        for m, more in (("GFGB", {}), ("random", {"delays": 0.001}))
    ],
    "SGD, reentrant checkpoints, clip_grad_norm_, zeros": [
        {
            "modes": m,
            "seed": 5,
            "optimizer": "SGD",
            "checkpoint": "reentrant",
            "clip": 0.1,
            "zeros": True,
            **more,
        }
        for m, more in (("GFGB", {}), ("random", {"delays": 0.001}), ("STREAM", {}))
    ],
}

ASSISTED: list[tuple[str, str, dict[str, Any]]] = [
    ("none", "GFGB", {}),
    ("static", "GFGB", {}),
    ("static", "random", {"update": "backward"}),
    ("dynamic", "STREAM", {}),
    ("dynamic", "random", {}),
]


LIMIT = 110_000_000
"""Device bytes in which one rank keeps some layers, and of which exchanges take so much that all must stream."""
ON_NODES = 6
"""The seed of what runs on two nodes."""
NODES: list[dict[str, Any]] = [
    {"modes": "GFGB"},
    {"modes": "random", "delays": 0.001},
    {"modes": "random", "micro": 2, "config": {"max_grad_norm": 0.1, "precision": "bf16"}},
    {"modes": "STREAM", "micro": 2, "config": {"max_grad_norm": 0.1, "precision": "bf16"}},
]


def _cases(size: int) -> list[Case]:
    names = list(GROUPS)[: {2: 2, 3: len(GROUPS), 4: 1}[size]]  # all of them where it matters: three ranks
    out = [("train", {"steps": 3} | run) for name in names for run in GROUPS[name]]
    out += [("parallel.cases:traffic", {"modes": m}) for m in Mode]
    if size == 4:
        out += [("parallel.cases:nodes", {"ranks_per_node": 2})]
        out += [("train", {"steps": 3, "seed": ON_NODES} | run) for run in NODES]
        out += [("parallel.cases:assisted", {"dispatch": d, "modes": m} | more) for d, m, more in ASSISTED]
        out += [
            ("parallel.cases:one_more_forward", {"modes": "STREAM"})
        ]  # last: ranks that fail are not at one place
    if size == 2:
        out += [("parallel.cases:searched", {})]
        out += [("parallel.cases:budgeted", {"planner": "rules", "limit": LIMIT})]
    if size == 3:
        out += [
            ("parallel.cases:branches", {"modes": m, "update": u, "twice": t})
            for m, u, t in (
                ("GFGB", "step", False),
                ("random", "backward", False),
                ("DHA", "step", False),
                ("GFGB", "step", True),
                ("DHA", "step", True),
            )
        ]
        out += [
            ("parallel.cases:branches", {"modes": m, "update": u, "twice": t, "delays": 0.002})
            for m in ("STREAM", "DFGB")
            for u, t in (("step", False), ("backward", False), ("step", True))
        ]
        out += [("parallel.cases:meetings", {"modes": m}) for m in ("GFGB", "STREAM", "DFGB")]
        out += [("parallel.cases:alone_without_gradients", {"modes": m}) for m in ("STREAM", "DFGB")]
        out += [("parallel.cases:tiny", {"modes": m}) for m in Mode]
        out += [("parallel.cases:no_sync_travels_once", {"modes": "random"})]
        out += [
            ("parallel.cases:edits", {"modes": m, "precision": p})
            for p in ("bf16", "fp32")
            for m in ("GFGB", "random")
        ]
        bad = ("model", "values", "config", "plan", "optimizer", "version")
        out += [("parallel.cases:different", {"what": what}) for what in bad]
        out += [("parallel.cases:whole_parameters_only", {}), ("parallel.cases:reading_gradients", {})]
        out += [("parallel.cases:save_and_go_on", {"folder": "FOLDER/dcp", "modes": "random"})]
        out += [("parallel.cases:load_and_go_on", {"folder": "FOLDER/dcp", "modes": "GFGB"})]
        out += [("parallel.cases:out_of_step", {})]
    return out


class World:
    """What the ranks of one size returned."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.cases = [
            (n, {k: str(v).replace("FOLDER", str(folder)) if k == "folder" else v for k, v in a.items()})
            for n, a in _cases(size)
        ]
        self.results: list[list[Any]] = []

    def of(self, name: str, **arguments: Any) -> list[Any]:
        """Results of one case by rank."""
        for (n, a), result in zip(self.cases, self.results, strict=True):
            if n.removeprefix("parallel.cases:") == name and arguments.items() <= a.items():
                return result
        raise KeyError((name, arguments))

    def groups(self) -> dict[str, list[list[dict[str, Any]]]]:
        """Training results by group, run and rank."""
        found = zip(self.cases, self.results, strict=True)
        runs = iter([r for (n, a), r in found if n == "train" and a.get("seed") != ON_NODES])
        out = {}
        for name, group in GROUPS.items():
            some = [r for _, r in zip(group, runs, strict=False)]
            if some:
                out[name] = some
        return out


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    made = {size: World(size, tmp_path_factory.mktemp(f"world{size}")) for size in SIZES}
    found = launch_all([(w.size, w.cases, w.folder) for w in made.values()])
    for w, results in zip(made.values(), found, strict=True):
        w.results = results
    return made


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: dict[int, World]) -> World:
    return worlds[request.param]


every_size = pytest.mark.parametrize("world", SIZES, indirect=True)
three = pytest.mark.parametrize("world", [3], indirect=True)


def same(a: Any, b: Any) -> bool:
    """Whether two nested states hold the same bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@every_size
def test_every_plan_gives_the_same_bits_on_every_rank(world: World) -> None:
    groups = world.groups()
    assert len(groups) == {2: 2, 3: len(GROUPS), 4: 1}[world.size]
    for name, runs in groups.items():
        want = runs[0][0]
        assert len(want["hashes"]) == 3
        for run in runs:
            for got in run:
                assert got["losses"] == want["losses"], name
                assert got["norms"] == want["norms"], name
                assert got["hashes"] in ([], want["hashes"]), name
                assert same(got["state"]["model"], want["state"]["model"]), name
                assert same(got["state"]["optimizer"], want["state"]["optimizer"]), name
                assert got["closed"] == want["closed"]


@pytest.mark.parametrize("world", [4], indirect=True)
def test_four_that_train_with_four_that_assist_give_the_same_bits(world: World) -> None:
    want, *others = (world.of("assisted", dispatch=d, modes=m, **more) for d, m, more in ASSISTED)
    for (dispatch, _, _), ranks in zip(ASSISTED[1:], others, strict=True):
        for got, plain in zip(ranks, want, strict=True):
            assert got["losses"] == plain["losses"] and same(got["state"], plain["state"])
        carried = [{name for name, n in got["moved"].items() if n} for got in ranks]
        peers = [name for names in carried for name in names if name != "direct"]
        assert len(set(peers)) == len(peers)  # each peer assists one rank
        # Whether a path gets its turn is for dynamic dispatch a question of time.
        assert len(peers) == 4 if dispatch == "static" else peers
    assert all(not got["moved"] for got in want)


@every_size
def test_losses_equal_one_rank(world: World, cpu: mf.Runtime) -> None:
    for name, runs in world.groups().items():
        first = {"steps": 3, "modes": "GFGB"} | GROUPS[name][0]
        torch.manual_seed(0)
        want = train(**first)
        bf16 = first.get("config", {}).get("precision") == "bf16"
        assert runs[0][0]["losses"] == pytest.approx(want["losses"], rel=2e-2 if bf16 else 1e-5), name
        assert runs[0][0]["norms"] == pytest.approx(want["norms"], rel=2e-2 if bf16 else 1e-5), name


@every_size
def test_memory_of_a_node_does_not_grow(world: World, cpu: mf.Runtime) -> None:
    from . import cases

    for modes in Mode:
        one = sum(cases.traffic(modes)["memory"].values())
        found = world.of("traffic", modes=modes)
        assert all(r["names left"] == 0 for r in found)
        ranks = [r["memory"] for r in found]
        private = sum(v for r in ranks for k, v in r.items() if k != "shared")
        shared = {r.get("shared", 0) for r in ranks}
        assert len(shared) == 1
        assert one <= private + shared.pop() <= one + world.size * 8 * 4096


@every_size
def test_link_bytes_fall_with_ranks(world: World, cpu: mf.Runtime) -> None:
    from . import cases

    units, loads = 6, {"GFGB": 1, "DHA": 0, "DFGB": 1, "STREAM": 2}
    for modes in Mode:
        one, ranks = cases.traffic(modes), world.of("traffic", modes=modes)
        assert (one["down"] > 0) == (modes is not Mode.DHA)
        for way, times in (("up", 1), ("down", loads[modes])):
            counts = [r[way] for r in ranks]
            slack = 3 * units * times * 512  # chunks begin at multiples of 512 bytes
            assert one[way] <= sum(counts) <= one[way] + world.size * slack, modes
            assert max(counts) <= math.ceil(one[way] / world.size) + slack, modes


@three
def test_ranks_that_use_different_parameters(world: World) -> None:
    once = world.of("branches", modes="GFGB", twice=False)
    for other in (
        once,
        world.of("branches", modes="random"),
        world.of("branches", modes="DHA", twice=False),
        *(world.of("branches", modes=m, twice=False, update=u) for m in ("STREAM", "DFGB") for u in UPDATES),
    ):
        for got in other:
            assert got["hashes"] == once[0]["hashes"]
            assert same(got["state"]["model"], once[0]["state"]["model"])
    state = once[0]["state"]
    assert "step" in state["optimizer"]["first.weight"]
    assert float(state["optimizer"]["first.weight"]["step"]) == 4
    assert float(state["optimizer"]["right.weight"]["step"]) == 2  # no rank used it in the last two steps
    assert state["optimizer"]["never.weight"] == {}
    twice = world.of("branches", modes="GFGB", twice=True)
    for got in (
        r for m in ("GFGB", "DHA", "STREAM", "DFGB") for r in world.of("branches", modes=m, twice=True)
    ):
        assert got["hashes"] == twice[0]["hashes"]
    for name, value in twice[0]["state"]["model"].items():
        torch.testing.assert_close(value, state["model"][name], rtol=1e-2, atol=1e-3)


@three
def test_ranks_may_meet_between_passes(world: World) -> None:
    want = world.of("meetings", modes="GFGB")[0]
    for modes in ("GFGB", "STREAM", "DFGB"):
        assert all(
            same(r["state"]["model"], want["state"]["model"]) for r in world.of("meetings", modes=modes)
        )


@three
def test_one_rank_may_evaluate_alone(world: World) -> None:
    for modes in ("STREAM", "DFGB"):
        ranks = world.of("alone_without_gradients", modes=modes)
        for r in ranks:
            assert same(r["plain"][0], ranks[0]["plain"][0])
            assert same(r["often"][0], ranks[0]["plain"][0])
        assert len(ranks[0]["often"][1]) == 6
        assert ranks[0]["often"][1][1::2] == ranks[0]["plain"][1]
        assert ranks[1]["often"][1] == []


@three
def test_branches_equal_plain_pytorch(world: World) -> None:
    from .cases import Branches

    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = [model(x, "left" if rank == 0 or step >= 2 else "right") for rank in range(3)]
        (sum(losses) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = world.of("branches", modes="GFGB", twice=False)[0]["state"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-4, atol=1e-6)


@three
def test_fewer_parameters_than_ranks(world: World) -> None:
    results = [r for m in Mode for r in world.of("tiny", modes=m)]
    assert all(same(r, results[0]) for r in results)
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([w], lr=1e-2)
    for step in range(3):
        (torch.full((2,), 1.0 + step) * w).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(results[0]["w"], w.detach())
    torch.testing.assert_close(results[0]["m"], optimizer.state[w]["exp_avg"])


@three
def test_no_sync_keeps_gradients_at_home_and_sends_them_once(world: World) -> None:
    ranks = world.of("no_sync_travels_once")
    size = sum(p.numel() for p in make_model(0).parameters()) * 4
    for r in ranks:
        assert r["inside"] == 0
        assert r["kept"] >= size
        assert r["outside"] == r["plain"] > 0


@three
def test_edits_and_loading(world: World, cpu: mf.Runtime) -> None:
    from . import cases

    for precision in ("bf16", "fp32"):
        results = world.of("edits", modes="GFGB", precision=precision)
        results = results + world.of("edits", modes="random", precision=precision)
        assert all(same(r, results[0]) for r in results)
        if precision == "fp32":  # all ranks saw the same rows: their mean is what one rank computes
            alone = cases.edits("GFGB", precision)
            assert results[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)


@three
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("model", "different models: extra.weight is nothing on rank 0 and"),
        ("values", "different initial values: final.weight"),
        ("config", "different configs: max_grad_norm is None on rank 0 and 1.5 on rank 1"),
        ("plan", "different plans: embed"),
        ("optimizer", "different optimizers: group 0 lr is 0.01 on rank 0 and 0.001 on rank 1"),
        ("version", "different versions: memferry_ascend is"),
    ],
)
def test_ranks_that_differ_are_told(world: World, what: str, named: str) -> None:
    for said in world.of("different", what=what):
        assert named in said


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_searched_plan_knows_its_ranks(world: World) -> None:
    ranks = world.of("searched")
    assert all(r["plan"] == ranks[0]["plan"] and r["period"] == ranks[0]["period"] > 0 for r in ranks)
    for r in ranks:
        fabric = r["fabric"]
        assert (fabric.ranks, fabric.nodes) == (2, 1)
        assert 0 < fabric.latency < 10 and fabric.bandwidth > 0
    assert {x[2:] for x in ranks[0]["plan"]} == {("stage", "host")}


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_byte_budget_counts_what_exchanges_take(world: World, cpu: mf.Runtime) -> None:
    from . import cases

    alone = cases.budgeted("rules", LIMIT)
    assert alone["held"] <= LIMIT
    for r in world.of("budgeted"):
        assert r["held"] <= LIMIT
        assert r["modes"].count("GFGB") < alone["modes"].count("GFGB")


@three
def test_what_is_refused(world: World) -> None:
    for said in world.of("whole_parameters_only"):
        assert "Spectral is not known to update each element by itself" in said
    for said in world.of("out_of_step"):
        assert "rank 0 in forward" in said
        assert "rank 1 in step" in said
    for both in world.of("reading_gradients"):
        assert all("every rank keeps only a part of each gradient" in said for said in both)


@three
def test_distributed_checkpoint(world: World, cpu: mf.Runtime, tmp_path: Path) -> None:
    saved = world.of("save_and_go_on")
    loaded = world.of("load_and_go_on")
    for r in loaded:
        assert same(r["loaded"], saved[0]["saved"])
        assert same(r["state"], saved[0]["state"])  # the same number of ranks: the same bits
    folder = world.folder / "dcp"
    # One rank, with the library.
    model = make_model(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_units():
        engine = mf.ferry(model, optimizer, config=mf.Config(), plan=plan_for(model, "GFGB"))
    distributed_checkpoint.load(engine, folder)
    assert same(engine.state_dict(), saved[0]["saved"])
    distributed_checkpoint.save(engine, tmp_path / "one")
    engine.close()
    # No library at all.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    for source in (folder, tmp_path / "one"):
        dcp_to_torch_save(source, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert same(state["model"], saved[0]["saved"]["model"])
        make_model(4).load_state_dict(state["model"])
        for name, moments in saved[0]["saved"]["optimizer"].items():
            assert same(state["optimizer"][name], moments)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_two_nodes_of_two_ranks(world: World, cpu: mf.Runtime) -> None:
    assert world.of("nodes") == [(0, 2, 0, [0, 1]), (0, 2, 1, [0, 1]), (1, 2, 0, [2, 3]), (1, 2, 1, [2, 3])]
    runs = [r for (_, a), r in zip(world.cases, world.results, strict=True) if a.get("seed") == ON_NODES]
    assert len(runs) == len(NODES)
    for group in (runs[:2], runs[2:]):
        want = group[0][0]
        for got in (r for run in group for r in run):
            assert got["losses"] == want["losses"]
            assert got["norms"] == want["norms"]
            assert same(got["state"], want["state"] | {"param_groups": got["state"]["param_groups"]})
    torch.manual_seed(0)
    alone = train(steps=3, seed=ON_NODES)
    assert runs[0][0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_forwards_that_not_all_ranks_run_are_told(world: World) -> None:
    for said in world.of("one_more_forward"):
        assert "rank 0 in another forward after 0 settled passes and 1 forwards" in said
        assert "rank 1 in step after 0 settled passes and 1 forwards" in said


def test_init_refuses_half_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        mf.ConfigError, match="RANK, MASTER_ADDR, MASTER_PORT is not set; start with torchrun"
    ):
        runtime.init(backend="cpu")
