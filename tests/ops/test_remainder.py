"""The split master: hi + lo is the fp32 master, for every pattern."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memferry_ascend import hostmath

CANONICAL_NAN = 0x7FC00000


def split_and_join(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hi (uint16), lo (int16) and the joined bits (uint32) of uint32 patterns."""
    master = torch.from_numpy(bits.view(np.float32).copy())
    hi = torch.empty(len(bits), dtype=torch.bfloat16)
    lo = torch.empty(len(bits), dtype=torch.int16)
    out = torch.empty(len(bits))
    hostmath.split_master(master, hi, lo)
    hostmath.join_master(hi, lo, out)
    return hi.view(torch.int16).numpy().view(np.uint16), lo.numpy(), out.numpy().view(np.uint32)


def check(bits: np.ndarray) -> None:
    hi, lo, joined = split_and_join(bits)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    expected = np.where(nan, np.uint32(CANONICAL_NAN), bits)
    wide = expected.astype(np.uint64)
    np.testing.assert_array_equal(joined, expected)
    np.testing.assert_array_equal(hi, ((wide + 0x8000) >> 16).astype(np.uint16))
    np.testing.assert_array_equal(lo, (wide & 0xFFFF).astype(np.uint16).view(np.int16))


def test_every_boundary_pattern_round_trips():
    # every upper half with the lower halves around a tie, a carry and the ends
    lower = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    check((upper[:, None] | lower[None, :]).reshape(-1))


def test_a_dense_sample_of_patterns_round_trips():
    check(np.arange(0, 1 << 32, 4093, dtype=np.uint64).astype(np.uint32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
def test_any_patterns_round_trip(patterns):
    check(np.array(patterns, dtype=np.uint32))


@pytest.mark.slow
def test_all_patterns_round_trip():
    before = hostmath.threads()
    hostmath.set_threads(
        1
    )  # other tests cover the threads; on a busy machine waking them takes longer than this
    try:
        step = 1 << 20
        for begin in range(0, 1 << 32, step):
            check(np.arange(begin, begin + step, dtype=np.uint64).astype(np.uint32))
    finally:
        hostmath.set_threads(before)


def test_hi_is_the_nearest_bf16():
    bits = np.arange(0, 0x7F800000, 65521 // 4, dtype=np.uint32)
    hi, lo, _ = split_and_join(bits)
    expected = (
        torch.from_numpy(bits.view(np.float32).copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )
    tie = lo == -0x8000  # torch rounds these to even, we away from zero
    np.testing.assert_array_equal(hi[~tie], expected[~tie])
    assert np.all(hi[tie].astype(np.int32) - expected[tie] <= 1)


def test_a_master_that_rounds_to_infinity_stays_finite():
    bits = np.array(
        [0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0xFF7FFFFF, 0x7F800000, 0xFF800000], dtype=np.uint32
    )
    hi, lo, joined = split_and_join(bits)
    np.testing.assert_array_equal(hi, [0x7F7F, 0x7F80, 0x7F80, 0xFF80, 0xFF80, 0x7F80, 0xFF80])
    np.testing.assert_array_equal(lo, [0x7FFF, -0x8000, -1, -0x8000, -1, 0, 0])
    np.testing.assert_array_equal(joined, bits)


def test_every_nan_is_stored_as_one_pattern():
    bits = np.array(
        [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], dtype=np.uint32
    )
    hi, lo, joined = split_and_join(bits)
    assert set(hi) == {0x7FC0}
    assert set(lo) == {0}
    assert set(joined) == {CANONICAL_NAN}


def test_arguments_are_checked():
    master, hi, lo = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
    with pytest.raises(TypeError, match=r"hi: expected torch\.bfloat16, found torch\.float16"):
        hostmath.split_master(master, hi.half(), lo)
    with pytest.raises(ValueError, match="lo: expected 8 elements, found 7"):
        hostmath.split_master(master, hi, lo[:7])
    with pytest.raises(ValueError, match="master: expected contiguous memory"):
        hostmath.split_master(torch.zeros(16)[::2], hi, lo)
    with pytest.raises(ValueError, match="expected host memory, found a tensor on meta"):
        hostmath.join_master(hi.to("meta"), lo, master)
    both = torch.zeros(8)
    with pytest.raises(ValueError, match="overlaps"):
        hostmath.join_master(both.view(torch.bfloat16)[:8], lo, both)
