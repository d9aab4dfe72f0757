"""What a device family may do in one kernel where torch takes many: AdamW over a segment, the norm of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from memferry_ascend.hostmath import AdamHyper


@dataclass
class AdamArrays:
    """One segment's arrays, flat, contiguous, on one device. `hostmath.AdamSegment` is for host memory only."""

    grad: torch.Tensor
    param: torch.Tensor
    lo: torch.Tensor | None
    """int16 remainders of bf16 parameters' masters; None: parameters are their own masters, in fp32."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @property
    def numel(self) -> int:
        return self.param.numel()


class FusedAdam(Protocol):
    """Kernels on the compute stream, without temporaries of a segment's size. Both return at once."""

    def update(self, arrays: AdamArrays, hyper: AdamHyper) -> None:
        """One update of a segment, with the bits of the host's."""

    def norm_into(self, out: torch.Tensor, grad: torch.Tensor) -> None:
        """Write a contiguous gradient's Euclidean norm, summed in double precision, to `out` (one fp32 element)."""
