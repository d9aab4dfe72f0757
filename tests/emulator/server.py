"""Programs on emulated NPUs without importing torch and torch_npu for each: this process has imported them and forks.

One JSON line on stdin for each program: its arguments (`-c CODE ...` or `-m MODULE ...`), its environment, and the files
that take its output. Two lines come back: its process id, and its exit status when it has ended. What libraries read
while they are loaded cannot be set for such a program (`run` in __init__.py knows).
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
from typing import Any

import torch
import torch._dynamo  # noqa: F401  # optimizers do at their first step: once here instead of in every program
import torch_npu  # noqa: F401

import memferry_ascend  # noqa: F401


def end_with_parent() -> None:
    """Tests that are stopped leave nothing running."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def become(request: dict[str, Any]) -> None:
    """In the forked process: turn into the program. Its exceptions and exit are the interpreter's to handle."""
    end_with_parent()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    for number, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
    ctypes.CDLL("libascendcl.so").emuReadSettings()
    kind, what, *rest = request["arguments"]
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    end_with_parent()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            break
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
