"""Arithmetic on host memory: AdamW in one pass, the split master weights, gradient sums.

Everything here works on contiguous CPU tensors in place, releases the interpreter lock while it runs, and
may be called from any thread (calls are served one after the other). The native version (`ops/`, built into
`memferry_ascend._ops`) reads and writes each byte once, on threads of its own. Without it the same classes
run over torch operations: `NATIVE` and `simd_level()` say which one is in use; setting MEMFERRY_NO_NATIVE=1
before the import forces the latter.

The split master: a bf16 parameter `hi` is the upper half of its fp32 master and an int16 `lo` holds the rest,

    hi = (bits + 0x8000) >> 16    lo = int16(bits & 0xffff)    bits = (hi << 16) + lo

which gives back every finite pattern and both infinities. `hi` is the master rounded to the nearest bf16,
ties away from zero, so a master of at least 0x7f7f8000 (3.3961e38) shows as infinity in `hi`, as it does in
any rounding to bf16, while the master itself stays finite and exact. A NaN is stored as 0x7fc00000.

The same bits come out whatever the number of threads, the grouping into segments, the alignment or the
instruction set. Two things differ from torch's own arithmetic by design: subnormals are kept even after
torch.set_flush_denormal(True) (that setting belongs to a thread, and bits must not), and no multiply is fused
with an add.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from memferry_ascend import _hostmath_torch, numa

_ops: ModuleType | None = None
if os.environ.get("MEMFERRY_NO_NATIVE", "0") in ("", "0"):
    try:
        _ops = importlib.import_module("memferry_ascend._ops")
    except ImportError:  # installed without a compiler
        _ops = None

NATIVE: bool = _ops is not None


def simd_level() -> str:
    """The instruction set in use: "avx512", "avx2", "neon", "scalar", or "torch" in the fallback."""
    return "torch" if _ops is None else _ops.simd_level()


def set_threads(n: int, node: int | None = None) -> None:
    """Let `n` threads take part in a call, the calling thread included.

    They run wherever the process may (its affinity), or on that part of it that is on NUMA node `node`. The fallback
    runs on torch's intra-op threads instead and leaves the user's torch.set_num_threads() alone, so there this only
    checks `n`. Raises ValueError when n < 1.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"expected at least 1 thread (the calling one), found {n!r}: pass a positive int")
    if _ops is not None:
        _ops.set_threads(n)
        if node is not None:
            with numa.near(node):
                _ops.start_threads()  # now: they inherit this thread's affinity


def threads() -> int:
    """The number of threads that take part in a call, the calling one included."""
    return torch.get_num_threads() if _ops is None else _ops.threads()


def shutdown() -> None:
    """Join the threads. A later call starts them again; the interpreter calls this at exit."""
    if _ops is not None:
        _ops.shutdown()


if _ops is not None:
    _ops.set_threads(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    atexit.register(shutdown)


def _check(what: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: expected a torch.Tensor, found {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what}: expected host memory, found a tensor on {tensor.device}: pass its arena tensor"
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        raise TypeError(f"{what}: expected {wanted}, found {tensor.dtype}: convert it first")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"{what}: expected contiguous memory, found shape {tuple(tensor.shape)} in layout {tensor.layout}"
            " with other strides: pass .contiguous() or the flat storage it views"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{what}: expected plain memory, found a lazily negated view: pass .resolve_neg()")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{what}: expected {numel} elements, found {tensor.numel()}")
    if tensor.data_ptr() % tensor.element_size():
        raise ValueError(
            f"{what}: expected memory aligned to {tensor.element_size()} bytes: copy it to its own tensor"
        )
    return tensor


def _check_apart(written: list[tuple[str, Tensor]], read: list[tuple[str, Tensor]]) -> None:
    """Raise ValueError when written memory is also reached under another name: threads would race on it."""
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes, True, name) for name, t in written if t.numel()]
    spans += [(t.data_ptr(), t.data_ptr() + t.nbytes, False, name) for name, t in read if t.numel()]
    spans.sort()
    reach: tuple[int, str] = (0, "")  # the furthest end so far, of any span and of written ones
    written_reach: tuple[int, str] = (0, "")
    for begin, end, writes, name in spans:
        clash = reach if writes else written_reach
        if begin < clash[0]:
            raise ValueError(
                f"{name} overlaps {clash[1]}: a tied parameter needs one segment, every array its own memory"
            )
        reach = max(reach, (end, name))
        if writes:
            written_reach = max(written_reach, (end, name))


