"""The command `farspan`: one small module per sub-command, each with `add_command(commands)`."""

from __future__ import annotations

__all__: list[str] = []
