"""`memferry lend`: a process that owns an idle device and forwards for those that train."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

from memferry_ascend import sizes
from memferry_ascend.errors import ConfigError
from memferry_ascend.lender import BUDGET

Run = Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]


def register(parser: argparse.ArgumentParser) -> Run:
    """Adds the arguments of `memferry lend`; returns the function that runs it."""
    parser.description = (
        "Owns an idle device and relays through it for processes of this user that name it in Config.assist_devices, "
        "until it is interrupted. Start it before them."
    )
    parser.add_argument("--device", type=int, required=True, metavar="N", help="the device's index")
    parser.add_argument("--backend", metavar="NAME", help="cpu or ascend (default: what this machine has)")
    parser.add_argument(
        "--memory",
        default=str(BUDGET),
        metavar="SIZE",
        help=f"device bytes lent at most (default: {sizes.fmt(BUDGET)})",
    )
    return run


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Serves until Ctrl-C or SIGTERM, then waits for borrowers to let go. Returns 0.

    Raises:
        FerryError: the device is missing or cannot be lent, or another process lends it.
    """
    from memferry_ascend import lending, runtime

    if arguments.device < 0:
        raise ConfigError(f"--device: expected an index of at least 0, got {arguments.device}")
    budget = sizes.parse(arguments.memory)
    name = arguments.backend or os.environ.get("MEMFERRY_BACKEND") or runtime._choose()
    backend = runtime.make_backend(name, arguments.device)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def ready() -> None:
        if not arguments.json:
            print(f"device {arguments.device} ({name}): lends up to {sizes.fmt(budget)}", flush=True)

    try:
        lending.serve(backend, arguments.device, budget, ready)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        backend.close()
    return 0, {"device": arguments.device, "backend": name}
