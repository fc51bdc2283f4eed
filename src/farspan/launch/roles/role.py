"""What a role is, and which one this process has."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass

from farspan import settings
from farspan.errors import quoted
from farspan.units import parse_count

__all__ = ["Role", "describe_process", "read_role", "role"]

_FORM = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,39})=([0-9]{1,9})")
_MOST_PROCESSES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A part of a run.

    Attributes:
        name: What its processes get from `farspan.role()`.
        num_processes: How many there are; their ranks count from 0.
    """

    name: str
    num_processes: int


def read_role(text: str) -> Role:
    """Reads a role, as an argument type.

    >>> read_role("actor=4")
    Role(name='actor', num_processes=4)
    """
    match = _FORM.fullmatch(text)
    number = parse_count(match[2]) if match else None
    if match is None or number is None or not 1 <= number <= _MOST_PROCESSES:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is no role, as actor=4: a name of at most 40 letters, and 1 to {_MOST_PROCESSES} processes"
        )
    return Role(name=match[1], num_processes=number)


def role() -> str:
    """Returns the role of this process, as `farspan run --role NAME=N` has given it; "" in a run without roles.

    Example:
        >>> import farspan
        >>> farspan.role()
        ''
    """
    return settings.text("ROLE")


def describe_process() -> str:
    """Returns what this process is called in messages: "actor 2", or "process 4711" without a role."""
    name, number = role(), os.environ.get(f"{settings.PREFIX}RANK", "0")
    return f"{name} {number}" if name else f"process {os.getpid()}"
