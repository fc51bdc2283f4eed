"""Several tensors of the program that are the same memory in the same shape: one is the main one, the others its twins.

g = p.grad             main
d = p.grad.data        its twin: what is written into either is in both
"""

from __future__ import annotations

import weakref

from farspan.graph import Value
from farspan.record.tensor import LazyTensor

__all__ = ["become_twin", "leave_memory", "main_of", "make_twin", "members", "put_value", "twins_of"]


def main_of(lazy: LazyTensor) -> LazyTensor:
    """Returns the tensor that represents the memory of `lazy`."""
    return lazy if lazy._twin_of is None else lazy._twin_of


def twins_of(lazy: LazyTensor) -> list[LazyTensor]:
    """Returns those twins of a main tensor that the program still holds."""
    return [twin for reference in lazy._twins or () if (twin := reference()) is not None]


def members(lazy: LazyTensor) -> list[LazyTensor]:
    """Returns the views of a tensor that the program still holds."""
    return [member for reference in lazy._family or () if (member := reference()) is not None]


def make_twin(lazy: LazyTensor) -> LazyTensor:
    """Returns another tensor of the same memory."""
    twin = LazyTensor.make(lazy._value, lazy._recorder)
    become_twin(twin, lazy)
    return twin


def become_twin(lazy: LazyTensor, other: LazyTensor) -> None:
    """Let `lazy`, which stands alone, be the memory that `other` is."""
    main = main_of(other)
    lazy._value = main._value
    main._value.lazy = weakref.ref(main)
    lazy._twin_of, lazy._is_gradient = main, main._is_gradient
    main._twins = [*[item for item in main._twins or () if item() is not None], weakref.ref(lazy)]


def put_value(lazy: LazyTensor, value: Value) -> None:
    """The memory of `lazy` has been written: it is `value` now, for all that are this memory."""
    main = main_of(lazy)
    main._value.lazy = None
    for each in (main, *twins_of(main)):
        each._value = value
    value.lazy = weakref.ref(main)


def leave_memory(lazy: LazyTensor) -> LazyTensor | None:
    """Let `lazy` stand alone, with the value it has; who shares its memory goes on doing so without it.

    Returns:
        What stands for the memory from now on, if others share it that have known it by `lazy`.
    """
    if lazy._twin_of is not None:
        lazy._twin_of._twins = [item for item in lazy._twin_of._twins or () if item() not in (None, lazy)]
    root = None if lazy._view is None else lazy._view.root
    if type(root) is LazyTensor:
        root._family = [item for item in root._family or () if item() is not None and item() is not lazy]
    elif root is not None:  # a parameter
        aliases = lazy._recorder.placed[id(root)].aliases
        aliases[:] = [item for item in aliases if item() is not None and item() is not lazy]
    if lazy._alias_of is not None:
        aliases = lazy._alias_of.aliases
        aliases[:] = [item for item in aliases if item() is not None and item() is not lazy]
    heir = None
    if twins_of(lazy) or members(lazy):
        heir = LazyTensor.make(lazy._value, lazy._recorder)
        heir._view, heir._alias_of, heir._is_gradient = lazy._view, lazy._alias_of, lazy._is_gradient
        heir._is_counted = lazy._is_counted
        for twin in twins_of(lazy):
            become_twin(twin, heir)
        for member in members(lazy):
            member._view = member._view._replace(root=heir)
        heir._family = lazy._family
    elif lazy._value.lazy is not None and lazy._value.lazy() is lazy:
        lazy._value.lazy = None
    lazy._twin_of = lazy._twins = lazy._view = lazy._family = lazy._alias_of = None
    lazy._is_gradient = False
    return heir
