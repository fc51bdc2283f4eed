"""`farspan ckpt export`: the model of a checkpoint as plain safetensors files, or as a torch file."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import Parser
from farspan.cli.checkpoint.options import add_files, add_json, add_key, make_parser, write
from farspan.units import count_of

__all__ = ["add_command"]

_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt export`."""
    parser = make_parser(
        commands,
        "export",
        "write the model of a checkpoint as plain safetensors files, or as a torch file",
        "A name that ends in .safetensors is one such file, one in .pt, .pth, .bin or .ckpt a file of torch.save; "
        "anything else a folder, which gets the files that transformers looks for.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of checkpoints: the newest counts")
    parser.add_argument("out", metavar="OUT", help="what is written; it must not be there yet")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="50GB", help="most of one file in a folder (default: 50GB)"
    )
    add_key(parser)
    add_files(parser)
    add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.errors import CheckpointError, quoted
    from farspan.state.conversion.into_files import write_safetensors, write_torch
    from farspan.state.conversion.opened import open_source
    from farspan.units import BYTES, format_bytes, parse_amount

    most = parse_amount(arguments.max_shard_size, BYTES)
    if most is None or most <= 0:
        what = f"--max-shard-size {quoted(arguments.max_shard_size)} is no size."
        raise CheckpointError(what, why="a size is a number with a unit.", hint="--max-shard-size 5GB")
    with open_source(arguments.path, key=arguments.key, folders=arguments.files) as source:
        is_torch = arguments.out.endswith(_TORCH)
        files = write_torch(source, arguments.out) if is_torch else write_safetensors(source, arguments.out, most)
        total = sum(entry.size_bytes for entry in source.tensors.values())
    value = {"from": source.path, "files": files, "num_tensors": len(source.tensors), "size_bytes": total}
    text = f"{source.path}: {count_of(len(source.tensors), 'tensor')}, {format_bytes(total)}"
    write(arguments, value, "\n".join([text, *[f"  {file}" for file in files]]))
    return 0
