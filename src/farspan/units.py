"""Numbers as people read and write them: bytes, seconds and counts, each with its unit."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence

__all__ = [
    "BYTES",
    "MAX_COUNT",
    "count_of",
    "format_bytes",
    "format_count",
    "format_seconds",
    "format_table",
    "parse_amount",
    "parse_count",
    "parse_number",
]

BYTES = {"": 1.0, "b": 1.0} | {
    f"{prefix}{infix}b": (1024.0 if infix else 1000.0) ** (power + 1)
    for power, prefix in enumerate("kmgtp")
    for infix in ("", "i")
}
"""Units of sizes, in small letters."""
MAX_COUNT = 65_536
"""The most ranks, devices, stages or micro-batches that are read anywhere."""
_COUNT = re.compile(r"[+-]?[0-9]{1,18}")
_PLAIN = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?"
_NUMBER = re.compile(rf"[+-]?{_PLAIN}")
_AMOUNT = re.compile(rf"\s*({_PLAIN})\s*([A-Za-z]*)(/s)?\s*", re.ASCII)
_LONGEST = 40
"""Characters of a number, or of an amount with its unit."""


def parse_count(text: str) -> int | None:
    """Returns a whole number in ASCII digits; None if it is none, or has more than 18 digits.

    >>> parse_count("12"), parse_count("-1"), parse_count("1_000"), parse_count("1.0"), parse_count("9" * 19)
    (12, -1, None, None, None)
    """
    return int(text) if _COUNT.fullmatch(text) else None


def parse_number(text: str) -> float | None:
    """Returns a finite number in ASCII digits; None if it is none.

    >>> parse_number("2.5e-3"), parse_number("nan"), parse_number("1e999"), parse_number("1_0")
    (0.0025, None, None, None)
    """
    value = float(text) if len(text) <= _LONGEST and _NUMBER.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def parse_amount(given: object, units: Mapping[str, float], *, is_rate: bool = False) -> float | None:
    """Returns a number, or a text of a number and a unit, per second where it is a rate; None if it is neither, or not
    finite.

    >>> parse_amount("14GiB", BYTES), parse_amount(1e3, BYTES), parse_amount("14 apples", BYTES)
    (15032385536.0, 1000.0, None)
    >>> parse_amount("25 GB/s", BYTES, is_rate=True), parse_amount("25 GB/s", BYTES)
    (25000000000.0, None)
    """
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        return None
    if not isinstance(given, str):
        return float(given) if abs(given) <= sys.float_info.max else None  # of nan too
    match = _AMOUNT.fullmatch(given) if len(given) <= _LONGEST else None
    unit = units.get(match[2].lower()) if match and (is_rate or not match[3]) else None
    value = float(match[1]) * unit if match and unit else math.inf
    return value if math.isfinite(value) else None


def count_of(count: int, noun: str) -> str:
    """Writes a number of things, with their noun in the plural unless there is one.

    >>> count_of(1, "micro-batch"), count_of(4, "micro-batch"), count_of(2, "copy"), count_of(0, "device")
    ('1 micro-batch', '4 micro-batches', '2 copies', '0 devices')
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{count} {noun}es"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{count} {noun}s"


def format_bytes(num_bytes: float) -> str:
    """Format a size in bytes, in powers of 1024.

    >>> format_bytes(16 * 1024**3), format_bytes(1536), format_bytes(12)
    ('16.0 GiB', '1.5 KiB', '12 B')
    """
    return _scale(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """Format a number of things, in powers of 1000.

    >>> format_count(1_234_567), format_count(950), format_count(7e9)
    ('1.2 M', '950', '7.0 B')
    """
    return _scale(count, 1000, ("", "k", "M", "B", "T")).rstrip()


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds with three digits; from two minutes on in minutes, then in hours.

    >>> format_seconds(0.312), format_seconds(2.5), format_seconds(4.2e-5), format_seconds(600)
    ('312 ms', '2.50 s', '42.0 us', '10.0 min')
    """
    size = abs(seconds)
    if not math.isfinite(size):
        return f"{seconds} s"
    if size == 0:
        return "0 s"
    if size >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    if size >= 120:
        return f"{seconds / 60:.1f} min"
    value, unit = seconds, "s"
    for smaller in ("ms", "us", "ns"):
        if abs(value) < 0.9995:
            value, unit = value * 1e3, smaller
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of texts, under their heads, as columns.

    >>> print(format_table(["host", "GPUs"], [["a", "8"], ["node-17", "-"]]))
    host     GPUs
    a        8
    node-17  -
    """
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    )


def _scale(value: float, step: int, units: Sequence[str]) -> str:
    """Scales to one decimal in the largest unit that leaves at least 1; to no decimal in the smallest unit, for whole
    things."""
    if not math.isfinite(value):
        return f"{value} {units[0]}"
    if abs(round(value)) < step:
        return f"{round(value)} {units[0]}"
    size, index = value / step, 1
    # 1023.96 KiB would print as "1024.0 KiB": compare what is printed.
    while abs(round(size, 1)) >= step and index < len(units) - 1:
        size, index = size / step, index + 1
    return f"{size:.1f} {units[index]}"
