"""`farspan top`: how far the ranks of a run are, while it runs."""

from __future__ import annotations

from farspan.cli.top.command import add_command

__all__ = ["add_command"]
