"""Probing children (backends/ascend_probe.py) without importing torch and torch_npu for each.

`install()` comes before the process touches its NPU. It forks one that never does, and that forks a child for each start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO

from memferry_ascend.backends import ascend_probe


class Child:
    """What `subprocess.Popen` gives, as far as the probe uses it."""

    def __init__(self, server: socket.socket, arguments: Sequence[str], environ: Mapping[str, str], err: int):
        self._server = server
        reading, writing = os.pipe()
        request = json.dumps([list(arguments), dict(environ)])
        socket.send_fds(server, [request.encode()], [writing, err])
        os.close(writing)
        self._process = int(server.recv(64))
        self.stdout = os.fdopen(reading, "rb")

    def kill(self) -> None:
        os.kill(self._process, signal.SIGKILL)

    def wait(self) -> int:
        return int(self._server.recv(64))


def install() -> None:
    """Have the probe fork its children."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        _serve(there)
        os._exit(0)
    there.close()

    def start(command: list[str], stdout: int, stderr: IO[bytes], env: Mapping[str, str]) -> Child:
        assert command[:3] == [sys.executable, "-m", ascend_probe.__name__]
        return Child(here, command[3:], env, stderr.fileno())

    ascend_probe.subprocess = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def _serve(there: socket.socket) -> None:
    while True:
        request, fds, _, _ = socket.recv_fds(there, 1 << 17, 2)
        if not request:  # the process that installed this has ended
            return
        child = os.fork()
        if child == 0:
            arguments, environ = json.loads(request)
            os.environ.clear()
            os.environ.update(environ)
            for number, fd in zip((1, 2), fds, strict=True):
                os.dup2(fd, number)
            sys.exit(ascend_probe.main(arguments))
        for fd in fds:
            os.close(fd)
        there.send(str(child).encode())
        there.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
