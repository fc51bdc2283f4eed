"""`farspan ckpt import`: plain safetensors files, a torch file or a DCP folder as a checkpoint of a model."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import Parser, whole_number
from farspan.cli.checkpoint.options import add_json, add_key, make_parser, write
from farspan.units import count_of

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt import`."""
    parser = make_parser(
        commands,
        "import",
        "make a checkpoint of plain safetensors files, a torch file or a DCP folder",
        "Nothing in them is run. farspan.load(OUT, model=model) loads it; optimizers are not taken over.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a .safetensors file or a folder of some, a torch file, a DCP folder"
    )
    parser.add_argument("out", metavar="OUT", help="a folder of checkpoints, in which a new one is made")
    parser.add_argument(
        "--ranks", metavar="N", type=whole_number(1, 65_536), default=1, help="how many files (default: 1)"
    )
    parser.add_argument("--step", metavar="STEP", type=whole_number(0, 10**15 - 1), help="its step (default: 0)")
    add_key(parser)
    add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.errors import CheckpointError
    from farspan.state.conversion.into_checkpoint import write_checkpoint
    from farspan.state.conversion.opened import is_of_farspan, open_source

    if is_of_farspan(arguments.path):
        what = f"{arguments.path} is a checkpoint of farspan already."
        hint = f"farspan ckpt reshard {arguments.path} {arguments.out} --ranks N"
        raise CheckpointError(what, why="import makes one of other files.", hint=hint)
    with open_source(arguments.path, key=arguments.key) as source:
        path = write_checkpoint(source, arguments.out, arguments.ranks, arguments.step)
    count = len(source.tensors)
    write(arguments, {"checkpoint": path, "num_tensors": count}, f"{path}: {count_of(count, 'tensor')}")
    return 0
