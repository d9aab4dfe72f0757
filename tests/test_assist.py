"""Who assists whom: what `Config.assist_devices` may name, alone and with several ranks on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import toy_fabric
from memferry_ascend.topology import Figures, Measured, MeasuredPath, PathSet, load

import memferry_ascend as mf
from memferry_ascend import assist, runtime
from memferry_ascend.errors import ConfigError, FerryError

FABRIC = toy_fabric(8, host=240)


@pytest.fixture
def fabric(tmp_path: Path) -> str:
    file = tmp_path / "toy.yaml"
    file.write_text(FABRIC)
    return str(file)


def start(fabric: str) -> runtime.Runtime:
    return runtime.init(topology=fabric, backend="cpu")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((0,), "target itself"),
        ((9,), "device 9 is absent, the topology has devices 0 to 7"),
        ((1, 1), "each device once"),
        (("npu1",), "expected device indices"),
        ((-1,), "absent"),
    ],
)
def test_assisting_devices_that_cannot_assist(fabric: str, devices: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assist.for_engine(start(fabric), mf.Config(assist_devices=devices))


def test_assisting_devices_need_a_topology(cpu: runtime.Runtime) -> None:
    with pytest.raises(ConfigError, match="memferry probe"):
        assist.for_engine(cpu, mf.Config(assist_devices=(1,)))


def test_a_device_that_trains_is_busy(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="busy, it trains as local rank 1 of 2"):
        assist.for_engine(start(fabric), mf.Config(assist_devices=(1,)))


def test_a_second_engine_finds_the_peers_busy(fabric: str) -> None:
    rt, config = start(fabric), mf.Config(assist_devices=(1,))
    first = assist.for_engine(rt, config)
    assert first is not None
    with pytest.raises(FerryError, match="busy"):
        assist.for_engine(rt, config)
    first.close()
    again = assist.for_engine(rt, config)
    assert again is not None
    again.close()


# -- several ranks -----------------------------------------------------------------------------------------------------
def rank(monkeypatch: pytest.MonkeyPatch, fabric: str, number: int, of: int) -> runtime.Runtime:
    """The runtime of one rank of a node."""
    runtime.reset()
    monkeypatch.setenv("LOCAL_RANK", str(number))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of))
    return start(fabric)


def peers_of(transfers: object) -> list[str]:
    return [p.via for p in transfers._paths["h2d"].paths if p.via is not None]  # type: ignore[attr-defined]


def test_ranks_share_the_assisting_devices_out(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have 240 GB/s to share: 50 each directly, which leaves room for the two assistants."""
    found = []
    for number in range(2):
        rt = rank(monkeypatch, fabric, number, 2)
        made = assist.for_engine(rt, mf.Config(assist_devices=(2, 3)))
        assert made is not None
        assert made._paths["h2d"].paths[0].device == f"npu{number}"
        found.append(peers_of(made))
        assert made._paths["h2d"].joint_bandwidth() == pytest.approx(100e9)
        made.close()
    assert sorted(peer for peers in found for peer in peers) == ["npu2", "npu3"]
    assert all(len(peers) == 1 for peers in found)


