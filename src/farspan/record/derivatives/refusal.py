"""The error for second derivatives that cannot be recorded."""

from __future__ import annotations

from farspan.call.leaf import WholeError
from farspan.call.naming import find_where, format_where

__all__ = ["refuse_second_derivatives"]


def refuse_second_derivatives(why: str) -> WholeError:
    """Returns the error for a backward with create_graph=True that cannot be recorded call by call."""
    if "has run already" in why:
        hint = "take this gradient first, and then change what it depends on"
    else:
        hint = "compute it in the forward of a module of the model: it then runs as one unit, on one rank"
    return WholeError(
        "create_graph=True cannot be recorded here: second derivatives need all calls again.",
        why=f"at {format_where(find_where())}: {why}.",
        hint=hint,
    )
