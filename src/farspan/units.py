"""Numbers as people read them: bytes, seconds and counts, each with its unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["format_bytes", "format_count", "format_seconds"]


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
