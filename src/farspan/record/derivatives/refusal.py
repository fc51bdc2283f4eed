"""The error for second derivatives that cannot be recorded."""

from __future__ import annotations

from farspan.call.leaf import WholeError
from farspan.call.naming import find_where, format_where

__all__ = ["HAS_RUN", "refuse_second_derivatives"]

HAS_RUN = (
    "which has run already: a value was read since, a weight written, a flag or hook set, or another gradient taken"
)


def refuse_second_derivatives(why: str) -> WholeError:
    """Returns the error for a backward with create_graph=True that cannot be recorded call by call."""
    if why.endswith(HAS_RUN):
        hint = (
            "take this gradient first: then loss.item(), requires_grad_(), eval(), torch.autograd.grad without a graph"
        )
    else:
        hint = "compute it in the forward of a module of the model: it then runs as one unit, on one rank"
    return WholeError(
        "create_graph=True cannot be recorded here: second derivatives need all calls again.",
        why=f"at {format_where(find_where())}: {why}.",
        hint=hint,
    )