def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write the halves of fp32 `master` to `hi` (bf16) and `lo` (int16); all contiguous and of one size."""
    n = _check("master", master, (torch.float32,)).numel()
    _check("hi", hi, (torch.bfloat16,), n)
    _check("lo", lo, (torch.int16,), n)
    _check_apart([("hi", hi), ("lo", lo)], [("master", master)])
    if _ops is None:
        _hostmath_torch.split_master(master, hi, lo)
    else:
        _ops.split_master(master.data_ptr(), hi.data_ptr(), lo.data_ptr(), n)


def join_master(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    """Write the fp32 master of `hi` (bf16) and `lo` (int16) to `out`: contiguous, as many elements each."""
    n = _check("hi", hi, (torch.bfloat16,)).numel()
    _check("lo", lo, (torch.int16,), n)
    _check("out", out, (torch.float32,), n)
    _check_apart([("out", out)], [("hi", hi), ("lo", lo)])
    if _ops is None:
        _hostmath_torch.join_master(hi, lo, out)
    else:
        _ops.join_master(hi.data_ptr(), lo.data_ptr(), out.data_ptr(), n)


def accumulate(acc: Tensor, grad: Tensor, first: bool, scale: float = 1.0) -> None:
    """`acc = grad * scale` when `first`, otherwise `acc += grad * scale`, in fp32.

    acc: fp32; grad: bf16 or fp32; contiguous, as many elements each. A scale of 1.0 changes no bit.
    """
    n = _check("acc", acc, (torch.float32,)).numel()
    _check("grad", grad, (torch.bfloat16, torch.float32), n)
    _check_apart([("acc", acc)], [("grad", grad)])
    if _ops is None:
        _hostmath_torch.accumulate(acc, grad, first, scale)
    else:
        _ops.accumulate(acc.data_ptr(), grad.data_ptr(), grad.dtype is torch.bfloat16, n, first, scale)


def sum_squares(grad: Tensor) -> float:
    """The sum of squares of a contiguous bf16 or fp32 tensor, in double precision.

    The order of additions depends on the number of elements alone, so the result does not change with the
    threads or the instruction set (the fallback adds in another order of its own).
    """
    n = _check("grad", grad, (torch.bfloat16, torch.float32)).numel()
    if _ops is None:
        return _hostmath_torch.sum_squares(grad)
    return _ops.sum_squares(grad.data_ptr(), grad.dtype is torch.bfloat16, n)


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between two addresses of host memory that do not overlap, on all threads."""
    if nbytes < 0 or (nbytes and not (dst and src)):
        raise ValueError(
            f"expected two addresses and a size >= 0, found dst={dst:#x} src={src:#x} nbytes={nbytes}"
        )
    if nbytes and dst < src + nbytes and src < dst + nbytes:
        raise ValueError(
            f"expected apart ranges, found {nbytes} bytes from {src:#x} to {dst:#x}, which overlap"
        )
    if _ops is None:
        _hostmath_torch.copy_bytes(dst, src, nbytes)
    else:
        _ops.copy_bytes(dst, src, nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class AdamSegment:
    """One run of parameters that are updated alike: flat, contiguous CPU tensors with as many elements each.

    grad: bf16 or fp32, only read. param: fp32, or the bf16 upper half of the master with `lo` (int16) as its
    remainder. exp_avg, exp_avg_sq: fp32 moments. Raises TypeError or ValueError naming the tensor that does
    not fit.
    """

    grad: Tensor
    param: Tensor
    lo: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __post_init__(self) -> None:
        n = _check("param", self.param, (torch.bfloat16, torch.float32)).numel()
        _check("grad", self.grad, (torch.bfloat16, torch.float32), n)
        _check("exp_avg", self.exp_avg, (torch.float32,), n)
        _check("exp_avg_sq", self.exp_avg_sq, (torch.float32,), n)
        if (self.lo is not None) != (self.param.dtype is torch.bfloat16):
            raise TypeError(
                "lo: expected an int16 remainder beside a bf16 param and None beside an fp32 one, found"
                f" param {self.param.dtype} with lo {None if self.lo is None else self.lo.dtype}"
            )
        if self.lo is not None:
            _check("lo", self.lo, (torch.int16,), n)
        for name in ("grad", "param", "lo", "exp_avg", "exp_avg_sq"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dim() != 1:
                raise ValueError(
                    f"{name}: expected one dimension, found shape {tuple(tensor.shape)}: pass a flat view"
                )

    @property
    def numel(self) -> int:
        """Elements of each tensor."""
        return self.param.numel()


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """One segment's hyperparameters in one update, as torch.optim.AdamW (`decoupled`) and Adam have them.

    step counts from 1 and is this update's own number. grad_scale multiplies the gradient before anything
    else (1.0 changes no bit). Raises ValueError on a value torch's constructor would refuse.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    decoupled: bool = True
    maximize: bool = False
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr >= 0.0:
            raise ValueError(f"lr: expected a number >= 0, found {self.lr}")
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0):
            raise ValueError(f"betas: expected 0 <= beta < 1, found ({self.beta1}, {self.beta2})")
        if not self.eps >= 0.0:
            raise ValueError(f"eps: expected a number >= 0, found {self.eps}")
        if not self.weight_decay >= 0.0:
            raise ValueError(f"weight_decay: expected a number >= 0, found {self.weight_decay}")
        if self.step < 1:
            raise ValueError(f"step: expected this update's number, counted from 1, found {self.step}")
        if math.isnan(self.grad_scale):
            raise ValueError("grad_scale: expected a number, found nan")


# ops/hostmath.h declares the same layout.
_POINTERS = ["grad", "param", "lo", "exp_avg", "exp_avg_sq"]
_HYPERS = struct.Struct("=6dqII")
_SEGMENT = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [("numel", np.int64)]
    + [(name, np.float64) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")]
    + [("step", np.int64), ("kind", np.uint32), ("flags", np.uint32)]
)
_HYPERS_AT = _SEGMENT.fields["lr"][1] if _SEGMENT.fields else 0
_GRAD_BF16, _SPLIT = 1, 2
_ENABLED, _DECOUPLED, _MAXIMIZE = 1, 2, 4

if _ops is not None and _SEGMENT.itemsize != _ops.ADAM_SEGMENT_BYTES:
    raise ImportError(
        f"memferry_ascend._ops was built from other sources: its segments take {_ops.ADAM_SEGMENT_BYTES}"
        f" bytes, expected {_SEGMENT.itemsize}: install the package again"
    )


class AdamProgram:
    """Adam updates of several segments, compiled once and run with one native call.

    The program holds the segments' addresses and keeps their tensors alive; their storages must not be moved
    or resized while it is used. Raises ValueError when arrays of any two segments overlap (gradients may be
    shared).
    """

    def __init__(self, segments: Sequence[AdamSegment]) -> None:
        self.segments = tuple(segments)
        written: list[tuple[str, Tensor]] = []
        read: list[tuple[str, Tensor]] = []
        for i, segment in enumerate(self.segments):
            read.append((f"segment {i}'s grad", segment.grad))
            for name in ("param", "lo", "exp_avg", "exp_avg_sq"):
                tensor = getattr(segment, name)
                if tensor is not None:
                    written.append((f"segment {i}'s {name}", tensor))
        _check_apart(written, read)
        self.numel = sum(segment.numel for segment in self.segments)
        self._memory = bytearray(_SEGMENT.itemsize * max(1, len(self.segments)))
        table = np.frombuffer(self._memory, _SEGMENT)
        self._address = table.ctypes.data
        self._kinds: list[int] = []
        for row, segment in zip(table, self.segments, strict=False):
            for name in _POINTERS:
                tensor = getattr(segment, name)
                row[name] = 0 if tensor is None else tensor.data_ptr()
            row["numel"] = segment.numel
            grad_kind = _GRAD_BF16 if segment.grad.dtype is torch.bfloat16 else 0
            self._kinds.append(grad_kind | (_SPLIT if segment.lo is not None else 0))

    def run(self, hypers: Sequence[AdamHyper], enabled: Sequence[bool] | None = None) -> None:
        """Update every segment, or those whose `enabled` is true, with its own hyperparameters.

        One program serves one run at a time: its hyperparameter fields are filled here. Raises ValueError
        when the lengths differ from the number of segments.
        """
        address, count = self.prepare(hypers, enabled)
        if _ops is None:
            for i, (segment, h) in enumerate(zip(self.segments, hypers, strict=True)):
                if enabled is None or enabled[i]:
                    _hostmath_torch.adam(segment, h)
            return
        _ops.adam(address, count)

    def prepare(self, hypers: Sequence[AdamHyper], enabled: Sequence[bool] | None = None) -> tuple[int, int]:
        """Fill in the hyperparameters; the table's address and its number of rows, for the native worker, which copies
        them before the next `prepare`."""
        count = len(self.segments)
        if len(hypers) != count or (enabled is not None and len(enabled) != count):
            found = f"{len(hypers)} hypers" + ("" if enabled is None else f" and {len(enabled)} enabled")
            raise ValueError(f"expected one entry for each of {count} segments, found {found}")
        offset = _HYPERS_AT
        for i, h in enumerate(hypers):
            flags = _DECOUPLED * h.decoupled + _MAXIMIZE * h.maximize
            if enabled is None or enabled[i]:
                flags |= _ENABLED
            _HYPERS.pack_into(
                self._memory,
                offset,
                *(h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.grad_scale, h.step, self._kinds[i], flags),
            )
            offset += _SEGMENT.itemsize
        return self._address, count
