"""`farspan ckpt`: looks at checkpoints, and turns them into other files and back."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import Parser
from farspan.cli.checkpoint import diff, export, import_files, ls, reshard, verify

__all__ = ["add_command"]

_EPILOG = """examples:
  farspan ckpt ls checkpoints                          # what is there
  farspan ckpt verify checkpoints/step-200             # reads all of it, and compares it with its checksums
  farspan ckpt export checkpoints model/               # the model, as safetensors files that transformers loads
  farspan ckpt export checkpoints model.pt             # or as a file for torch.load
  farspan ckpt import model.safetensors checkpoints    # the reverse
  farspan ckpt diff checkpoints/step-100 checkpoints/step-200
"""


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the parser of `farspan ckpt`, and those of its commands."""
    parser = commands.add_parser(
        "ckpt",
        help="ls, verify, export, import, reshard and diff: of checkpoints",
        description="Look at checkpoints, and turn them into other files and back; one tensor is in memory at a time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    inner = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (ls, verify, export, import_files, reshard, diff):
        command.add_command(inner)
