"""JSON files of the planner: written whole or not at all, read with errors that say what to change."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write `document` to `path`: a temporary name beside it, flushed, fsynced, renamed, the folder fsynced.

    Raises ValueError when the document holds a number JSON cannot say (inf, NaN), OSError as open() does.
    """
    target = Path(path)
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(
            name, 0o666 & ~umask
        )  # mkstemp's 0600 would hide a shared profile from the other ranks' users
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """The parsed content of `path`. Raises ValueError naming the file when it is not JSON text."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{os.fspath(path)}: expected a {what} in JSON, found text that does not parse ({error}); "
            f"write the {what} again"
        ) from error


def _no_constant(text: str) -> float:
    raise json.JSONDecodeError(f"{text} is not JSON; infinite times are written as the string 'inf'", text, 0)


def check_document(document: Any, what: str, version: int, fields: Sequence[str]) -> Mapping[str, Any]:
    """`document` as a mapping of format `what`, `version`, with `fields`; ValueError says what is wrong."""
    if not isinstance(document, Mapping):
        raise ValueError(f"expected a {what} as a JSON object, found {type(document).__name__}")
    if document.get("format") != f"memferry {what}":
        raise ValueError(
            f"expected format 'memferry {what}', found {document.get('format')!r}; is this another file?"
        )
    if document.get("version") != version:
        raise ValueError(
            f"expected {what} version {version}, found {document.get('version')!r}; make the {what} again "
            "with this "
            "release"
        )
    missing = [name for name in fields if name not in document]
    if missing:
        raise ValueError(f"the {what} lacks {', '.join(missing)}; the file is incomplete, make it again")
    return document


def check_items(items: Any, what: str) -> list[Mapping[str, Any]]:
    """`items` as a list of JSON objects, or ValueError naming the first that is not one."""
    if not isinstance(items, list):
        raise ValueError(f"expected {what} as a JSON list, found {type(items).__name__}")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"expected {what}[{index}] as a JSON object, found {type(item).__name__}")
    return items
