"""Processes that are forked from servers which have imported torch."""

from __future__ import annotations

__all__: list[str] = []
