"""Hooks of the program on what gradients with a history are requested of: each rank calls them, as autograd does.

A hook on a tensor that nothing else is behind (a parameter, an input, what has been detached) changes its gradient.
Hooks on what gradient goes on from are refused where it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from farspan.record.nodes.tensor_hooks import changed

if TYPE_CHECKING:
    import torch

    from farspan.graph import Value
    from farspan.record.recording import Recording

__all__ = ["after_hooks", "hooks_on_parameter", "hooks_on_value"]


def hooks_on_parameter(recorder: Recording, name: str) -> list[Any]:
    """Returns the hooks on a parameter that are called with its gradient."""
    item = recorder.hooks.hooked.get(name)
    return [] if item is None else list(item.before.values())


def hooks_on_value(value: Value) -> list[Any]:
    """Returns the hooks on a recorded tensor."""
    hooks = None if value.call is None else value.call.hooks
    return [] if hooks is None else [hook for number, hook in hooks.of_tensors.values() if number == value.index]


def after_hooks(gradient: torch.Tensor, hooks: Iterable[Any]) -> torch.Tensor:
    """Returns what hooks make of a gradient."""
    for hook in hooks:
        gradient = changed(hook, gradient, hook(gradient))
    return gradient
