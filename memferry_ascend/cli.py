"""The `memferry` command line: finds a command's module, runs it, prints JSON or an error of one sentence.

A command is a function `register(parser)` that adds its arguments and returns `run(arguments)`, which gives
the exit code and what `--json` prints; without `--json` it speaks for itself. A module is imported when its
command is used, so that `memferry --help` is quick and a broken part does not take the others along.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from memferry_ascend import __version__
from memferry_ascend.errors import FerryError, unknown

Run = Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]
Register = Callable[[argparse.ArgumentParser], Run]

# name -> (module:function, what it does)
COMMANDS = {
    "doctor": ("memferry_ascend.doctor:register", "say what this machine has and what limits memory"),
    "probe": (
        "memferry_ascend.topology.command:register",
        "measure the paths from host memory to each device",
    ),
    "profile": ("memferry_ascend.commands:register_profile", "measure a model's layers and the link"),
    "plan": (
        "memferry_ascend.commands:register_plan",
        "make a plan from a profile and predict its time",
    ),
    "train": ("memferry_ascend.train.command:register", "train a byte-level GPT on text"),
    "lend": ("memferry_ascend.lendcommand:register", "relay through an idle device for processes that train"),
    "report": ("memferry_ascend.report:register", "show and plot what a run did"),
    "bench": ("memferry_ascend.bench:register", "compare with other ways of training, in one run"),
}
USAGE_ERROR = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Errors are one sentence, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for an error the user can act on, 130 after Ctrl-C.

    MEMFERRY_DEBUG=1 shows the traceback of an error.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except SystemExit as exit:  # argparse: --help and wrong flags
        return exit.code if isinstance(exit.code, int) else USAGE_ERROR
    except KeyboardInterrupt as interrupt:
        print(f"memferry: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except (FerryError, OSError) as error:
        _tell_other_ranks(error)
        if os.environ.get("MEMFERRY_DEBUG") == "1":
            raise
        print(f"memferry: {_sentence(error)}", file=sys.stderr)
        return USAGE_ERROR


def _tell_other_ranks(error: Exception) -> None:
    """Under torchrun: let the others say why they stop, too."""
    runtime = sys.modules.get("memferry_ascend.runtime")
    if runtime is not None:
        runtime.announce(error)


def _dispatch(words: list[str]) -> int:
    parser = _top_level()
    parsed = parser.parse_args(words[:1])
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    name: str = parsed.command
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    command = Parser(prog=f"memferry {name}", description=_capital(COMMANDS[name][1]), allow_abbrev=False)
    command.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else"
    )
    run = _load(name)(command)
    given = command.parse_args(words[1:])
    code, result = run(given)
    if given.json and result:
        print(json.dumps(result, allow_nan=False))
    runtime = sys.modules.get("memferry_ascend.runtime")
    if code == 0 and runtime is not None:
        runtime.leave()
    return code


def _top_level() -> Parser:
    listing = "\n".join(f"  {name:9}{what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(
        prog="memferry",
        description="Train PyTorch models larger than device memory.",
        usage="memferry COMMAND ...",
        epilog=f"commands:\n{listing}\n\n`memferry COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"memferry {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    return parser


def _load(name: str) -> Register:
    """The command's `register` function. Raises FerryError when its module, or one it needs, is not there; a
    module that fails to import for another reason is a bug and keeps its traceback."""
    module_name, _, function = COMMANDS[name][0].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise FerryError(
                f"`memferry {name}` needs the module {error.name}, which is not installed"
            ) from error
        raise FerryError(
            f"`memferry {name}` is not part of this installation ({module_name} is missing)"
        ) from error
    register: Register = getattr(module, function)
    return register


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) if isinstance(error, OSError) else str(error)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
