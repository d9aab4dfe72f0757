"""The systems a user could pick instead. Each needs its own process, and none is a dependency of this project."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .models import Unavailable, blocks
from .ranks import environments
from .systems import BETAS, DECAY, EPS, LR, Batch, Setup, System


def _needs(module: str, setup: Setup) -> Any:
    if setup.backend != "cuda":
        raise Unavailable(f"{module} is compared on CUDA only")
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation fails in many ways; its row says how
        raise Unavailable(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def _join(setup: Setup) -> None:
    """The process group: the ranks', or one of this process alone."""
    torch.cuda.set_device(setup.rank)
    if setup.ranks > 1:
        return
    os.environ.update(environments(1)[0])


class DeepSpeed(System):
    """ZeRO with the optimizer (stage 3: parameters too) on the host, pinned; never SuperOffload or ZenFlow."""

    stage = 2
    reusable = False
    parallel = True
    states = (
        "ZeRO-2 offload: device bf16 parameters and gradient buckets; host fp32 master, gradient and moments"
    )

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        # Its AdamW is compiled at first use, for the device that is there; a build that was cut off leaves a lock that
        # every later one waits for, so builds have a folder of their own, used by one process at a time.
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            folder = Path(tempfile.gettempdir(), f"memferry-bench-extensions-{os.getuid()}")
            os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
            for lock in folder.glob("*/lock"):
                lock.unlink(missing_ok=True)
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        os.environ.setdefault("MAX_JOBS", "8")
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
        deepspeed = _needs("deepspeed", setup)
        _join(setup)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        }
        if self.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": setup.batch,
            "gradient_accumulation_steps": setup.accumulate,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
            },
            "wall_clock_breakdown": False,
            "steps_per_print": 10**9,
        }
        if setup.clip is not None:
            config["gradient_clipping"] = setup.clip
        self.engine, *_ = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )
        self.note = f"deepspeed {deepspeed.__version__}, {type(self.engine.optimizer.optimizer).__name__}"

    def step(self, micro: list[Batch]) -> Tensor:
        total: Tensor | None = None
        for batch in micro:
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            part = loss.detach() / self.setup.accumulate
            total = part if total is None else total + part
        assert total is not None
        return total


class DeepSpeed3(DeepSpeed):
    stage = 3
    states = "ZeRO-3 offload: bf16 parameters, fp32 master, gradient and moments on the host"


class Fsdp2(System):
    """fully_shard with CPUOffloadPolicy, block by block, on a world of one, or of all ranks."""

    reusable = False
    parallel = True
    states = "host 16 B/parameter: fp32 parameter, gradient and moments; bf16 on the device while in use"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        fsdp = _needs("torch.distributed.fsdp", setup)
        import torch.distributed as dist

        _join(setup)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        model.float()
        options = {
            "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=True),
            "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        for block in blocks(model):
            fsdp.fully_shard(block, **options)
        fsdp.fully_shard(model, **options)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step(self, micro: list[Batch]) -> Tensor:
        loss = self.backwards(micro)
        if self.setup.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class TorchAO(System):
    """CPUOffloadOptimizer over torch's AdamW. It copies gradients to the host while backward runs, so a norm taken
    afterwards could not change what it applies: it has no clipped rows."""

    reusable = False
    states = "device bf16 parameter; host bf16 parameter, gradient and moments: no fp32 state"
    note = "optimizer states in bf16: half the bytes of the others, other arithmetic"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        optim = _needs("torchao.optim", setup)
        if setup.clip is not None:
            raise Unavailable(
                "CPUOffloadOptimizer takes its gradients during backward: they cannot be clipped"
            )
        model.to(self.device)
        self.optimizer = optim.CPUOffloadOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            offload_gradients=setup.accumulate == 1,  # sums stay on the device, in bf16
            fused=True,
            lr=LR,
            weight_decay=DECAY,
        )

    def step(self, micro: list[Batch]) -> Tensor:
        loss = self.backwards(micro)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


PEERS: dict[str, Callable[[nn.Module, Setup], System]] = {
    "deepspeed-z2": DeepSpeed,
    "deepspeed-z3": DeepSpeed3,
    "fsdp2": Fsdp2,
    "torchao": TorchAO,
}
