"""Processes that own an emulated NPU and lend it (`memferry lend`), for tests that relay through it.

Importing torch_npu takes seconds, so owners are forked by one process that has done it (tests/emulator/server.py), one at a
time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import emulator


class Owners:
    """Where owners come from."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        start = [sys.executable, str(emulator.ROOT / "tests" / "emulator" / "server.py")]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(
            start, env=emulator.environment(), stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def start(self, device: int, *words: str, **settings: object) -> Owner:
        """An owner of `device` that can be reached; `words` for `memferry lend`, `settings` for its emulator."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        said, errors, report = folder / "said", folder / "errors", folder / "report"
        os.mkfifo(said)
        errors.touch()
        settings = {"devices": 3} | settings
        request = {
            "arguments": [
                "-m",
                "memferry_ascend",
                "lend",
                "--backend",
                "ascend",
                "--device",
                str(device),
                *words,
            ],
            "environ": emulator.environment(report=report, **settings),  # type: ignore[arg-type]
            "folder": os.getcwd(),
            "stdout": str(said),
            "stderr": str(errors),
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        process = int(self._server.stdout.readline())
        with said.open() as lines:
            assert "lends up to" in lines.readline(), errors.read_text()
        return Owner(process, self._server, report)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


class Owner:
    def __init__(self, process: int, server: subprocess.Popen[str], report: Path) -> None:
        self.process, self._server, self._report = process, server, report
        self._status: int | None = None

    def send(self, number: int) -> None:
        os.kill(self.process, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit status; negative where the signal ended it."""
        if self._status is None:
            self.send(number)
            assert self._server.stdout is not None
            self._status = int(self._server.stdout.readline())
        return self._status

    def complaints(self) -> list[str]:
        """What its emulator objected to."""
        return self._report.read_text().splitlines() if self._report.exists() else []

    def allocations(self) -> int:
        """How many pieces of device memory it holds: each is a memfd."""
        folder, found = f"/proc/{self.process}/fd", 0
        for one in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                found += "memfd:emulated-hbm" in os.readlink(f"{folder}/{one}")
        return found
