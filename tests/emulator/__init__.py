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

import os
import platform
import subprocess
import sys
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
    """Run this Python with `arguments` on emulated NPUs; output is captured as text.

    With `check`, an exit status other than 0 raises AssertionError with the program's output.
    """
    command = [sys.executable, *map(str, arguments)]
    environ = environment(**settings)  # type: ignore[arg-type]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done
