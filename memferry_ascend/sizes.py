"""The one place that reads and writes amounts of memory: "24GiB" to bytes and back.

Binary units (KiB, MiB, GiB, TiB, PiB) are powers of 1024 and decimal ones (KB, MB, GB, TB, PB) powers of
1000. A bare "24G" is refused rather than guessed: the two readings differ by 7 %.
"""

from __future__ import annotations

import re
from fractions import Fraction

from memferry_ascend.errors import ConfigError

KiB, MiB, GiB, TiB, PiB = (1024**i for i in range(1, 6))

_PREFIXES = "KMGTP"
_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}IB": 1024 ** (i + 1) for i, p in enumerate(_PREFIXES)}
    | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate(_PREFIXES)}
)
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse(text: str | int) -> int:
    """Bytes from "24GiB", "1.5 MiB", "500MB", "4096" or an int. Fractions of a byte round down.

    Raises ConfigError for anything else: another unit, NaN, infinity, a negative amount, a bool or a float.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f'a size is a string such as "24GiB" or an int of bytes, not {text!r}')
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"a size cannot be negative: {text}")
        return text
    if text.lstrip().startswith("-"):
        raise ConfigError(f"a size cannot be negative: {text!r}")
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'cannot read {text!r} as a size: write a number and a unit, such as "24GiB" or "500MB"'
        )
    number, unit = match.groups()
    if unit.upper() in tuple(_PREFIXES):
        prefix = unit.upper()
        raise ConfigError(
            f"{text!r} is ambiguous: write {number}{prefix}iB (1024) or {number}{prefix}B (1000)"
        )
    if unit.upper() not in _UNITS:
        raise ConfigError(f"unknown unit {unit!r} in {text!r}: use KiB, MiB, GiB, TiB or KB, MB, GB, TB")
    return int(Fraction(number.replace("_", "")) * _UNITS[unit.upper()])  # Fraction: exact above 2^53 bytes


def coarse(nbytes: int) -> int:
    """At least `nbytes`, at most a 64th more, and the same for measurements that differ a little: a peak moves by some
    bytes from one process to the next, and what one of them called the smallest that works must work in the next."""
    step = 1 << max(0, nbytes.bit_length() - 7)
    return -(-nbytes // step) * step


def fmt(nbytes: int | float) -> str:
    """Bytes for a person, in the largest binary unit that fits: "512 B", "1.50 GiB"."""
    sign, amount = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if amount < 1024:
        return f"{sign}{amount:.0f} B"
    value = float(amount)
    for prefix in _PREFIXES:
        value /= 1024
        if value < 1023.995 or prefix == _PREFIXES[-1]:  # 1023.999 MiB would print as 1024.00 MiB
            break
    return f"{sign}{value:.2f} {prefix}iB"
