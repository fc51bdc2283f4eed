"""The command `farspan`: finds the sub-command, and prints errors of farspan without a traceback.

A module of a sub-command adds its parser, whose default `execute` takes the parsed arguments and returns the
exit code. It imports what it needs inside `execute`: `farspan --help` never imports torch.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from farspan.cli import checkpoint, doctor_command, plan_command, profile, report, run_command, script, top
from farspan.cli.arguments import Parser
from farspan.errors import FarspanError
from farspan.outputs import write_line, write_output

__all__ = ["main"]


class _ShowVersion(argparse.Action):
    """Looks the version up only when asked: importlib.metadata takes longer than all else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            version = metadata.version("farspan")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        write_output(f"farspan {version}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 2 for bad use.

    Args:
        argv: The words after `farspan`; None takes those of this process.
    """
    try:
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        return int(arguments.execute(arguments))
    except FarspanError as error:
        write_line(f"{type(error).__name__}: {error}")
        return 2
    except BrokenPipeError:  # whoever reads our output has seen enough: `farspan report step.json | head`
        return 128 + signal.SIGPIPE


def _parse(given: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="farspan",
        description="Train the PyTorch model you have, in the loop you have, on the machines you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    run_command.add_command(commands)
    top.add_command(commands)
    doctor_command.add_command(commands)
    plan_command.add_command(commands)
    profile.add_command(commands)
    report.add_command(commands)
    checkpoint.add_command(commands)

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(execute=show_help)
    split = script.split_script if given[:1] in (["plan"], ["profile"]) else run_command.split_script
    words, script_argv = split(given)
    return parser.parse_args(words, argparse.Namespace(script_argv=script_argv))
