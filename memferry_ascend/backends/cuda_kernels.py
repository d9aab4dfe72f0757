"""CUDA kernels from source text: compiled by NVRTC when a backend first asks, launched on torch's current stream.

NVRTC comes with every CUDA build of torch, so neither a toolkit nor a compiler has to be installed. torch's own
`torch.cuda._compile_kernel` needs the toolkit's headers, which these kernels do not include.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from memferry_ascend.errors import FerryError

_OPTIONS = (b"--std=c++17", b"--fmad=false")
"""No multiply is fused with an add: kernels must give the host's bits."""


class Kernel:
    """One kernel of a module. Its one argument is a structure, passed by value."""

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p, device: int, threads: int) -> None:
        self._launch = driver.cuLaunchKernel
        self._function = function
        self._device = device
        self._threads = threads

    def __call__(self, blocks: int, argument: ctypes.Structure) -> None:
        """Launch `blocks` blocks on the device's current stream.

        Raises:
            FerryError: the driver refused.
        """
        params = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device))
        code = self._launch(self._function, blocks, 1, 1, self._threads, 1, 1, 0, stream, params, None)
        if code:
            raise FerryError(f"launching a kernel failed with CUDA driver error {code}")


def compile_kernels(
    source: str, names: Sequence[str], device: torch.device, threads: int
) -> dict[str, Kernel]:
    """The kernels `names` (declared extern "C") of `source`, for blocks of `threads` threads.

    Raises:
        FerryError: no NVRTC or driver library, or the source does not compile; says which.
    """
    major, minor = torch.cuda.get_device_capability(device)
    binary = _compile(_nvrtc(), source, f"sm_{major}{minor}")
    try:
        # Calls are short, so they keep the interpreter's lock: giving it away at each launch costs more.
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError as e:
        raise FerryError(f"no CUDA driver library: {e}") from e
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = driver.cuModuleLoadData(ctypes.byref(module), binary)
    if code:
        raise FerryError(f"loading compiled kernels failed with CUDA driver error {code}")
    found = {}
    for name in names:
        function = ctypes.c_void_p()
        code = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        if code:
            raise FerryError(f"kernel {name!r} is not in its module (CUDA driver error {code})")
        found[name] = Kernel(driver, function, torch.cuda._utils._get_device_index(device), threads)
    return found


def _nvrtc() -> ctypes.CDLL:
    """The library that torch was built with: loaded already, on the loader's path, or in a wheel beside torch."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    wheels = Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}")
    for candidate in (name, *map(str, wheels)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise FerryError(f"no {name} on the loader's path or beside torch")


def _compile(nvrtc: ctypes.CDLL, source: str, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    options = (*_OPTIONS, f"--gpu-architecture={architecture}".encode())
    _check(
        nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"memferry.cu", 0, None, None)
    )
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program, nvrtc)
            raise FerryError(f"NVRTC could not compile for {architecture}: {log.decode(errors='replace')}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program, nvrtc)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: object, read: object, program: ctypes.c_void_p, nvrtc: ctypes.CDLL) -> bytes:
    """What one of NVRTC's pairs of functions, size and content, gives."""
    assert callable(size_of) and callable(read)
    size = ctypes.c_size_t()
    _check(nvrtc, size_of(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(nvrtc, read(program, content))
    return content.raw


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise FerryError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")
