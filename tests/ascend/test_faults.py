"""Faults on request: what a probe for host-resident operators, and error handling, have to survive."""

from __future__ import annotations

import signal
import textwrap

import emulator
import pytest

SETUP = """
import ctypes, torch, torch_npu
acl = ctypes.CDLL("libascendcl.so")
torch.npu.set_device(0)
torch.npu.current_stream()
def mapped(numel, device=0):
    "CPU and NPU tensors over the same mapped host memory, and its address."
    address, there = ctypes.c_void_p(), ctypes.c_void_p()
    torch.npu.set_device(device)
    torch.zeros(1, device=f"npu:{device}")
    assert acl.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(numel * 4 + 8192)) == 0
    page = (address.value + 4095) // 4096 * 4096
    place, size, flags = ctypes.c_void_p(page), ctypes.c_uint64(numel * 4), ctypes.c_uint32(0x10000002)
    assert acl.aclrtHostRegisterV2(place, size, flags) == 0
    assert acl.aclrtHostGetDevicePointer(place, ctypes.byref(there), ctypes.c_uint32(0)) == 0
    host = torch.frombuffer((ctypes.c_float * numel).from_address(page), dtype=torch.float32)
    return host, over(there.value, numel, device), page
def over(address, numel, device=0):
    place = torch.device("npu", device)
    storage = torch_npu._C._construct_storage_from_data_pointer(address, place, numel * 4)
    return torch.empty(0, device=f"npu:{device}").set_(storage, 0, (numel,), (1,))
"""


def script(body: str, check: bool = True, **settings: object):
    """Run a few lines on emulated NPUs."""
    return emulator.run(["-c", SETUP + textwrap.dedent(body)], check=check, **settings)


@pytest.fixture(autouse=True)
def _emulator_runs_here() -> None:
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")


def test_an_operator_that_is_wrong_or_fails_on_mapped_memory_only() -> None:
    script(
        """
        host, alias, _ = mapped(1024)
        host.fill_(2.0)
        near = torch.full((1024,), 2.0, device="npu")
        assert (near * near).eq(4).all().item()
        assert (alias * alias).eq(5).all().item()  # off by one, and no error
        assert (near + near).eq(4).all().item()
        try:
            (alias + alias).cpu()
        except RuntimeError as error:
            assert "507015" in str(error), error
        else:
            raise AssertionError("expected an error")
        """,
        operators="aclnnMul:wrong@mapped,aclnnAdd:error@mapped",
    )


def test_an_operator_that_crashes_takes_the_process_down() -> None:
    done = script(
        """
        x = torch.ones(4, device="npu")
        print((x * x).sum().item(), flush=True)
        print((x + x).sum().item(), flush=True)
        """,
        check=False,
        operators="aclnnAdd:crash",
    )
    assert done.returncode == -signal.SIGABRT
    assert done.stdout == "4.0\n"
    assert "aclnnAdd crashes on request" in done.stderr


def test_stale_reads() -> None:
    """With `stale`, a device sees mapped memory as it was when it was mapped, and its own writes."""
    script(
        """
        host, alias, _ = mapped(1024)
        assert (alias * 1).eq(0).all().item()
        host.fill_(2.0)
        assert (alias * 1).eq(0).all().item()
        alias[:10].fill_(7.0)
        torch.npu.synchronize()
        assert host[:10].eq(7).all() and host[10:].eq(2).all()
        assert (alias * 1)[:10].eq(7).all().item()
        """,
        stale=True,
    )


def test_operands_out_of_reach_are_errors() -> None:
    """A host pointer in place of the device pointer, pageable memory, and memory mapped on another device."""
    done = script(
        """
        host, alias, page = mapped(1024)
        elsewhere = mapped(1024, device=1)[1].data_ptr()
        pageable = torch.zeros(1024)
        torch.npu.set_device(0)
        for address in (page, pageable.data_ptr(), elsewhere):
            stream = torch.npu.Stream()  # the error stays on its stream
            with torch.npu.stream(stream):
                operand = over(address, 1024)
                result = operand * operand
            try:
                stream.synchronize()
            except RuntimeError as error:
                assert "507035" in str(error), error
            else:
                raise AssertionError("expected an error")
        """,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("[emulator] aclnnMul")]
    assert len(lines) == 3
    assert "nothing mapped" in lines[0]
    assert "nothing mapped" in lines[1]
    assert "mapped on device 1, not on 0" in lines[2]


def test_pinned_tensors_as_operands() -> None:
    """With `pinned_mem_register:True` a pinned tensor's address is a device address; so is swapped memory."""
    script(
        """
        pinned = torch.full((1024,), 2.0).pin_memory()
        alias = over(pinned.data_ptr(), 1024)
        assert (alias * alias).eq(4).all().item()
        alias.fill_(3.0)
        torch.npu.synchronize()
        assert pinned.eq(3).all()
        assert alias.cpu().eq(3).all()  # one address for both sides may be copied from
        swapped = torch_npu.empty_with_swapped_memory([16], device=torch.device("npu:0"))
        swapped.fill_(1.0)
        assert (swapped * 2).sum().item() == 32
        """,
        environ={"PYTORCH_NPU_ALLOC_CONF": "pinned_mem_register:True"},
    )


def test_a_failing_copy_reaches_the_program() -> None:
    script(
        """
        x = torch.ones(1024).pin_memory()
        try:
            for _ in range(8):
                x.to("npu", non_blocking=True)
            torch.npu.synchronize()
        except RuntimeError as error:
            assert "507899" in str(error), error
        else:
            raise AssertionError("expected an error")
        """,
        fail="aclrtMemcpyAsync:3+:507899",
        environ={"TASK_QUEUE_ENABLE": "0"},  # the call itself fails, not a queue behind it
    )
