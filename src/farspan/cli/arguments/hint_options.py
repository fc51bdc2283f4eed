"""Hints on the command line of `farspan plan`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from farspan.cli.arguments.parser import whole_number
from farspan.errors import PlanError
from farspan.units import MAX_COUNT

if TYPE_CHECKING:
    from farspan.plan.hints import Hints

__all__ = ["add_arguments", "given", "read_hints"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; they win over what the script gives to `distribute`."""
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=rank:R",
        help="script: where a module, or all that match a pattern, is to lie (may be repeated)",
    )
    parser.add_argument(
        "--together",
        action="append",
        default=[],
        metavar="NAME,NAME",
        help="script: modules or patterns that are to be on one stage (may be repeated)",
    )
    parser.add_argument(
        "--max-memory",
        action="append",
        default=[],
        metavar="SIZE",
        help="script: the most that a device may hold (14GiB), or one of them (rank:0=14GiB; may be repeated)",
    )
    parser.add_argument(
        "--stages", type=whole_number(1, MAX_COUNT), default=None, metavar="N", help="script: exactly so many stages"
    )


def given(arguments: argparse.Namespace) -> list[tuple[str, object]]:
    """Returns the options, each with what it was given; None where it was not."""
    return [
        ("--pin", arguments.pin or None),
        ("--together", arguments.together or None),
        ("--max-memory", arguments.max_memory or None),
        ("--stages", arguments.stages),
    ]


def read_hints(arguments: argparse.Namespace) -> Hints:
    """Returns the hints that the options make.

    Raises:
        PlanError: One is not of its form.
    """
    from farspan.plan.hints import Hints

    return Hints(
        pins=_pairs(arguments.pin, "--pin", "'decoder.*=rank:1'"),
        together=[_names(text) for text in arguments.together],
        max_memory=_memory(arguments.max_memory),
        stages=arguments.stages,
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(name.strip() for name in names):
        raise PlanError(f"--together {text}: a name is empty.", why="names stand between commas.", hint="embed,head")
    return names


def _memory(texts: list[str]) -> str | dict[str, str] | None:
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    return _pairs(texts, "--max-memory", "rank:0=14GiB") or None


def _pairs(texts: list[str], option: str, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not name.strip():
            what = f"{option} {text}: there is no {'name before the ' if sign else ''}=."
            raise PlanError(what, why="it says what, and where or how much.", hint=f"{option} {example}")
        if name in pairs:
            why = f"once with {pairs[name]} and once with {value}."
            raise PlanError(f"{option} {name} is there twice.", why=why, hint="take one of them out")
        pairs[name] = value
    return pairs
