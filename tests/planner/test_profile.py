"""Profiles: validation names layer and field, JSON says infinity, files are whole or refused."""

import json
import math

import pytest

from memferry_ascend.planner import LayerProfile, LinkProfile, Profile

LINK = LinkProfile(h2d=12e9, d2h=12e9, duplex=20e9, latency=1e-5)


def layer(name: str = "a", **changes) -> LayerProfile:
    values = {
        "name": name, "kind": "Linear", "bytes": 1024, "t_trans": 1e-4, "t_fp": 1e-4, "t_bp": 2e-4,
        "t_fp_dha": math.inf, "t_bp_dha": math.inf, "t_bp_grad_direct": 3e-4, "t_gap_fp": 0.0, "t_gap_bp":
        0.0, "t_update": 1e-4, "dha_bytes": 1024,
    }  # fmt: skip
    return LayerProfile(**{**values, **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("t_fp", -1.0), ("t_bp", math.nan), ("t_trans", math.inf), ("t_update", "1"), ("bytes", 1.5),
        ("bytes", -1), ("dha_bytes", True), ("itemsize", 0), ("trainable", 1), ("shares", 3),
        ("t_host_fp", -1.0), ("t_host_bp", math.inf),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_its_layer(field, value):
    with pytest.raises(ValueError, match=rf"layer 'enc\.0'.*{field}"):
        layer("enc.0", **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("h2d", 0), ("duplex", math.nan), ("latency", -1), ("host_memory", 0)]
)
def test_a_bad_link_field_is_named(field, value):
    values = {"h2d": 1e9, "d2h": 1e9, "duplex": 2e9, "latency": 0.0, "host_memory": None, field: value}
    with pytest.raises(ValueError, match=f"link: {field}"):
        LinkProfile(**values)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "at least one layer"),
        ((layer("a"), layer("b"), layer("a")), "layer 'a' appears more than once"),
        ((layer("a", shares="b"),), "layer 'a': shares names 'b', which is no other layer"),
        ((layer("a", shares="a"),), "which is no other layer"),
        ((layer("a"), layer("b", shares="a"), layer("c", shares="b")), "layer 'c'.*name the owner"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        Profile(layers=layers, link=LINK)


def test_a_tied_layer_counts_only_what_is_its_own():
    profile = Profile(
        layers=(layer("emb", bytes=1000), layer("mid"), layer("head", bytes=1100, shares="emb")), link=LINK
    )
    assert profile.own_bytes == (1000, 1024, 100)
    assert profile.own_fraction == (1.0, 1.0, 100 / 1100)
    assert profile.readers == ((0, 2), (1,), ())


def test_json_and_files_keep_everything_and_stay_valid_json(tmp_path):
    profile = Profile(
        layers=(layer("a", recompute=True), layer("b", shares="a", trainable=False, t_fp_dha=2e-4)),
        link=LINK,
        base_bytes=7,
    )
    text = json.dumps(profile.to_json(), allow_nan=False)
    assert Profile.from_json(json.loads(text)) == profile
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    assert not profile.layers[0].dha_usable
    assert profile.layers[1].dha_usable


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        Profile(layers=(layer(),), link=LINK).save(path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def break_missing(document):
    del document["layers"][0]["t_bp"]


def break_unknown(document):
    document["layers"][0]["colour"] = 1


def break_version(document):
    document["version"] = 99


def break_link(document):
    document["link"] = None


def break_infinity(document):
    document["layers"][0]["t_fp"] = "inf"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_missing, "layer 'a'.*t_bp"),
        (break_unknown, "layer 'a'.*colour"),
        (break_version, "version 1, found 99"),
        (break_link, "link"),
        (break_infinity, "layer 'a'.*t_fp"),
    ],
)
def test_a_damaged_file_says_what_is_wrong_and_where(tmp_path, damage, message):
    document = Profile(layers=(layer(),), link=LINK).to_json()
    damage(document)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"broken\.json: .*{message}"):
        Profile.load(path)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"format": "memferry profile", "version": 1}', '{"x": NaN}', "\xff"]
)
def test_a_corrupt_file_is_refused(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"broken\.json"):
        Profile.load(path)
