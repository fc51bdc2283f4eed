"""Options that several commands of `farspan ckpt` have, and how they print."""

from __future__ import annotations

import argparse
import json
from typing import Any

from farspan.cli.arguments import Parser
from farspan.outputs import write_output

__all__ = ["add_files", "add_json", "add_key", "make_parser", "write"]


def make_parser(commands: argparse._SubParsersAction[Parser], name: str, text: str, more: str = "") -> Parser:  # pyright: ignore[reportPrivateUsage]
    """A parser of one command.

    Args:
        commands: To which it is added.
        name: Of the command.
        text: What it does, in one line.
        more: What else there is to say.
    """
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.{' ' if more else ''}{more}",
        allow_abbrev=False,
    )


def add_files(parser: Parser) -> None:
    parser.add_argument(
        "--files",
        metavar="FOLDER",
        action="append",
        default=[],
        help="where files of the checkpoint lie that other hosts have written to a disk of their own; may be repeated",
    )


def add_key(parser: Parser) -> None:
    parser.add_argument(
        "--key", metavar="NAME", default="", help="where in a torch file or a DCP folder the model is: model, net/ema"
    )


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def write(arguments: argparse.Namespace, value: Any, text: str) -> None:
    """Print `value` as JSON where that is asked for, else `text`."""
    write_output(json.dumps(value) if arguments.json else text)
