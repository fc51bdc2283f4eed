"""`farspan ckpt diff`: in which tensors two checkpoints, or files of tensors, differ."""

from __future__ import annotations

import argparse
import dataclasses
import math

from farspan.cli.arguments import Parser
from farspan.cli.checkpoint.options import add_json, add_key, make_parser, write

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt diff`."""
    parser = make_parser(
        commands,
        "diff",
        "say in which tensors two checkpoints or files differ, and by how much",
        "Two checkpoints are compared as a whole; a checkpoint and a file by the model. Exits 0 if they are the same "
        "to the bit, 1 if they differ.",
    )
    parser.add_argument("one", metavar="A", help="a checkpoint, a folder of some, or a file of tensors")
    parser.add_argument("other", metavar="B", help="another one")
    add_key(parser)
    add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.state.conversion.differences import differences
    from farspan.state.conversion.opened import is_of_farspan, open_source

    paths = (arguments.one, arguments.other)
    is_whole = all(is_of_farspan(path) for path in paths)
    one, other = (open_source(path, key=arguments.key, is_whole=is_whole) for path in paths)
    with one, other:
        found = list(differences(one, other))
        num_tensors = len(one.tensors.keys() | other.tensors.keys())
    rows = [dataclasses.asdict(each) for each in found]
    for row in rows:
        if row["largest"] is not None and not math.isfinite(row["largest"]):
            row["largest"] = str(row["largest"])  # JSON has no word for it
    lines = [f"{each.name}: {each.what}" for each in found]
    write(arguments, rows, "\n".join([*lines, f"{len(found)} of {num_tensors} tensors differ"]))
    return 1 if found else 0
