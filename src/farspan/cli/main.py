"""The command `farspan`: finds the sub-command, and prints errors of farspan without a traceback.

A module of a sub-command adds its parser, whose default `execute` takes the parsed arguments and returns the
exit code. It imports what it needs inside `execute`: `farspan --help` never imports torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from farspan.cli import checkpoint, doctor_command, plan_command, profile, report, run_command, script, top
from farspan.cli.arguments import Parser
from farspan.errors import FarspanError, LaunchError, quoted
from farspan.outputs import write_line, write_output

__all__ = ["main", "make_parser", "parse"]


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
        arguments = parse(list(sys.argv[1:] if argv is None else argv))
        return int(arguments.execute(arguments))
    except FarspanError as error:
        write_line(f"{type(error).__name__}: {error}")
        return 2
    except BrokenPipeError:  # whoever reads our output has seen enough: `farspan report step.json | head`
        return 128 + signal.SIGPIPE


def parse(given: list[str]) -> argparse.Namespace:
    """Reads the words after `farspan`; what is returned says with `execute` what runs them.

    Raises:
        LaunchError: They are no command line of farspan.
    """
    parser, names = make_parser()
    _check_command(given, names)
    split = script.split_script if given[:1] in (["plan"], ["profile"]) else run_command.split_script
    words, script_argv = split(given)
    return parser.parse_args(words, argparse.Namespace(script_argv=script_argv))


def make_parser() -> tuple[Parser, list[str]]:
    """Returns the parser of all commands, and their names."""
    parser = Parser(
        prog="farspan",
        description="Train the PyTorch model you have, in the loop you have, on the machines you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (run_command, top, doctor_command, plan_command, profile, report, checkpoint):
        command.add_command(commands)

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(execute=show_help)
    return parser, list(commands.choices)


def _check_command(given: list[str], names: list[str]) -> None:
    """Refuses a first word that is no command, with the command line that was probably meant."""
    if not given or given[0] in (*names, "-h", "--help", "--version"):
        return
    import difflib  # only where it is of use, as in the other places of the command line

    word = quoted(given[0])
    near = difflib.get_close_matches(given[0][:100], names, n=1, cutoff=0.5)
    what, words = f"{word} is no command of farspan", ["--help"]
    if given[0].startswith("-"):
        what = f"farspan has no option {word}"
        command = next((each for each in given if each in names), None)
        rest = list(given)
        if command is not None:
            rest.remove(command)
        words = [command or "run", *rest]
    elif os.path.isfile(given[0]):
        words = ["run", "-n", "2", *given]
    elif near:
        words = [*near, *given[1:]]
    hint = f"farspan {' '.join(words)}"
    raise LaunchError(f"{what}.", why=f"the commands are {', '.join(names)}; options come after them.", hint=hint)
