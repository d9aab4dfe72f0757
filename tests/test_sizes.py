"""Sizes are read exactly, written readably, and refused with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_ascend import sizes
from memferry_ascend.errors import ConfigError, FerryError, unknown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        (" 1.5 mib ", 3 * 2**19),
        ("500MB", 500_000_000),
        ("1KB", 1000),
        ("2TiB", 2**41),
        ("1PiB", 2**50),
        ("7", 7),
        ("12B", 12),
        ("1_000", 1000),
        (".5KiB", 512),
        (0, 0),
        (4096, 4096),
        ("9007199254740993", 2**53 + 1),  # a float would lose the last bit
        ("0.1GiB", 2**30 // 10),
    ],
)
def test_parse(text, expected):
    assert sizes.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24G", "write 24GiB .* or 24GB"),
        ("24GiBs", "unknown unit 'GiBs'"),
        ("nan", "cannot read"),
        ("inf", "cannot read"),
        ("", "cannot read"),
        ("GiB", "cannot read"),
        ("1e9", "cannot read"),
        ("1,5GiB", "cannot read"),
        ("-1GiB", "negative"),
        (-1, "negative"),
        (True, "not True"),
        (1.5, "not 1.5"),
        (float("nan"), "not nan"),
        (None, "not None"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ConfigError, match=message):
        sizes.parse(text)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_fmt(nbytes, expected):
    assert sizes.fmt(nbytes) == expected


@given(st.integers(min_value=0, max_value=2**60))
def test_fmt_reads_back_within_half_a_hundredth(nbytes):
    unit = sizes.parse("1" + sizes.fmt(nbytes).split()[1])
    assert abs(sizes.parse(sizes.fmt(nbytes)) - nbytes) <= unit * 0.005 + 1


def test_errors_are_one_family():
    assert issubclass(ConfigError, FerryError)
    assert issubclass(ConfigError, ValueError)
    assert "did you mean 'planner'" in str(unknown("key", "planer", ["planner", "update"]))
    assert "did you mean" not in str(unknown("key", "zzz", ["planner", "update"]))


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 127, 128, 129, 4_754_699_892, (1 << 40) - 1, 1 << 40])
def test_coarse_sizes_are_a_little_larger_and_stay(nbytes: int) -> None:
    found = sizes.coarse(nbytes)
    assert nbytes <= found <= nbytes + nbytes // 64
    assert sizes.coarse(found) == found
    a_little_less = nbytes - nbytes // 1000
    assert found - sizes.coarse(a_little_less) <= max(1, nbytes // 32)
