"""`split` is the optimum: compared with a numeric minimisation, the paper's closed form, and hard cases by
hand.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memferry_ascend.topology.dispatch import ALIGNMENT, Path, finish_time, split, threshold

MIB = 1 << 20


def bisect_finish(nbytes: np.ndarray, latency: np.ndarray, bandwidth: np.ndarray) -> np.ndarray:
    """Earliest common finish time per row by bisection on bytes moved by time T; unused columns have
    bandwidth 0.
    """
    lo = np.zeros(len(nbytes))
    alone = np.where(bandwidth > 0, latency + nbytes[:, None] / np.where(bandwidth > 0, bandwidth, 1), np.inf)
    hi = alone.min(axis=1)
    for _ in range(200):
        mid = (lo + hi) / 2
        moved = (bandwidth * np.clip(mid[:, None] - latency, 0, None)).sum(axis=1)
        enough = moved >= nbytes
        hi, lo = np.where(enough, mid, hi), np.where(enough, lo, mid)
    return np.where(nbytes > 0, hi, 0.0)


def random_cases(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    k = rng.integers(1, 9, count)
    latency = 10 ** rng.uniform(-7, -3, (count, 8))
    bandwidth = 10 ** rng.uniform(8, 11.5, (count, 8))
    equal = rng.random(count) < 0.15  # equal latencies
    latency[equal] = latency[equal][:, :1]
    zero = rng.random(count) < 0.05  # no startup cost at all
    latency[zero] = 0.0
    dominated = rng.random(count) < 0.15  # one path slower in every respect
    latency[dominated, 0], bandwidth[dominated, 0] = 1.0, 1e6
    bandwidth[np.arange(8)[None, :] >= k[:, None]] = 0.0
    nbytes = (10 ** rng.uniform(0, 10, count)).astype(np.int64)
    nbytes[rng.random(count) < 0.02] = 0
    at = (rng.random(count) < 0.1) & (k >= 2)  # sizes at, just under and just above the two-path threshold
    edge = bandwidth[:, 0] * np.clip(latency[:, 1] - latency[:, 0], 0, None)
    nbytes[at] = np.minimum(edge[at], 1e11).astype(np.int64) + rng.integers(-1, 2, count)[at].clip(0)
    return k, latency, bandwidth, nbytes


def test_equals_numeric_minimum_on_10000_cases() -> None:
    k, latency, bandwidth, nbytes = random_cases(10_000, seed=7)
    best = bisect_finish(nbytes.astype(float), latency, bandwidth)
    assert (nbytes == 0).sum() > 50
    for row in range(len(k)):
        paths = [Path(str(i), latency[row, i], bandwidth[row, i]) for i in range(k[row])]
        size = int(nbytes[row])
        shares = split(size, paths)
        assert sum(shares) == size
        assert min(shares) >= 0
        # Whole blocks cost at most one block on the slowest path of the continuous optimum.
        used = [p.bandwidth for p in paths if p.latency <= best[row]]
        slack = ALIGNMENT / min(used) if size else 0.0
        found = finish_time(shares, paths)
        assert best[row] * (1 - 1e-9) <= found + 1e-15
        assert found <= best[row] * (1 + 1e-9) + slack


def test_two_paths_are_the_closed_form_of_the_paper() -> None:
    rng = np.random.default_rng(3)
    for _ in range(2000):
        direct = Path("direct", 10 ** rng.uniform(-6, -4), 10 ** rng.uniform(9, 11))
        assisted = Path("assisted", direct.latency + 10 ** rng.uniform(-6, -4), 10 ** rng.uniform(9, 11))
        size = int(10 ** rng.uniform(3, 10))
        b_d, b_a = direct.bandwidth, assisted.bandwidth
        x = b_d * (size + b_a * (assisted.latency - direct.latency)) / (b_d + b_a)
        x = min(max(x, 0.0), float(size))
        assert split(size, [direct, assisted])[0] == pytest.approx(x, abs=2 * ALIGNMENT)
        assert sum(split(size, [assisted, direct])) == size


@pytest.mark.parametrize("offset", [-512, -1, 0])
def test_one_path_up_to_the_threshold(offset: int) -> None:
    direct, assisted = Path("direct", 10e-6, 50e9), Path("assisted", 30e-6, 400e9)
    edge = threshold(direct, assisted)
    assert edge == pytest.approx(1_000_000)
    size = int(edge) + offset
    assert split(size, [direct, assisted]) == [size, 0]
    assert split(size, [assisted, direct]) == [0, size]


def test_both_paths_finish_together_above_the_threshold() -> None:
    paths = [Path("direct", 10e-6, 50e9), Path("assisted", 30e-6, 40e9)]
    shares = split(64 * MIB, paths)
    times = [p.seconds(n) for n, p in zip(shares, paths, strict=True)]
    assert min(shares) > 0
    assert times[0] == pytest.approx(times[1], abs=2 * ALIGNMENT / 40e9)


def test_a_dominated_path_carries_nothing() -> None:
    assert split(16 * MIB, [Path("slow", 1.0, 1e6), Path("fast", 1e-6, 50e9)]) == [0, 16 * MIB]


def test_equal_latencies_divide_by_bandwidth() -> None:
    paths = [Path("a", 5e-6, 10e9), Path("b", 5e-6, 30e9)]
    assert split(4 * MIB, paths) == [MIB, 3 * MIB]
    assert split(100, paths) == [0, 100]  # one block: it goes where it finishes first


def test_zero_bytes_and_a_single_path() -> None:
    assert split(0, [Path("a", 1e-6, 1e9), Path("b", 1e-6, 1e9)]) == [0, 0]
    assert split(1000, [Path("a", 1e-6, 1e9)]) == [1000]
    assert finish_time([0, 0], [Path("a", 1e-6, 1e9), Path("b", 1e-6, 1e9)]) == 0.0


paths_strategy = st.lists(
    st.builds(Path, st.just("p"), st.floats(0, 1e-3), st.floats(1e6, 1e12)), min_size=1, max_size=8
)


@given(st.integers(0, 1 << 62), paths_strategy, st.sampled_from([0, 512, 1 << 16, 1 << 24]))
@settings(max_examples=300, deadline=None)
def test_sums_exactly_keeps_offsets_aligned_and_respects_min_chunk(
    nbytes: int, paths: list, chunk: int
) -> None:
    shares = split(nbytes, paths, min_chunk=chunk)
    assert sum(shares) == nbytes
    offset = 0
    for n in shares:
        if n:
            assert offset % ALIGNMENT == 0
        offset += n
    used = [n for n in shares if n]
    if len(used) > 1:
        assert min(used) >= chunk - ALIGNMENT


def test_min_chunk_keeps_the_best_single_path() -> None:
    # Together the first path would carry more, alone the second is faster.
    paths = [Path("near", 0.0, 10e9), Path("far", 80e-6, 100e9)]
    size = 1_100_000
    both = split(size, paths)
    assert min(both) > 0
    alone = split(size, paths, min_chunk=size)
    assert sorted(alone) == [0, size]
    assert finish_time(alone, paths) == min(p.seconds(size) for p in paths)


def test_bad_input_is_refused() -> None:
    good = Path("a", 0.0, 1e9)
    with pytest.raises(ValueError, match="latency"):
        Path("a", -1e-9, 1e9)
    for bandwidth in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bandwidth"):
            Path("a", 0.0, bandwidth)
    with pytest.raises(ValueError, match="at least one path"):
        split(1, [])
    with pytest.raises(ValueError, match="nbytes=-1"):
        split(-1, [good])
    with pytest.raises(ValueError):
        finish_time([1, 2], [good])
