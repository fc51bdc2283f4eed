"""`%%farspan -n 4` in a notebook: the cell runs in four ranks. `%load_ext farspan` brings it."""

from __future__ import annotations

import shlex
from typing import Any

from farspan.errors import LaunchError, quoted
from farspan.launch.forked.launch import launch
from farspan.units import parse_count

__all__ = ["load_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Adds the magic to a shell of IPython, as `%load_ext farspan`."""

    def run_cell(line: str, cell: str) -> None:
        words = shlex.split(line)
        count = parse_count(words[1]) if len(words) == 2 and words[0] == "-n" else None
        if count is None:
            raise LaunchError(
                f"%%farspan {quoted(line)} says no number of processes.",
                why="a cell is run by as many as -n says.",
                hint="%%farspan -n 4",
            )
        code = compile(shell.transform_cell(cell), "<cell of %%farspan>", "exec")
        launch(lambda: exec(code, shell.user_ns), processes=count)

    shell.register_magic_function(run_cell, "cell", "farspan")
