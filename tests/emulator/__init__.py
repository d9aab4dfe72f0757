"""Run programs on the emulated NPUs.

    from emulator import environment, run
    run(["-c", "import torch, torch_npu; ..."], devices=8, hbm=1 << 30)

`make emulator` installs the unmodified torch_npu wheel into build/ascend-site and builds the emulated CANN
libraries into build/emulator. A program gets both through its environment: the dynamic linker finds the
libraries under the names that the wheel asks for, so `import torch, torch_npu` works as it does on an NPU
host. The main environment stays free of torch_npu. docs/ascend.md says what the emulator enforces and what
it does not emulate.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "build" / "emulator"
SITE = ROOT / "build" / "ascend-site"


def why_not() -> str | None:
    """Why the emulator cannot run on this machine, or None. The wheel exists for x86-64 Linux."""
    found = f"{platform.system()} {platform.machine()}"
    return None if found == "Linux x86_64" else f"torch_npu's wheel is for Linux x86_64, this is {found}"


def environment(
    devices: int = 2, hbm: int | None = None, environ: Mapping[str, str] | None = None, **settings: object
) -> dict[str, str]:
    """The environment of a process with `devices` emulated NPUs of `hbm` bytes each (8 GiB when omitted).

    `environ` holds variables for the program itself, such as PYTORCH_NPU_ALLOC_CONF. Further settings are
    the emulator's own, in lower case and without their prefix: `fail="aclrtMalloc:3:207001"` sets EMU_FAIL.
    docs/ascend.md lists them. True and False become 1 and 0.
    """
    if not (LIBRARIES / "libopapi.so").exists():
        raise FileNotFoundError(f"the emulated CANN is not in {LIBRARIES}: run `make emulator`")
    result = {name: value for name, value in os.environ.items() if not name.startswith("EMU_")}
    if hbm is not None:
        settings["hbm"] = hbm
    settings["devices"] = devices
    for name, value in settings.items():
        result[f"EMU_{name.upper()}"] = str(int(value) if isinstance(value, bool) else value)

    def prepend(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [result.get(name)])])

    result["PYTHONPATH"] = prepend("PYTHONPATH", SITE, ROOT)
    result["LD_LIBRARY_PATH"] = prepend("LD_LIBRARY_PATH", LIBRARIES)
    result["ASCEND_HOME_PATH"] = str(LIBRARIES)
    result["ASCEND_OPP_PATH"] = str(LIBRARIES / "opp")
    # torch_npu is imported by name, so that a program can say when, and catch what goes wrong.
    result["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    result.update(environ or {})
    return result


def run(
    arguments: Sequence[str | Path], *, check: bool = True, timeout: float = 300.0, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` (`-c CODE` or `-m MODULE` first) on emulated NPUs; output is captured as text.

    With `check`, an exit status other than 0 raises AssertionError with the program's output. A program whose `environ`
    holds nothing but variables of memferry_ascend is forked from a process that has imported torch_npu already; any
    other starts anew, since libraries read their variables when they are loaded.
    """
    environ = environment(**settings)  # type: ignore[arg-type]
    command = [sys.executable, *map(str, arguments)]
    given = settings.get("environ") or {}
    assert isinstance(given, Mapping)
    if all(name.startswith("MEMFERRY_") for name in given):
        done = _forks.run(command, environ, timeout)
    else:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


class Forks:
    """The process that forks for every program (server.py); started by the first."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        if self._server is None or self._server.poll() is not None:
            start = [sys.executable, str(Path(__file__).with_name("server.py"))]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                start, env=environment(), stdin=pipe, stdout=pipe, text=True, bufsize=1
            )
            atexit.register(self.close)
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            request = {
                "arguments": command[1:],
                "environ": dict(environ),
                "folder": os.getcwd(),
                "stdout": out.name,
                "stderr": err.name,
            }
            self._server.stdin.write(json.dumps(request) + "\n")
            child = int(self._server.stdout.readline())
            killed = threading.Event()
            late = threading.Timer(timeout, lambda: (killed.set(), os.kill(child, signal.SIGKILL)))
            late.start()
            status = int(self._server.stdout.readline())
            late.cancel()
            late.join()
            said = subprocess.CompletedProcess(list(command), status, out.read(), err.read())
        if killed.is_set():
            raise subprocess.TimeoutExpired(list(command), timeout, said.stdout, said.stderr)
        return said

    def close(self) -> None:
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            self._server.wait()
            self._server = None


_forks = Forks()
