"""`farspan ckpt reshard`: the same checkpoint in another number of files."""

from __future__ import annotations

import argparse
import os

from farspan.cli.arguments import Parser, whole_number
from farspan.cli.checkpoint.options import add_files, add_json, make_parser, write
from farspan.units import count_of

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt reshard`."""
    parser = make_parser(
        commands,
        "reshard",
        "write the same checkpoint in another number of files",
        "Any number of ranks loads any checkpoint; this gathers files that lie on several hosts, or makes them larger "
        "or smaller.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of checkpoints: the newest counts")
    parser.add_argument("out", metavar="OUT", help="another folder of checkpoints, in which the new one is made")
    parser.add_argument("--ranks", metavar="N", type=whole_number(1, 65_536), required=True, help="how many files")
    add_files(parser)
    add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.errors import CheckpointError
    from farspan.state.conversion.into_checkpoint import write_checkpoint
    from farspan.state.conversion.of_checkpoint import CheckpointSource, checkpoint_at

    found = checkpoint_at(arguments.path)
    if found is None:
        what = f"{arguments.path} is no checkpoint, and holds none."
        raise CheckpointError(
            what,
            why=f"looked in {os.getcwd()}.",
            hint=f"farspan ckpt import {arguments.path} {arguments.out}, of other files",
        )
    with CheckpointSource(found, arguments.files, is_whole=True) as source:
        path = write_checkpoint(source, arguments.out, arguments.ranks)
    value = {"checkpoint": path, "from": found, "num_tensors": len(source.tensors)}
    write(arguments, value, f"{path}: {count_of(len(source.tensors), 'tensor')} of {found}")
    return 0
