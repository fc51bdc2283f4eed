"""Releases the data of what a segment is given and gives, where autograd has saved nothing of it and nothing else takes
it: a backward needs its history alone.

    s = q0 + q1        q0, q1 came over a border, and an addition saves nothing: no data of q0 and q1
    q0 = g @ V         sent and added up, and a product does not save what it gives: no data of q0
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farspan.call.leaf import Leaf
from farspan.graph import Call, Segment, Value
from farspan.torch_private import poisoned

__all__ = ["release_inputs", "release_memory", "release_unsaved"]

_SAVES_NOTHING = frozenset([torch.add, torch.clone, torch.cat])


def release_inputs(segment: Segment, is_followed: Callable[[Call], bool]) -> None:
    """Release what `segment`, whose forward has run, was given by calls.

    Args:
        segment: Which.
        is_followed: Whether what a call saves is kept apart from its arguments, since it may be computed again.
    """
    given = [value for value in segment.leaves if value.call is not None and value not in segment.entries]
    if given:
        saved = _maybe_saved(segment, is_followed)
        for value in given:
            if value not in saved:
                release_memory(segment.leaves[value])


def release_unsaved(value: Value, is_followed: Callable[[Call], bool]) -> None:
    """Release the data of `value`, which a backward may begin at and nothing else takes any more.

    Args:
        value: Whose.
        is_followed: As above.
    """
    if not _is_its_own(value) or value.data._is_view():
        return
    assert value.call is not None
    if value not in _maybe_saved(value.call.segment, is_followed):
        release_memory(value.data)


def _is_its_own(value: Value) -> bool:
    """Returns whether no other value can have the same tensor, and it is known who has taken it."""
    call = value.call
    if call is None or not call.segment.calls:  # it is of an earlier step
        return False
    is_single = all(other is value or other.data is not value.data for other in call.outputs)
    return type(call.target) is not Leaf and is_single and _gives_new_tensors(call)


def _gives_new_tensors(call: Call) -> bool:
    return not call.entry.mutated and max(call.entry.same_as, default=-1) < 0


def _maybe_saved(segment: Segment, is_followed: Callable[[Call], bool]) -> set[Value]:
    """Returns the values that autograd may have saved as they are, since a call of `segment` takes them."""
    found: set[Value] = set()
    for call in segment.calls:
        if call.target not in _SAVES_NOTHING and not (is_followed(call) and _gives_new_tensors(call)):
            found.update(item for item in call.arguments or () if type(item) is Value)
    return found


def release_memory(tensor: torch.Tensor) -> None:
    """Leave of a tensor its history and shape."""
    if tensor.layout is torch.strided and tensor.numel() > 1:
        tensor.data = poisoned(tensor.shape, tensor.dtype, tensor.device)
