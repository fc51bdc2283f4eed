"""Nodes of autograd's graph: what they keep, and how torch shows a tensor that has one (`grad_fn=<MeanBackward0>`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

__all__ = [
    "goes_through_python",
    "history_of",
    "hooks_on_saved",
    "is_run_again_inside",
    "leads_to",
    "leaves_behind",
    "leaves_with_gradient",
    "modules_held_by",
    "saved_by",
    "shape_at",
    "with_history",
]


def hooks_on_saved(node: Any, names: Sequence[str]) -> list[Any] | None:
    """Returns the hooks through which a node of autograd gets what it keeps from its forward, None if torch hides
    them."""
    hooks: list[Any] = []
    for name in names:
        saved: Any = getattr(node, f"_raw_saved_{name}", None)
        if not hasattr(saved, "unpack_hook"):
            return None
        hooks += [] if saved.unpack_hook is None else [saved.unpack_hook]
    return hooks


def shape_at(node: Any, number: int) -> Sequence[int]:
    """Returns the shape of the gradient that a node of autograd takes as its input `number`."""
    return node._input_metadata[number].shape


_saved_names: dict[type, list[str]] = {}


def saved_by(outputs: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Returns the tensors that the autograd graphs of `outputs` hold, and whether something is saved in a way that
    cannot be looked at: packed by hooks, or by a function that may run code of the forward again, as checkpoints do.

    What a normalisation in training mode saves of its running statistics counts as nothing: its backward never looks.
    """
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(stack)
    found: list[Any] = []
    is_packed = False
    while stack:
        node = stack.pop()
        names = _saved_names.get(type(node))
        if names is None:
            names = _saved_names[type(node)] = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
        is_in_training = getattr(node, "_saved_training", False) is True or getattr(node, "_saved_train", False) is True
        for name in names:
            if is_in_training and "running_" in name:
                continue
            for saved in tree_leaves(getattr(node, name)):
                is_packed |= saved.unpack_hook is not None
                found.append(saved.data)
        own = list(getattr(node, "__dict__", {}).values())
        is_packed |= any(map(callable, own))
        found += tree_leaves(own)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return [item for item in found if isinstance(item, torch.Tensor)], is_packed


def modules_held_by(outputs: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Returns the modules that autograd functions in the graphs of `outputs` keep for their backwards, but for what a
    reentrant checkpoint runs again.
    """
    found: list[torch.nn.Module] = []

    def look(node: Any) -> bool:
        kept = node.__dict__.values() if isinstance(node, BackwardCFunction) and not _is_checkpoint(node) else ()
        found.extend(item for item in tree_leaves([*kept]) if isinstance(item, torch.nn.Module))
        return False

    for output in outputs:
        _has_node(output, look)
    return found


def _is_checkpoint(node: Any) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"


def leads_to(output: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Returns whether a backward from `output` comes to `tensor`, which has been computed."""
    wanted = tensor.grad_fn
    return _has_node(output, lambda node: node is wanted)


def leaves_behind(output: torch.Tensor) -> list[torch.Tensor]:
    """Returns the leaves of autograd to which the gradient of `output` flows: a walk over its graph."""
    if not output.requires_grad:
        return []
    if output.grad_fn is None:
        return [output]
    found: list[torch.Tensor] = []
    seen = {output.grad_fn}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def leaves_with_gradient(output: torch.Tensor) -> list[torch.Tensor]:
    """Returns the leaves of autograd to which a backward from `output` gives a gradient; it is done.

    A node may be before a leaf in the graph and have no gradient for it: that of a layer norm's derivative for the
    bias. Where torch has no formula for a backward on the way, which is an error in the one that comes, they are those
    of the graph.
    """
    leaves = leaves_behind(output)
    if not leaves or _has_node(output, lambda node: node.name().endswith("NotImplemented")):
        return leaves
    found = torch.autograd.grad(output, leaves, torch.ones_like(output), retain_graph=True, allow_unused=True)
    return [leaf for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None]


def goes_through_python(output: torch.Tensor) -> bool:
    """Returns whether a backward from `output` comes to an autograd function of somebody else that is written in
    Python: it may begin another backward, to parameters that the graph does not show.
    """

    def is_of_program(node: Any) -> bool:
        own: Any = type(node)
        return isinstance(node, BackwardCFunction) and not own._forward_cls.__module__.startswith("farspan.")

    return _has_node(output, is_of_program)


def is_run_again_inside(output: torch.Tensor) -> bool:
    """Returns whether a backward from `output` begins another one, on what a reentrant `torch.utils.checkpoint`
    computes again.
    """
    return _has_node(output, _is_checkpoint)


def _has_node(output: torch.Tensor, is_wanted: Callable[[Any], bool]) -> bool:
    seen: set[Any] = {output.grad_fn}
    stack = [output.grad_fn] if output.grad_fn is not None else []
    while stack:
        node = stack.pop()
        if is_wanted(node):
            return True
        new = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(new)
        stack += new
    return False


def history_of(tensor: torch.Tensor) -> str:
    """Returns the name that torch shows for what has made `tensor`; "" where it shows none."""
    node: Any = tensor.grad_fn
    if node is None:
        return ""
    name = type(node).__name__
    return node.name().rpartition("::")[2] if name == "CppFunction" else name


def with_history(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor`, which torch shows as made by something of this name; to be shown only."""
    with torch.inference_mode(False), torch.enable_grad():
        return _function_named(name).apply(tensor.detach().clone().requires_grad_())


@functools.cache
def _function_named(name: str) -> Any:
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    function: Any = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward)})
    function._backward_cls.__name__ = name
    return function
