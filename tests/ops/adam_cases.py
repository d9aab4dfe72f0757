"""Data and yardsticks shared by the tests of the host AdamW."""

import numpy as np
import torch
from torch import Tensor

from memferry_ascend.hostmath import AdamHyper, AdamSegment, join_master, split_master

STATE = ("param", "exp_avg", "exp_avg_sq")


def values(n: int, seed: int, low: float = -6.0, high: float = 2.0, zeros: float = 0.1) -> Tensor:
    """fp32 numbers of either sign with magnitudes 10**low to 10**high, some of them zero."""
    rng = np.random.default_rng(seed)
    x = np.float32(10.0) ** rng.uniform(low, high, n).astype(np.float32) * rng.choice([-1.0, 1.0], n)
    x[rng.random(n) < zeros] = 0.0
    return torch.from_numpy(x.astype(np.float32))


def state(
    n: int, seed: int, grad_dtype: torch.dtype = torch.float32, low: float = -6.0, high: float = 2.0
) -> dict[str, Tensor]:
    """grad, param, exp_avg, exp_avg_sq of a run under way."""
    return {
        "grad": values(n, seed, low, high).to(grad_dtype),
        "param": values(n, seed + 1, low, high),
        "exp_avg": values(n, seed + 2, low, high),
        "exp_avg_sq": values(n, seed + 3, 2 * low, 2 * min(high, 18.0)).abs(),
    }


def placed(tensor: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements into its storage."""
    storage = torch.empty(offset + tensor.numel() + 3, dtype=tensor.dtype)
    view = storage[offset : offset + tensor.numel()]
    view.copy_(tensor)
    return view


def segment(data: dict[str, Tensor], split: bool = False, offset: int = 0) -> AdamSegment:
    """A segment over copies of `data`, its master split when `split`."""
    t = {name: placed(tensor, offset) for name, tensor in data.items()}
    lo = None
    if split:
        master = t["param"]
        t["param"] = placed(torch.empty(master.numel(), dtype=torch.bfloat16), offset)
        lo = placed(torch.empty(master.numel(), dtype=torch.int16), offset)
        split_master(master, t["param"], lo)
    return AdamSegment(t["grad"], t["param"], lo, t["exp_avg"], t["exp_avg_sq"])


def result(s: AdamSegment) -> dict[str, np.ndarray]:
    """The bits of master and moments."""
    param = s.param
    if s.lo is not None:
        param = torch.empty(s.numel)
        join_master(s.param, s.lo, param)
    return {
        name: t.numpy().view(np.uint32).copy()
        for name, t in zip(STATE, (param, s.exp_avg, s.exp_avg_sq), strict=True)
    }


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in STATE:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def torch_update(data: dict[str, Tensor], h: AdamHyper) -> dict[str, Tensor]:
    """One step of torch.optim.AdamW or Adam (single tensor, fp32) from `data`."""
    param = torch.nn.Parameter(data["param"].clone())
    kind = torch.optim.AdamW if h.decoupled else torch.optim.Adam
    optimizer = kind(
        [param],
        lr=h.lr,
        betas=(h.beta1, h.beta2),
        eps=h.eps,
        weight_decay=h.weight_decay,
        maximize=h.maximize,
        foreach=False,
        fused=False,
    )
    moments = {name: data[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param] = {"step": torch.tensor(float(h.step - 1)), **moments}
    param.grad = data["grad"].float() * h.grad_scale
    optimizer.step()
    return {"param": param.detach(), **moments}


def ulp(x: np.ndarray) -> np.ndarray:
    """The distance between fp32 numbers at the magnitude of `x`; the smallest subnormal at zero."""
    x32 = np.minimum(np.abs(x).astype(np.float64), np.finfo(np.float32).max).astype(np.float32)
    return np.spacing(x32).astype(np.float64)


def tolerances(data: dict[str, Tensor], h: AdamHyper, ulps: float = 2.0) -> dict[str, np.ndarray]:
    """What one update may differ by from torch's, which fuses multiplies with adds where the processor can.

    `ulps` units in the last place of the largest of an addition's operands and its result: where operands
    cancel, the rounding of a product shows in a result of any smaller size, so ulps of the result would
    mean nothing. What exp_avg may differ by reaches the parameter times step_size / denominator, and
    likewise for the L2 gradient.
    """
    g, p, m, v = (data[k].double().numpy() for k in ("grad", "param", "exp_avg", "exp_avg_sq"))
    g = g * h.grad_scale * (-1 if h.maximize else 1)
    g_tol = np.zeros_like(g)
    if h.weight_decay and not h.decoupled:
        decay = h.weight_decay * p
        g_tol = ulps * ulp(np.maximum.reduce([np.abs(g), np.abs(decay), np.abs(g + decay)]))
        g = g + decay
    decayed = p * (1 - h.lr * h.weight_decay) if h.decoupled else p
    w = 1 - h.beta1
    new_m = m + w * (g - m)
    m_tol = ulps * ulp(np.maximum.reduce([np.abs(m), np.abs(g), np.abs(w * (g - m))])) + w * g_tol
    new_v = v * h.beta2 + (1 - h.beta2) * g * g
    v_tol = ulps * ulp(new_v) + (1 - h.beta2) * 2 * np.abs(g) * g_tol
    denominator = np.sqrt(new_v / (1 - h.beta2**h.step)) + h.eps
    step = h.lr / (1 - h.beta1**h.step) / denominator
    with np.errstate(over="ignore", invalid="ignore"):
        update = step * new_m
        relative = v_tol / np.maximum(new_v, 1e-300)
        p_tol = ulps * ulp(np.maximum.reduce([np.abs(decayed), np.abs(update), np.abs(decayed - update)]))
        p_tol = p_tol + step * m_tol + np.abs(update) * np.minimum(relative, 1.0)
    return {"param": p_tol, "exp_avg": m_tol, "exp_avg_sq": v_tol}


def assert_close_to_torch(
    found: dict[str, np.ndarray], data: dict[str, Tensor], h: AdamHyper, ulps: float = 2.0
) -> None:
    expected = torch_update(data, h)
    allowed = tolerances(data, h, ulps)
    for name in STATE:
        a, b = found[name].view(np.float32), expected[name].numpy()
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=name)
        difference = np.abs(a[finite].astype(np.float64) - b[finite])
        excess = difference - allowed[name][finite]
        worst = int(np.argmax(excess)) if len(excess) else 0
        assert not len(excess) or excess[worst] <= 0, (
            f"{name}[{worst}]: {a[finite][worst]!r} against torch's {b[finite][worst]!r},"
            f" allowed {allowed[name][finite][worst]:.3g}"
        )
