"""Who assists whom: what `Config.assist_devices` may name, alone and with several ranks on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import toy_fabric
from memferry_ascend.topology import Figures, Measured, MeasuredPath

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
