"""Numbers as people read and write them: bytes, seconds and counts, each with its unit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

__all__ = ["BYTES", "format_bytes", "format_count", "format_seconds", "parse_amount"]

BYTES = {"": 1.0, "b": 1.0} | {
    f"{prefix}{infix}b": (1024.0 if infix else 1000.0) ** (power + 1)
    for power, prefix in enumerate("kmgtp")
    for infix in ("", "i")
}
"""Units of sizes, in small letters."""
_AMOUNT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)(?:/s)?\s*", re.IGNORECASE)


def parse_amount(given: object, units: Mapping[str, float]) -> float | None:
    """A number, or a text of a number and a unit; None if it is neither, or not finite.

    >>> parse_amount("14GiB", BYTES), parse_amount(1e3, BYTES), parse_amount("14 apples", BYTES)
    (15032385536.0, 1000.0, None)
    """
    match = None if isinstance(given, bool) else _AMOUNT.fullmatch(str(given))
    unit = units.get(match[2].lower()) if match else None
    try:
        value = float(match[1]) * unit if match and unit else math.inf
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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


def _scale(value: float, step: int, units: Sequence[str]) -> str:
    """One decimal in the largest unit that leaves at least 1; none in the smallest unit, for whole things."""
    if not math.isfinite(value):
        return f"{value} {units[0]}"
    if abs(round(value)) < step:
        return f"{round(value)} {units[0]}"
    size, index = value / step, 1
    # 1023.96 KiB would print as "1024.0 KiB": compare what is printed.
    while abs(round(size, 1)) >= step and index < len(units) - 1:
        size, index = size / step, index + 1
    return f"{size:.1f} {units[index]}"
