"""A parser of command lines whose errors are farspan's, and the whole numbers that options take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from farspan.errors import LaunchError, quoted
from farspan.units import parse_count

__all__ = ["Parser", "host_range", "whole_number"]


_MOST_HOSTS = 4096
_OF_OTHERS = {"--nproc-per-node": "-n", "--nproc": "-n", "--np": "-n", "--ntasks": "-n"}
"""Words of torchrun, mpirun and srun, and the option here that means the same."""


class Parser(argparse.ArgumentParser):
    """Raises a LaunchError for bad use, instead of ending the process."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (of its overloads this is all)
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Reads a command line; a word that this parser does not know is its own error, not that of `farspan`."""
        known, unknown = super().parse_known_args(None if args is None else list(args), namespace)
        if unknown:
            self._refuse(f"unrecognized arguments: {' '.join(unknown)}", self._nearest_option(unknown[0]))
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        self._refuse(message, "")

    def _refuse(self, message: str, nearest: str) -> NoReturn:
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        hint = f"{nearest}     all options: " if nearest else ""
        raise LaunchError(f"{self.prog}: {message}.", why=f"its use is {usage}", hint=f"{hint}{self.prog} --help")

    def _nearest_option(self, word: str) -> str:
        import difflib  # only where it is of use: on the way of every start

        name = word.partition("=")[0].replace("_", "-")
        if _OF_OTHERS.get(name) in self._option_string_actions:
            return ", ".join(self._option_string_actions[_OF_OTHERS[name]].option_strings)
        near = difflib.get_close_matches(name[:100], self._option_string_actions, n=1, cutoff=0.6)
        return ", ".join(self._option_string_actions[near[0]].option_strings) if near else ""


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Makes an argument type, for argparse, of the whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        value = parse_count(text)
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number from {least} to {most}")
        return value

    return read


def host_range(text: str) -> tuple[int, int]:
    """Reads the fewest and the most hosts of a run, as an argument type.

    >>> host_range("1:4"), host_range("2")
    ((1, 4), (2, 2))
    """
    fewest, _, most = text.partition(":")
    numbers = [parse_count(each) for each in (fewest, most or fewest)]
    low, high = numbers
    if low is None or high is None or not 1 <= low <= high <= _MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no range of hosts, as 2 or 1:4")
    return low, high
