"""Gradient hooks on parameters: every rank runs them, on recorded gradients, right after the backward.

A parameter that several segments use has its gradient summed from one to the next; a hook would see each part of the
sum instead of the whole, so that is refused on every rank before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from farspan.errors import RecordError
from farspan.lazy.ops.functions import find_where, format_where
from farspan.lazy.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from farspan.lazy.leaf import Placed
    from farspan.lazy.recorder import Recorder

__all__ = ["HOOKS", "check_hooks", "register"]

HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def register(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`param.register_hook(hook)`: with one rank it is autograd's; with several every rank calls it."""
    placed = recorder.placed.get(id(args[0]))
    if placed is None:
        recorder.refuse(
            "a gradient hook cannot be registered on a recorded tensor",
            hint="register it on a parameter, or inside the forward of a module that is placed as a whole",
        )
    recorder.flush_before_change("a gradient hook is registered")
    placed.hooked_at = find_where()
    is_post = function is torch.Tensor.register_post_accumulate_grad_hook
    if recorder.engine.num_ranks > 1:
        return recorder.hooks.add(placed, *args[1:], is_post=is_post, **kwargs)
    recorder.runs_each_backward |= is_post
    with DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def check_hooks(passed_on: Iterable[str], parameters: Mapping[str, Placed]) -> None:
    """Raise if a backward would call a parameter's hook with a part of its gradient.

    Args:
        passed_on: Names of the parameters whose gradients are added up on their way from one segment to another.
        parameters: All, by name.

    Raises:
        RecordError: The same on every rank.
    """
    for name in passed_on:
        if parameters[name].hooked_at is not None:
            raise RecordError(
                f"a gradient hook on {name}, which is used in several places.",
                why=f"registered at {format_where(parameters[name].hooked_at)}: it would be called with the\n"
                "gradient of each use instead of with their sum.",
                hint="change param.grad after loss.backward()",
            )
