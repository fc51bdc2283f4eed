"""The parser of `farspan top`, and what shows one table after the other."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import Parser
from farspan.errors import LaunchError

__all__ = ["add_command"]

_EXAMPLES = """\
examples:
  farspan run -n 4 --log-dir logs train.py
  farspan top logs                          # until Ctrl-C, or until the run is over
  farspan top logs --once                   # one table
"""


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Adds the parser of `farspan top` to those of the other commands."""
    parser = commands.add_parser(
        "top",
        help="show how far the ranks of a run are",
        description="Shows the ranks of a run on this host: steps, what share of a step each computes and waits, "
        "memory, and whom the others wait for.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="LOG_DIR", help="the folder of the run's logs (farspan run --log-dir)")
    parser.add_argument("--once", action="store_true", help="show one table and end")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    import threading
    import time
    from pathlib import Path

    from rich.console import Console, Group
    from rich.live import Live

    from farspan.cli.top.table import table_of
    from farspan.launch.rank.status import read_statuses

    def look() -> tuple[Group, bool]:
        """Returns the table, and whether a process of the run is alive."""
        try:
            folder = Path(arguments.folder)
            starts = [read_statuses(path) for path in (folder, *folder.glob("restart-*"))]
        except OSError as error:
            raise LaunchError(
                f"{arguments.folder} cannot be read.",
                why=f"{error.strerror}.",
                hint="the folder that farspan run --log-dir names",
            ) from None
        statuses = max(starts, key=lambda each: max((status.ended_s for status in each), default=0.0))
        if not statuses:
            raise LaunchError(
                f"no rank has said anything in {arguments.folder}.",
                why="each rank does after its first training step; a program of one process does not.",
                hint="the folder that farspan run --log-dir names, once the run has taken a step",
            )
        memory = {status.pid: _resident(status.pid) for status in statuses}
        return table_of(statuses, memory, time.monotonic()), any(size is not None for size in memory.values())

    shown, is_alive = look()
    console = Console()
    if arguments.once:
        console.print(shown)
        return 0
    pause = threading.Event()  # which nobody sets: Ctrl-C ends the wait for the next picture
    with Live(shown, console=console, auto_refresh=False) as live:
        try:
            while is_alive:
                pause.wait(_PERIOD_S)
                shown, is_alive = look()
                live.update(shown, refresh=True)
        except KeyboardInterrupt:
            pass
    if not console.is_terminal:  # where rich ends the last line itself
        console.line()
    return 0


_PERIOD_S = 1.0
"""Seconds between two tables."""


def _resident(pid: int) -> int | None:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
