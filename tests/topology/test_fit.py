"""Fits find the true figures through noise and outliers; bottlenecks are named once."""

import random

import pytest
from memferry_ascend.topology.fit import Bottleneck, fit, medians, shared_bottlenecks

SIZES = [1 << p for p in range(12, 29)]


def noisy(latency: float, bandwidth: float, seed: int, *, repeats: int = 7, outliers: float = 0.15) -> list:
    """Samples with 3 % noise, and some that are 2 to 20 times late: the tail of real timings."""
    rng = random.Random(seed)
    samples = []
    for size in SIZES:
        for _ in range(repeats):
            seconds = (latency + size / bandwidth) * rng.gauss(1.0, 0.03)
            if rng.random() < outliers:
                seconds *= rng.uniform(2, 20)
            samples.append((size, seconds))
    rng.shuffle(samples)
    return samples


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(10e-6, 55e9), (59e-6, 51e9), (1e-6, 3e9), (200e-6, 300e9)]
)
def test_finds_the_figures_through_noise_and_outliers(seed: int, latency: float, bandwidth: float) -> None:
    result = fit(noisy(latency, bandwidth, seed))
    assert result.bandwidth == pytest.approx(bandwidth, rel=0.06)
    # A microsecond beside 3 GB/s shows only in the few smallest sizes.
    assert result.latency == pytest.approx(latency, rel=0.06 if latency * bandwidth > 1e5 else 0.2)
    assert result.error < 0.06
    assert result.sizes == len(SIZES)


def test_exact_samples_give_the_exact_line() -> None:
    result = fit([(n, 5e-6 + n / 20e9) for n in SIZES])
    assert result.latency == pytest.approx(5e-6, rel=1e-6)
    assert result.bandwidth == pytest.approx(20e9, rel=1e-9)
    assert result.path("direct").seconds(1 << 20) == pytest.approx(5e-6 + (1 << 20) / 20e9)


def test_whole_sizes_that_are_wrong_do_not_move_the_fit() -> None:
    wrong = {SIZES[3], SIZES[9], SIZES[14], SIZES[16]}  # the largest, too
    samples = [(n, (10e-6 + n / 50e9) * (4 if n in wrong else 1)) for n in SIZES]
    result = fit(samples)
    assert result.bandwidth == pytest.approx(50e9, rel=0.02)
    assert result.latency == pytest.approx(10e-6, rel=0.05)


def test_the_measured_h200_copies() -> None:
    """Bandwidths as measured on one H200; the fit is close to what the fabric file states."""
    measured = {64 << 10: 3e9, 1 << 20: 35e9, 4 << 20: 49e9, 16 << 20: 53e9, 256 << 20: 55e9}
    result = fit([(n, n / b) for n, b in measured.items()])
    assert result.bandwidth == pytest.approx(55.3e9, rel=0.02)
    # No line meets both 64 KiB (22 us) and 1 MiB (30 us): the latency lies between what each would say.
    assert 10e-6 < result.latency < 22e-6


def test_bad_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="two sizes, found 1"):
        fit([(1024, 1e-6), (1024, 2e-6)])
    with pytest.raises(ValueError, match="larger copies to take longer"):
        fit([(1024, 2e-6), (4096, 1e-6)])
    for sample in ((0, 1e-6), (1, 0.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="above zero"):
            fit([sample, (4096, 1e-6)])


def test_repeats_become_medians() -> None:
    assert medians([(2, 9.0), (1, 3.0), (2, 1.0), (2, 2.0)]) == [(1, 3.0), (2, 2.0)]


def test_shared_bottlenecks_are_named_once() -> None:
    rng = random.Random(3)
    true = {"direct": 55e9, "via 1": 50e9, "via 2": 50e9}
    alone = [(name, b * rng.gauss(1, 0.01)) for name, b in true.items() for _ in range(5)]
    together = []
    for _ in range(5):
        together += [
            (("direct", "via 1"), 104e9 * rng.gauss(1, 0.01)),
            (("via 2", "via 1"), 52e9 * rng.gauss(1, 0.01)),  # below one switch
            (("direct", "via 2"), 103e9 * rng.gauss(1, 0.01)),
            (("direct", "via 1", "via 2"), 106e9 * rng.gauss(1, 0.01)),  # explained by the pair
        ]
    together += [(("via 1", "via 2"), 5e9)]  # one late run
    found = shared_bottlenecks(alone, together)
    assert [b.names for b in found] == [("via 1", "via 2")]
    assert found[0].bandwidth == pytest.approx(52e9, rel=0.05)


def test_a_group_tighter_than_its_pairs_is_reported_too() -> None:
    alone = [("a", 50.0), ("b", 50.0), ("c", 50.0)]
    together = [(("a", "b"), 100.0), (("b", "c"), 100.0), (("a", "c"), 100.0), (("a", "b", "c"), 110.0)]
    assert shared_bottlenecks(alone, together) == [Bottleneck(("a", "b", "c"), 110.0)]
    assert shared_bottlenecks(alone, together[:3]) == []
    with pytest.raises(KeyError, match="no such measurement of d"):
        shared_bottlenecks(alone, [(("a", "d"), 60.0)])
    with pytest.raises(ValueError, match="above 0"):
        shared_bottlenecks([("a", 0.0)], [])
