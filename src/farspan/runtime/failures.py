"""What the engine asks of an exception: whether a transfer broke, and how it is told in a line."""

from __future__ import annotations

__all__ = ["first_line", "is_transport_error"]


def is_transport_error(error: Exception) -> bool:
    """Whether it says that another rank is gone."""
    return isinstance(error, RuntimeError) and (
        "gloo" in str(error).lower() or "connection" in str(error).lower() or "pair closure" in str(error)
    )


def first_line(error: BaseException) -> str:
    """Its first line, "" if it says nothing."""
    lines = str(error).splitlines()
    return lines[0] if lines else ""
