"""torch_npu's own features on eight emulated NPUs: devices, memory, streams, events, mapped host memory."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from torch import Tensor

EMULATED = {"devices": 8, "hbm": 256 << 20}
MIB = 1 << 20


def runtime() -> ctypes.CDLL:
    """The emulated runtime that torch_npu is using."""
    return ctypes.CDLL("libascendcl.so")


def hold(stream: torch.npu.Stream, on: bool) -> None:
    """While a stream is held it starts no task."""
    with torch.npu.device(stream.device):
        assert runtime().emuHoldStream(ctypes.c_void_p(stream.npu_stream), ctypes.c_int(on)) == 0


def mapped(numel: int) -> tuple[Tensor, Tensor]:
    """A CPU tensor and an NPU tensor over the same pinned, mapped host memory (float32)."""
    import torch_npu

    address, device_address = ctypes.c_void_p(), ctypes.c_void_p()
    room = numel * 4 + 8192
    torch.npu.current_stream()
    assert runtime().aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(room)) == 0
    page = (address.value + 4095) // 4096 * 4096
    size = (numel * 4 + 4095) // 4096 * 4096
    assert (
        runtime().aclrtHostRegisterV2(
            ctypes.c_void_p(page), ctypes.c_uint64(size), ctypes.c_uint32(0x10000002)
        )
        == 0
    )
    assert (
        runtime().aclrtHostGetDevicePointer(
            ctypes.c_void_p(page), ctypes.byref(device_address), ctypes.c_uint32(0)
        )
        == 0
    )
    host = torch.frombuffer((ctypes.c_float * numel).from_address(page), dtype=torch.float32)
    place = torch.device("npu", torch.npu.current_device())
    storage = torch_npu._C._construct_storage_from_data_pointer(device_address.value, place, numel * 4)
    return host, torch.empty(0, device=place).set_(storage, 0, (numel,), (1,))


def test_eight_devices_compute_and_exchange() -> None:
    assert torch.npu.device_count() == 8
    x = torch.arange(12.0).view(3, 4)
    total = x.clone()
    for i in range(8):
        with torch.npu.device(i):
            assert torch.npu.current_device() == i
            total = (total.to(f"npu:{i}") + x.npu() @ torch.eye(4).npu()).to(f"npu:{(i + 1) % 8}")
            assert total.device.index == (i + 1) % 8
    assert torch.equal(total.cpu(), x * 9)


def test_memory_statistics() -> None:
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    block = torch.empty(8 * MIB, dtype=torch.uint8, device="npu")
    grown = torch.npu.memory_allocated()
    assert 8 * MIB <= grown - before <= 9 * MIB
    del block
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() == grown
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info()
    assert total == 256 * MIB
    assert free <= total - torch.npu.memory_reserved()


def test_running_out_of_memory_raises_and_recovers() -> None:
    blocks = []

    def fill_up() -> None:
        while len(blocks) < 16:
            blocks.append(torch.empty(32 * MIB, dtype=torch.uint8, device="npu:3"))

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fill_up()
    assert len(blocks) >= 6  # 256 MiB less what the allocator rounds up
    blocks.clear()
    assert torch.ones(4, device="npu:3").sum().item() == 4


def test_pinned_copies_run_beside_the_program() -> None:
    stream = torch.npu.Stream()
    source = torch.full((1024,), 3.0).pin_memory()
    assert source.is_pinned()
    target = torch.zeros(1024, device="npu")
    torch.npu.synchronize()
    hold(stream, True)
    with torch.npu.stream(stream):
        target.copy_(source, non_blocking=True)
        copied = stream.record_event()
    assert not copied.query()
    assert not stream.query()
    assert target.sum().item() == 0  # read on the current stream, which nobody holds
    torch.npu.current_stream().wait_event(copied)
    late = target * 2
    hold(stream, False)
    assert torch.equal(late.cpu(), source * 2)
    assert copied.query()


def test_events_measure() -> None:
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    first.record()
    torch.ones(64, 64, device="npu") @ torch.ones(64, 64, device="npu")
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0


def test_relay_through_a_peer() -> None:
    """Host to npu:0 by two paths: directly, and through npu:1's own buffer."""
    source = torch.arange(1 << 16, dtype=torch.float32).pin_memory()
    cut = source.numel() // 3
    near = torch.empty(source.numel(), device="npu:0")
    direct, relay = torch.npu.Stream(device="npu:0"), torch.npu.Stream(device="npu:1")
    with torch.npu.stream(direct):
        near[:cut].copy_(source[:cut], non_blocking=True)
        here = direct.record_event()
    with torch.npu.device(1), torch.npu.stream(relay):
        stage = torch.empty(source.numel() - cut, device="npu:1")
        stage.copy_(source[cut:], non_blocking=True)
        near[cut:].copy_(stage, non_blocking=True)
        there = relay.record_event()
    for event in (here, there):
        torch.npu.current_stream().wait_event(event)
    torch.npu.synchronize(1)
    assert torch.equal(near.cpu(), source)


def test_mapped_host_memory_is_a_kernel_operand() -> None:
    host, alias = mapped(64 * 64)
    assert host.data_ptr() != alias.data_ptr()
    host.copy_(torch.arange(64.0 * 64))
    assert torch.equal((alias + alias).cpu(), host * 2)
    host.fill_(3.0)  # a CPU write, seen without a copy
    assert (alias * 1).sum().item() == 3 * 64 * 64
    alias.fill_(5.0)  # an NPU write
    torch.npu.synchronize()
    assert host.eq(5).all()
    weight = alias.view(64, 64)
    host.copy_(torch.randn(64 * 64, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal((x.npu() @ weight).cpu(), x @ host.view(64, 64))
    assert torch.equal(
        torch.nn.functional.embedding(torch.tensor([3, 1], device="npu"), weight).cpu(),
        host.view(64, 64)[[3, 1]],
    )


def test_a_product_written_straight_to_host_memory() -> None:
    host, alias = mapped(8 * 8)
    x, y = torch.randn(8, 16).npu(), torch.randn(16, 8).npu()
    torch.mm(x, y, out=alias.view(8, 8))
    torch.npu.synchronize()
    assert torch.equal(host.view(8, 8), (x @ y).cpu())


def test_copying_from_a_mapped_device_pointer_is_refused() -> None:
    host, alias = mapped(1024)
    host.fill_(1.0)
    with pytest.raises(RuntimeError):
        alias.cpu()


def test_the_wheel_is_unmodified() -> None:
    import torch_npu

    assert torch_npu.__version__ == "2.13.0"
    assert "ascend-site" in os.path.dirname(torch_npu.__file__)
