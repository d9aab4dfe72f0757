"""The host AdamW against torch's, and against itself wherever bits must not change."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from adam_cases import assert_close_to_torch, assert_same_bits, result, segment, state, torch_update
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_ascend import hostmath
from memferry_ascend.hostmath import AdamHyper, AdamProgram, AdamSegment

HYPERS = {
    "adamw": AdamHyper(lr=1e-3, weight_decay=0.01, step=7),
    "first step": AdamHyper(lr=3e-4, weight_decay=0.1, step=1),
    "no decay": AdamHyper(lr=1e-3, step=3),
    "adam l2": AdamHyper(lr=1e-3, weight_decay=0.05, step=7, decoupled=False),
    "maximize": AdamHyper(lr=1e-3, weight_decay=0.01, step=7, maximize=True),
    "scaled": AdamHyper(lr=1e-3, weight_decay=0.01, step=7, grad_scale=0.125),
    "late": AdamHyper(lr=1e-5, beta2=0.95, weight_decay=0.01, step=10_000_000),
    "small beta": AdamHyper(lr=1e-2, beta1=0.3, beta2=0.5, step=2),
    "half beta": AdamHyper(lr=1e-2, beta1=0.5, beta2=0.9, step=2),
    "zero betas": AdamHyper(lr=1e-2, beta1=0.0, beta2=0.0, step=5),
    "zero lr": AdamHyper(lr=0.0, weight_decay=0.1, step=5),
}


@pytest.fixture(autouse=True)
def restore():
    before = hostmath.threads()
    yield
    hostmath.set_threads(before)


def run(data, h, split=False, offset=0):
    s = segment(data, split, offset)
    AdamProgram([s]).run([h])
    return result(s)


@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_one_update_is_torchs(name, grad_dtype):
    data = state(20_011, seed=1, grad_dtype=grad_dtype)
    assert_close_to_torch(run(data, HYPERS[name]), data, HYPERS[name])


@pytest.mark.parametrize("name", ["adamw", "adam l2", "first step", "zero betas"])
@pytest.mark.parametrize(
    ("low", "high"), [(-45.0, -37.0), (-30.0, -10.0), (5.0, 18.0)], ids=["subnormal", "tiny", "huge"]
)
def test_extreme_values_are_torchs(name, low, high):
    data = state(4_099, seed=5, low=low, high=high)
    assert_close_to_torch(run(data, HYPERS[name]), data, HYPERS[name])


def test_a_fresh_state_is_torchs():
    data = state(1_000, seed=9)
    data["exp_avg"].zero_()
    data["exp_avg_sq"].zero_()
    data["grad"][:100] = 0.0
    h = AdamHyper(lr=1e-3, weight_decay=0.01, step=1)
    found = run(data, h)
    assert_close_to_torch(found, data, h)
    # no gradient, no moments: only the decay
    kept = data["param"][:100] * (1 - h.lr * h.weight_decay)
    np.testing.assert_array_equal(found["param"][:100], kept.numpy().view(np.uint32))


def test_infinities_and_nans_go_where_torch_puts_them():
    data = state(64, seed=2)
    data["grad"][3], data["grad"][5], data["grad"][7] = float("inf"), float("-inf"), float("nan")
    data["param"][9], data["param"][11] = float("inf"), float("nan")
    data["exp_avg_sq"][13] = float("inf")
    h = HYPERS["adamw"]
    found = run(data, h)
    expected = torch_update(data, h)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        a, b = found[name].view(np.float32), expected[name].numpy()
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
    split = run(data, h, split=True)
    assert split["param"][11] == 0x7FC00000


def test_many_updates_stay_close_to_torch():
    torch.manual_seed(0)
    n, h = 3_001, AdamHyper(lr=1e-2, weight_decay=0.01)
    param = torch.nn.Parameter(torch.randn(n))
    optimizer = torch.optim.AdamW([param], lr=h.lr, weight_decay=h.weight_decay, foreach=False)
    zeros = {"exp_avg": torch.zeros(n), "exp_avg_sq": torch.zeros(n)}
    s = segment({"grad": torch.zeros(n), "param": param.detach(), **zeros}, split=True)
    program = AdamProgram([s])
    for step in range(1, 101):
        param.grad = torch.randn(n)
        s.grad.copy_(param.grad)
        optimizer.step()
        program.run([dataclasses.replace(h, step=step)])
    found = torch.from_numpy(result(s)["param"].view(np.float32))
    torch.testing.assert_close(found, param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", HYPERS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_a_split_master_updates_as_an_fp32_parameter(name, grad_dtype):
    data = state(10_007, seed=3, grad_dtype=grad_dtype)
    plain = run({**data, "grad": data["grad"].float()}, HYPERS[name])
    assert_same_bits(run(data, HYPERS[name], split=True), plain)
    assert_same_bits(run(data, HYPERS[name]), plain)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 300),
    offset=st.integers(0, 17),
    split=st.booleans(),
    bf16=st.booleans(),
    name=st.sampled_from(sorted(HYPERS)),
    threads=st.integers(1, 3),
)
def test_bits_do_not_depend_on_where_a_vector_begins(n, offset, split, bf16, name, threads):
    data = state(300, seed=11, grad_dtype=torch.bfloat16 if bf16 else torch.float32)
    whole = run(data, HYPERS[name], split)
    hostmath.set_threads(threads)
    part = run({k: t[300 - n :] for k, t in data.items()}, HYPERS[name], split, offset)
    assert_same_bits(part, {k: t[300 - n :] for k, t in whole.items()})


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adam l2", "half beta"])
def test_bits_do_not_depend_on_threads_or_grouping(split, name):
    n = 150_001  # several tasks a thread
    data = state(n, seed=21, grad_dtype=torch.bfloat16)
    expected = None
    for threads, cuts in itertools.product(
        (1, 2, 3, 7), ([], [1], [17, 18, 70_001], list(range(0, n, 9_973)))
    ):
        hostmath.set_threads(threads)
        bounds = [0, *cuts, n]
        segments = [
            segment({k: t[a:b] for k, t in data.items()}, split, offset=i % 5)
            for i, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        AdamProgram(segments).run([HYPERS[name]] * len(segments))
        parts = [result(s) for s in segments]
        found = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
        expected = expected or found
        assert_same_bits(found, expected)


@pytest.mark.skipif(not hostmath.NATIVE, reason="the fallback has one level")
@pytest.mark.parametrize("name", HYPERS)
def test_bits_do_not_depend_on_the_instruction_set(name):
    from memferry_ascend import _ops

    best = _ops.simd_level()
    try:
        for low, high in ((-6.0, 2.0), (-45.0, 18.0)):
            data = state(5_003, seed=31, grad_dtype=torch.bfloat16, low=low, high=high)
            found = {}
            for level in _ops.simd_levels():
                _ops.set_simd_level(level)
                assert hostmath.simd_level() == level
                found[level] = run(data, HYPERS[name], split=True), hostmath.sum_squares(data["grad"])
            for bits, squares in found.values():
                assert_same_bits(bits, found[best][0])
                assert squares == found[best][1]
    finally:
        _ops.set_simd_level(best)


def test_segments_keep_their_own_hyperparameters_and_may_be_left_out():
    kinds = list(itertools.product(HYPERS, (False, True), (torch.float32, torch.bfloat16)))
    data = [state(50 + 13 * i, seed=i, grad_dtype=dtype) for i, (_, _, dtype) in enumerate(kinds)]
    segments = [
        segment(d, split, i % 4) for i, (d, (_, split, _)) in enumerate(zip(data, kinds, strict=True))
    ]
    before = [result(s) for s in segments]
    enabled = [i % 3 != 1 for i in range(len(kinds))]
    AdamProgram(segments).run([HYPERS[name] for name, _, _ in kinds], enabled)
    for i, (name, split, _) in enumerate(kinds):
        expected = run(data[i], HYPERS[name], split) if enabled[i] else before[i]
        assert_same_bits(result(segments[i]), expected)


def test_a_program_runs_again_with_other_hyperparameters():
    data = state(1_000, seed=41)
    s = segment(data)
    program = AdamProgram([s])
    program.run([HYPERS["adamw"]], [False])
    assert_same_bits(result(s), result(segment(data)))
    program.run([HYPERS["adam l2"]])
    assert_same_bits(result(s), run(data, HYPERS["adam l2"]))


def test_the_gradient_is_only_read():
    data = state(1_000, seed=43)
    s = segment(data)
    AdamProgram([s]).run([dataclasses.replace(HYPERS["adam l2"], maximize=True, grad_scale=0.5)])
    assert torch.equal(s.grad, data["grad"])


def test_nothing_to_update_is_fine():
    AdamProgram([]).run([])
    empty = segment(state(0, seed=0), split=True)
    some = segment(state(5, seed=0))
    program = AdamProgram([empty, some])
    program.run([HYPERS["adamw"]] * 2, [False, False])
    program.run([HYPERS["adamw"]] * 2)
    assert_same_bits(result(some), run(state(5, seed=0), HYPERS["adamw"]))


@pytest.mark.skipif(not hostmath.NATIVE, reason="torch's own operations honour flush_denormal")
def test_flush_denormal_on_the_calling_thread_changes_no_bit():
    data = state(1_000, seed=45, low=-45.0, high=-37.0)
    expected = run(data, HYPERS["adamw"])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert_same_bits(run(data, HYPERS["adamw"]), expected)
        assert torch.tensor([1e-40]).mul(1.0).item() == 0.0  # the caller's setting is as it was
    finally:
        torch.set_flush_denormal(False)


def test_segments_are_checked():
    good = segment(state(8, seed=0), split=True)
    fields = {f.name: getattr(good, f.name) for f in dataclasses.fields(good)}

    def bad(**changes):
        return AdamSegment(**{**fields, **changes})

    with pytest.raises(
        TypeError, match=r"grad: expected torch\.bfloat16 or torch\.float32, found torch\.float16"
    ):
        bad(grad=torch.zeros(8, dtype=torch.float16))
    with pytest.raises(TypeError, match="lo: expected an int16 remainder beside a bf16 param"):
        bad(lo=None)
    with pytest.raises(TypeError, match="None beside an fp32 one"):
        bad(param=torch.zeros(8))
    with pytest.raises(ValueError, match="exp_avg: expected 8 elements, found 9"):
        bad(exp_avg=torch.zeros(9))
    with pytest.raises(ValueError, match="exp_avg_sq: expected contiguous memory"):
        bad(exp_avg_sq=torch.zeros(16)[::2])
    with pytest.raises(ValueError, match="one dimension"):
        bad(grad=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="found a tensor on meta"):
        bad(grad=torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match="segment 1's param overlaps"):
        AdamProgram(
            [
                good,
                bad(exp_avg=torch.zeros(8), exp_avg_sq=torch.zeros(8), lo=torch.zeros(8, dtype=torch.int16)),
            ]
        )
    with pytest.raises(ValueError, match="found 2 hypers"):
        AdamProgram([good]).run([HYPERS["adamw"]] * 2)
    with pytest.raises(ValueError, match="1 hypers and 2 enabled"):
        AdamProgram([good]).run([HYPERS["adamw"]], [True, False])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr: expected"),
        ({"lr": float("nan")}, "lr: expected"),
        ({"beta2": 1.0}, "betas: expected"),
        ({"eps": -1e-8}, "eps: expected"),
        ({"weight_decay": -0.1}, "weight_decay: expected"),
        ({"step": 0}, "step: expected"),
        ({"grad_scale": float("nan")}, "grad_scale: expected"),
    ],
)
def test_hyperparameters_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        AdamHyper(**{"lr": 1e-3, **change})