def test_a_rank_counts_on_what_the_others_leave(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks take 200 of 240 GB/s directly; whatever assists only shares the rest."""
    made = assist.for_engine(rank(monkeypatch, fabric, 0, 4), mf.Config(assist_devices=(4, 5, 6, 7)))
    assert made is not None
    assert made._paths["h2d"].joint_bandwidth() == pytest.approx(60e9)
    assert made._paths["d2h"].joint_bandwidth() == pytest.approx(60e9)
    made.close()


@pytest.mark.parametrize("peer", [1, 2, 3])
def test_a_peer_that_trains_lends_nothing(fabric: str, monkeypatch: pytest.MonkeyPatch, peer: int) -> None:
    with pytest.raises(ConfigError, match=f"device {peer} is busy, it trains as local rank {peer} of 4"):
        assist.for_engine(rank(monkeypatch, fabric, 0, 4), mf.Config(assist_devices=(4, peer)))


def test_a_probe_of_the_ranks_own_device_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Figures(1e-5, 5e10)
    rows = [("direct", None), ("via cuda:2", "cuda:2"), ("via cuda:3", "cuda:3")]
    one = [MeasuredPath(name, "host", "cuda:0", via, figures, figures) for name, via in rows]
    two = [MeasuredPath(name, "host", "cuda:1", via, figures, figures) for name, via in rows]
    file = tmp_path / "probe.json"
    config = mf.Config(assist_devices=(2, 3))
    Measured("both", (*one, *two)).save(file)
    for number in range(2):
        made = assist.for_engine(rank(monkeypatch, str(file), number, 2), config)
        assert made is not None and peers_of(made) == [f"cuda:{2 + number}"]
        made.close()
    Measured("first", tuple(one)).save(file)
    with pytest.raises(ConfigError, match="own device 1 is not in the topology"):
        assist.for_engine(rank(monkeypatch, str(file), 1, 2), config)
    Measured("lacks", (*one, *two[:2])).save(file)
    with pytest.raises(ConfigError, match="no h2d path to cuda:1 through cuda:3; probe again"):
        assist.for_engine(rank(monkeypatch, str(file), 1, 2), config)


# -- ranks that lend to each other -------------------------------------------------------------------------------------
def lent(fabric: str, wishes: dict[int, tuple[int, ...]], mine: int = 0) -> dict[str, PathSet]:
    """Paths of device `mine` by direction, of a node whose ranks ask for `wishes`."""
    found = load(fabric)
    return assist._paths(found, assist.device_names(found), len(wishes), wishes, mine)


def vias(paths: PathSet) -> list[str | None]:
    return [p.via for p in paths.paths]


def test_a_device_that_trains_lends_what_all_others_leave(tmp_path: Path) -> None:
    """Two ranks with 50 GB/s each and a host with 130: 30 are left, which both ask for."""
    file = tmp_path / "toy.yaml"
    file.write_text(toy_fabric(4, host=130))
    for wishes, each in (({0: (1,), 1: ()}, 30e9), ({0: (1,), 1: (0,)}, 15e9)):
        for paths in lent(str(file), wishes).values():
            assert vias(paths) == [None, "npu1"]
            rates = [p.bandwidth for p in paths.together()]
            assert sum(rates) == pytest.approx(50e9 + each)
    # An idle device comes first, and leaves nothing here.
    with pytest.warns(RuntimeWarning, match="npu1 lends nothing"):
        found = lent(str(file), {0: (1, 2), 1: ()})
    assert all(vias(paths) == [None, "npu2"] for paths in found.values())


def test_own_links_of_a_lender_are_its_own_first(tmp_path: Path) -> None:
    """The lender's link has 60 GB/s, of which its own copies take 50."""
    file = tmp_path / "toy.yaml"
    file.write_text(toy_fabric(2, host=900).replace("bandwidth: 200 GB/s", "bandwidth: 60 GB/s"))
    for paths in lent(str(file), {0: (1,), 1: ()}).values():
        assert vias(paths) == [None, "npu1"]
        shares = paths.split(60 << 20)
        assert shares[1] / sum(shares) == pytest.approx(1 / 6, abs=0.01)


def test_without_a_model_of_links_a_lender_shares_evenly(tmp_path: Path) -> None:
    figures = Figures(0.0, 4e10)
    rows = [
        MeasuredPath(name, "host", f"npu:{d}", via, figures, figures)
        for d in range(3)
        for name, via in [("direct", None), *((f"via npu:{p}", f"npu:{p}") for p in range(3) if p != d)]
    ]
    file = tmp_path / "probe.json"
    Measured("three", tuple(rows)).save(file)
    paths = lent(str(file), {0: (1,), 1: (), 2: (1,)})["h2d"]
    assert [p.bandwidth for p in paths.paths] == [4e10, pytest.approx(4e10 / 3)]  # itself, npu:0, npu:2
    Measured("lacks", tuple(r for r in rows if r.via != "npu:1")).save(file)
    with pytest.raises(ConfigError, match="no h2d path to npu:0 through npu:1; probe again"):
        lent(str(file), {0: (1,), 1: ()})


def test_each_rank_may_have_idle_devices_of_its_own(fabric: str) -> None:
    for mine, peer in ((0, "npu2"), (1, "npu3")):
        for paths in lent(fabric, {0: (2,), 1: (3,)}, mine).values():
            assert vias(paths) == [None, peer]


def test_a_rank_that_asked_for_nothing_has_no_paths(fabric: str) -> None:
    assert lent(fabric, {0: (1,), 1: ()}, mine=1) == {}
