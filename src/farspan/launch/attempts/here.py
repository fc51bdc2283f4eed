"""The ranks of one start that are on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from farspan.launch.environment import launch_variables
from farspan.launch.job import Crew
from farspan.launch.rank_process import Rank
from farspan.settings import PREFIX

__all__ = ["Here", "inherited_variables"]


class Here(Crew):
    """All ranks, on this machine.

    Args:
        command: What each runs.
        num_processes: How many.
        shared: The variables that all of them get.
        first: The first rank that is here, where others are elsewhere.
        console: The rank that has the console; None for none.
        is_debugged: Whether a debugger is in that rank: then `breakpoint()` is for it alone.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_processes: int,
        shared: Mapping[str, str],
        *,
        first: int = 0,
        console: int | None = 0,
        is_debugged: bool = False,
    ) -> None:
        self.num_processes = num_processes
        self._command = command
        self._variables = inherited_variables() | dict(shared)
        self._first = first
        self._console = console
        self._is_debugged = is_debugged

    def start(self, number: int, log_dir: Path, more: Mapping[str, str] | None = None) -> Rank:
        """Starts one, with more variables of its own."""
        own = {f"{PREFIX}RANK": str(number), f"{PREFIX}LOCAL_RANK": str(number - self._first)}
        has_console = number == self._console
        if self._is_debugged and not has_console:
            own["PYTHONBREAKPOINT"] = "0"  # it has no keyboard
        variables = self._variables | own | dict(more or {})
        return Rank(number, self._command, variables, log_dir / f"rank{number}.log", has_console=has_console)


def inherited_variables() -> dict[str, str]:
    """Returns the variables of this process but those by which a launcher gives a process its place."""
    hidden = launch_variables(os.environ)
    return {name: text for name, text in os.environ.items() if name not in hidden}
