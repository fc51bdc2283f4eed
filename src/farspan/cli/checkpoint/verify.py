"""`farspan ckpt verify`: reads all of a checkpoint, or of each in a folder, and compares it with its checksums."""

from __future__ import annotations

import argparse
import os

from farspan.cli.arguments import Parser
from farspan.cli.checkpoint.options import add_files, add_json, make_parser, write

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt verify`."""
    text = "read all of a checkpoint, and compare it with its checksums"
    parser = make_parser(commands, "verify", text, "Exits 0 if it is whole, 1 if anything is damaged.")
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of checkpoints, which are all read")
    add_files(parser)
    add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.errors import CheckpointError
    from farspan.state.format import committed, is_checkpoint, verify

    folders = [arguments.path] if is_checkpoint(arguments.path) else committed(arguments.path)
    if not folders:
        what = "is not there" if not os.path.exists(arguments.path) else "is no checkpoint, and holds none"
        raise CheckpointError(
            f"{arguments.path} {what}.", why=f"looked in {os.getcwd()}.", hint="farspan ckpt ls FOLDER"
        )
    rows: list[dict[str, str]] = []
    lines: list[str] = []
    for folder in folders:
        found = verify(folder, arguments.files)
        rows += [{"checkpoint": folder, "file": each.file, "tensor": each.tensor, "what": each.what} for each in found]
        lines += [f"{folder}: damaged: {each}" for each in found] or [f"{folder}: whole"]
    write(arguments, rows, "\n".join(lines))
    return 1 if rows else 0
