"""`farspan report step.json`: a step that `farspan run --report step.json` has measured, explained and drawn."""

from __future__ import annotations

import argparse
import os

from farspan.cli.arguments import Parser
from farspan.outputs import check_outputs, write_output, write_text

__all__ = ["add_command"]

_EPILOG = """examples:
  farspan run -n 4 --report step.json train.py     # measures a step
  farspan report step.json                         # says where its time went
  farspan report step.json --html step.html        # and draws it, below what was planned
  farspan report step.json --perfetto trace.json   # for https://ui.perfetto.dev
"""


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan report`."""
    parser = commands.add_parser(
        "report",
        help="say where the time of a measured step went, and draw it",
        description="Say where the time of a measured step went, and draw it beside its schedule.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("step", metavar="STEP", help="the file that `farspan run --report step.json` has written")
    parser.add_argument("--html", metavar="FILE", help="write a page with the planned and the measured timeline")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for https://ui.perfetto.dev")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.report import MeasuredStep, lanes, page_of, perfetto

    check_outputs({"--html": arguments.html, "--perfetto": arguments.perfetto}, [arguments.step])
    step = MeasuredStep.load(arguments.step)
    for title, timeline in (("planned", step.planned()), ("measured", step.timeline)):
        write_output(f"{title}\n{lanes(timeline)}\n")
    write_output(step.table())
    if arguments.html is not None:
        page = page_of(step, title=f"farspan: {os.path.basename(arguments.step)}")
        write_text(arguments.html, page)
    if arguments.perfetto is not None:
        write_text(arguments.perfetto, perfetto(step.timeline))
    return 0
