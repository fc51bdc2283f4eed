"""`farspan ckpt ls`: the checkpoints of a folder, or the tensors of one."""

from __future__ import annotations

import argparse
import os
from typing import Any

from farspan.cli.arguments import Parser
from farspan.cli.checkpoint.options import add_json, add_key, make_parser, write
from farspan.units import count_of

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt ls`."""
    parser = make_parser(commands, "ls", "list the checkpoints of a folder, or the tensors of a checkpoint or file")
    parser.add_argument("path", metavar="PATH", help="a folder of checkpoints, a checkpoint, or a file of tensors")
    add_key(parser)
    add_json(parser)
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from farspan.state.format import committed, is_checkpoint

    if os.path.isdir(arguments.path) and not is_checkpoint(arguments.path) and committed(arguments.path):
        return _list_checkpoints(arguments)
    return _list_tensors(arguments)


def _list_checkpoints(arguments: argparse.Namespace) -> int:
    from farspan.errors import CheckpointError
    from farspan.state.format import committed, newest, read_manifest
    from farspan.units import format_bytes

    latest = newest(arguments.path)
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for path in committed(arguments.path):
        name = os.path.basename(path)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            rows.append({"name": name, "damaged": error.what})
            lines.append(f"{name:20} damaged: {error.what}")
            continue
        size = sum(file.size_bytes for file in manifest.files)
        row = {"name": name, "step": manifest.step, "num_tensors": len(manifest.tensors)}
        rows.append(row | {"num_files": len(manifest.files), "size_bytes": size, "is_latest": path == latest})
        mark = "   latest" if path == latest else ""
        parts = f"{len(manifest.tensors):8} tensors {len(manifest.files):5} files"
        lines.append(f"{name:20}{parts} {format_bytes(size):>12}{mark}")
    write(arguments, rows, "\n".join(lines))
    return 0


def _list_tensors(arguments: argparse.Namespace) -> int:
    from farspan.state.conversion.opened import open_source
    from farspan.units import format_bytes

    with open_source(arguments.path, key=arguments.key, is_whole=True) as source:
        rows = [
            {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "size_bytes": entry.size_bytes}
            for name, entry in source.tensors.items()
        ]
        width = max(map(len, source.tensors), default=0)
        lines = [
            f"{name:{width}}  {entry.dtype:10} {format_bytes(entry.size_bytes):>10}  {list(entry.shape)}"
            for name, entry in source.tensors.items()
        ]
        total = sum(entry.size_bytes for entry in source.tensors.values())
    found = f"{count_of(len(rows), 'tensor')}, {format_bytes(total)}, in {source.path}"
    write(arguments, rows, "\n".join([*lines, found]))
    return 0
