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
    torch.zeros(1, device=f"npu:{device}")
    assert acl.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(numel * 4 + 8192)) == 0
    page = (address.value + 4095) // 4096 * 4096
    assert acl.aclrtHostRegisterV2(ctypes.c_void_p(page), ctypes.c_uint64(numel * 4), ctypes.c_uint32(0x10000002)) == 0
    assert acl.aclrtHostGetDevicePointer(ctypes.c_void_p(page), ctypes.byref(there), ctypes.c_uint32(0)) == 0
    host = torch.frombuffer((ctypes.c_float * numel).from_address(page), dtype=torch.float32)
    return host, over(there.value, numel, device), page
def over(address, numel, device=0):
    storage = torch_npu._C._construct_storage_from_data_pointer(address, torch.device("npu", device), numel * 4)
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


@pytest.mark.parametrize(
    ("operand", "found"),
    [
        ("over(page, 1024)", "nothing mapped"),  # the host pointer in place of the device pointer
        ("over(torch.zeros(1024).data_ptr(), 1024)", "nothing mapped"),
        ("mapped(1024, device=1)[1].data_ptr() and over(last, 1024)", "mapped on device 1, not on 0"),
    ],
    ids=["host pointer", "pageable memory", "mapped elsewhere"],
)
def test_an_operand_out_of_reach_is_an_error(operand: str, found: str) -> None:
    done = script(
        f"""
        host, alias, page = mapped(1024)
        torch.npu.set_device(1)
        last = mapped(1024, device=1)[1].data_ptr()
        torch.npu.set_device(0)
        operand = {operand}
        try:
            (operand * operand).cpu()
        except RuntimeError as error:
            assert "507035" in str(error), error
        else:
            raise AssertionError("expected an error")
        """,
    )
    assert found in done.stderr


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
    )
