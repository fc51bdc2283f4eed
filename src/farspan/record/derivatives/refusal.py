"""The errors for second derivatives that cannot be recorded."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.call.derivative import FunctionAgain, FunctionDerivative, ModuleAgain, ModuleDerivative
from farspan.call.leaf import Leaf, WholeError
from farspan.call.naming import find_where, format_where
from farspan.errors import RecordError
from farspan.graph import Call, RequestedGradients, Value, passed_from

__all__ = ["check_requested", "refuse_second_derivatives"]


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


def check_requested(requested: RequestedGradients, roots: Sequence[Value]) -> None:
    """Raises if gradient is asked for with respect to a result that the derivatives of its own call depend on, as those
    of tanh do: they have computed it again, so that part of its gradient goes past it.

    Args:
        requested: What is asked for.
        roots: Of what.
    """
    again = [value for value in requested.values if isinstance(value.call, Call) and value.call.is_repeated]
    if again and any(map(_computes_again, passed_from(roots, set(roots)))):
        raise RecordError(
            f"torch.autograd.grad with respect to the {again[0].describe()} cannot be recorded here.",
            why=f"at {format_where(find_where())}: gradients with a history have been taken through it, and compute it "
            "again: not all of its gradient comes to it.",
            hint="ask for the gradient of what it is made of, or compute both in the forward of a module of the model",
        )


def _computes_again(call: Call) -> bool:
    target = call.target.module if isinstance(call.target, Leaf) else call.target
    return isinstance(target, (FunctionAgain, FunctionDerivative, ModuleAgain, ModuleDerivative))
