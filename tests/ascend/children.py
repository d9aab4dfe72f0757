"""Tests whose bodies run in an emulated process without torch; runtime.py and hccl.py have the calls that they make."""

from __future__ import annotations

import functools
import inspect
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import emulator

HERE = Path(__file__).parent
RUNTIME = "from runtime import *"


def child(
    body: Callable[[], None], check: bool = True, calls: str = RUNTIME, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run the source of a function's body in an emulated process, behind the lines `calls`."""
    lines = inspect.getsource(body).splitlines()
    start = next(i for i, line in enumerate(lines) if line.rstrip().endswith("-> None:"))
    source = textwrap.dedent("\n".join(lines[start + 1 :]))
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{calls}\n{source}"
    return emulator.run(["-c", script], check=check, timeout=60.0, **settings)


def in_child(calls: str = RUNTIME, **settings: object) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a test of a function by running its body in a child with these settings. The lines of its docstring that begin
    with a dash are what the emulator must say."""

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(body)
        def test() -> None:
            said = child(body, calls=calls, **settings).stderr
            for line in (inspect.getdoc(body) or "").splitlines():
                assert not line.startswith("- ") or line[2:] in said, said

        return test

    return decorate
