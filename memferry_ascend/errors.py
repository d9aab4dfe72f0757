"""The exceptions of the project. Every message says what was expected, what was found and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FerryError(RuntimeError):
    """Something the user can act on. The command line prints it as one sentence, without a traceback."""


class PeerError(FerryError):
    """Another rank failed or is gone; the message says which one and, where known, why."""


class ConfigError(FerryError, ValueError):
    """A setting that cannot be right: unknown, malformed, out of range or in conflict with another."""


def unknown(what: str, found: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in `known`: names the nearest one, then lists them all.

    `what` is the kind of thing in the singular ("model preset", "configuration key").
    """
    names = list(known)
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {what} {found!r}:{hint} known are {', '.join(names)}")
