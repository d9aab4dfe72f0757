"""Gradient accumulation, norms and plain copies on the pool."""

import itertools
import math

import numpy as np
import pytest
import torch
from adam_cases import placed, values

from memferry_ascend import hostmath

SIZES = [0, 1, 15, 16, 17, 1_000, 16_384, 16_385, 100_003]


@pytest.fixture(autouse=True)
def restore():
    before = hostmath.threads()
    yield
    hostmath.set_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("n", SIZES)
def test_accumulation_is_an_fp32_sum_in_order(n, scale, dtype):
    grads = [placed(values(n, seed).to(dtype), offset=seed) for seed in range(3)]
    acc = placed(torch.full((n,), float("nan")), offset=1)  # the first gradient replaces what was there
    expected = torch.zeros(0)
    for i, grad in enumerate(grads):
        hostmath.accumulate(acc, grad, first=i == 0, scale=scale)
        scaled = grad.float() * torch.tensor(scale)
        expected = scaled if i == 0 else expected + scaled
    assert torch.equal(acc.view(torch.int32), expected.view(torch.int32))


def test_accumulation_does_not_depend_on_threads():
    acc, grad = values(150_001, 1), values(150_001, 2).bfloat16()
    found = []
    for threads in (1, 2, 5):
        hostmath.set_threads(threads)
        out = acc.clone()
        hostmath.accumulate(out, grad, first=False, scale=0.7)
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
def test_sum_of_squares_is_right_and_repeats(n, dtype):
    grad = values(n, seed=n, low=-15, high=15).to(dtype)
    exact = math.fsum(x * x for x in grad.double().tolist())
    found = set()
    for threads, offset in itertools.product((1, 2, 5), (0, 3)):
        hostmath.set_threads(threads)
        found.add(hostmath.sum_squares(placed(grad, offset)))
    assert len(found) == 1
    assert found.pop() == pytest.approx(exact, rel=1e-12)


def test_sum_of_squares_passes_on_what_is_not_finite():
    grad = values(20_000, seed=3)
    grad[17_000] = float("inf")
    assert hostmath.sum_squares(grad) == math.inf
    grad[3] = float("nan")
    assert math.isnan(hostmath.sum_squares(grad))


@pytest.mark.parametrize("n", [0, 1, 4_097, 3 * (1 << 20) + 5])
def test_bytes_are_copied_and_no_others(n):
    source = np.random.default_rng(n).integers(0, 256, n + 2, dtype=np.uint8)
    target = np.zeros(n + 2, dtype=np.uint8)
    hostmath.copy_bytes(target.ctypes.data + 1, source.ctypes.data + 1, n)
    np.testing.assert_array_equal(target[1 : n + 1], source[1 : n + 1])
    assert target[0] == target[n + 1] == 0


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"acc: expected torch\.float32, found torch\.bfloat16"):
        hostmath.accumulate(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), first=True)
    with pytest.raises(ValueError, match="grad: expected 4 elements, found 5"):
        hostmath.accumulate(torch.zeros(4), torch.zeros(5), first=True)
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16 or torch\.float32, found torch\.float64"):
        hostmath.sum_squares(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, found list"):
        hostmath.sum_squares([1.0])  # type: ignore[arg-type]
    memory = np.zeros(64, dtype=np.uint8).ctypes.data
    with pytest.raises(ValueError, match="overlap"):
        hostmath.copy_bytes(memory, memory + 8, 16)
    with pytest.raises(ValueError, match="expected two addresses"):
        hostmath.copy_bytes(0, memory, 8)
