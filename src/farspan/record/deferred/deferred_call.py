"""A call of an op on values that have been computed: it is not recorded until a recorded call needs its result."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farspan.call.infer.entry import Entry
from farspan.graph import EVERYWHERE, Call, Value
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

__all__ = [
    "MOST_BYTES",
    "DeferredCall",
    "are_known",
    "can_go_back",
    "is_deferred",
    "is_local",
    "is_ready",
    "is_view",
    "sources_are_held",
    "sources_of",
    "viewed_by",
]

MOST_BYTES = 1 << 20
"""Limit on what a deferred op takes. An op that takes more is recorded at once, for a rank that reads it would have to
fetch all that; but views are not, of which a rank fetches the part that it reads.
"""


class DeferredCall(Call):
    """A call that is not recorded while it is in no segment."""

    __slots__ = ("is_outdated", "results", "tensors", "values")

    def __init__(self, *, tensors: Sequence[torch.Tensor], **known: Any) -> None:
        super().__init__(**known)
        self.tensors: Sequence[torch.Tensor] = tensors
        """Its arguments: as long as they are held, their owners keep the data."""
        self.values: list[weakref.ref[Value]] = []
        """Weak references to its results, while it is not recorded: it ends with the last of them, and what it takes is
        free."""
        self.results: list[torch.Tensor] | None = None
        """The tensors that the call gives, once this rank has computed them; None before that."""
        self.is_outdated = False
        """True if an input has been written into since."""
        self.segment: Any = None

    def give(self) -> None:
        """Keep only weak references to the outputs: the program has them now, and they end with it."""
        self.values, self.outputs = [weakref.ref(value) for value in self.outputs], ()

    def take_back(self) -> None:
        """Have outputs as any recorded call."""
        known = [reference() for reference in self.values]
        dropped = [Value(meta, self.stage, call=self, index=i) for i, meta in enumerate(self.entry.metas)]
        self.outputs = tuple([value or other for value, other in zip(known, dropped, strict=True)])
        for value in self.outputs:
            value.segment = self.segment

    @property
    def is_settled(self) -> bool:
        """Returns whether every rank that has made the call has computed it, so that it is never recorded."""
        return self.segment is None and self.arguments is None

    @property
    def is_large_view(self) -> bool:
        """Returns whether its result is too large to be fetched without being read."""
        return (
            is_view(self.entry, self.arguments or ())
            and sum([meta.size_bytes for meta in self.entry.metas]) > MOST_BYTES
        )

    def uses(self, values: set[Value]) -> bool:
        """Returns whether the call takes one of `values`, itself or through other deferred calls."""
        return any(item in values for item in _values_behind(self))

    def is_held(self) -> bool:
        """Returns whether the program still holds a result of the call."""
        return any(value is not None and value.is_readable for value in [item() for item in self.values])


def is_deferred(value: Any) -> bool:
    """Returns whether it is the result of a call that is not recorded."""
    return isinstance(value, Value) and type(value.call) is DeferredCall and value.segment is None


def is_local(value: Value) -> bool:
    """Returns whether it is the result of a deferred call that has not been run by its owner: recorded or not."""
    call = value.call
    return type(call) is DeferredCall and (call.segment is None or value.pending)


def is_ready(call: DeferredCall) -> bool:
    """Returns whether all inputs of a deferred call have been computed."""
    return not any(value.pending for value in sources_of(call))


def sources_are_held(call: DeferredCall) -> bool:
    """Returns whether the owners keep the inputs of a deferred call."""
    return all(value.is_readable for value in sources_of(call))


def sources_of(call: DeferredCall, *, is_to_compute: bool = False) -> list[Value]:
    """Returns the values that a deferred call is made of, itself or by other deferred calls.

    Args:
        call: Which.
        is_to_compute: Only those that this rank needs to compute it, with what it has computed already.
    """
    found: dict[Value, None] = {}
    for item in _values_behind(call, is_to_compute=is_to_compute):
        if not is_local(item):
            found[item] = None
    return list(found)


def _values_behind(call: DeferredCall, *, is_to_compute: bool = False) -> Iterator[Value]:
    """Returns all values that a call is made of, at any depth of calls that their owner has not run."""
    todo: list[Any] = [call]
    seen: set[Any] = {call}
    while todo:
        last = todo.pop()
        if is_to_compute and last.results is not None:
            continue
        for item in last.arguments or ():
            if isinstance(item, Value):
                yield item
                if is_local(item) and item.call not in seen:
                    seen.add(item.call)
                    todo.append(item.call)


def are_known(arguments: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether the arguments of a call have all been computed, some of them by the model, and are not too
    large."""
    size_bytes = 0
    for item in arguments:
        if isinstance(item, Value):
            if not _is_computed(item):
                return False
            size_bytes += item.meta.size_bytes
        else:
            with DisableTorchFunction():
                size_bytes += item.numel() * item.element_size()
    return size_bytes <= MOST_BYTES and any(type(tensor) is LazyTensor for tensor in tensors)


def is_view(entry: Entry, arguments: Sequence[Any]) -> bool:
    """Returns whether a call only takes views of one value that has been computed."""
    if len(arguments) != 1 or not isinstance(arguments[0], Value) or not _is_computed(arguments[0]):
        return False
    return bool(entry.num_results) and min(entry.shares) >= 0


def viewed_by(call: DeferredCall) -> Value | None:
    """Returns the value of which it takes views, if it does nothing else."""
    arguments = call.arguments
    return arguments[0] if arguments and is_view(call.entry, arguments) else None


def can_go_back(value: Value) -> bool:
    """Returns whether a backward may still come through what has made the value."""
    if type(value.call) is Call:
        return value.meta.requires_grad and value.call.arguments is not None
    todo, seen = [value], {value}
    while todo:
        last = todo.pop()
        call = last.call
        if not last.meta.requires_grad:
            continue
        if call is None or (not is_deferred(last) and call.arguments is not None):
            return True
        needed = [item for item in call.arguments or () if isinstance(item, Value) and item not in seen]
        todo += needed if is_deferred(last) else []
        seen.update(needed)
    return False


def _is_computed(value: Value) -> bool:
    """Returns whether it has been computed, and stays what it is: no parameter, no gradient, no state."""
    if value.pending and not is_local(value):
        return False
    if value.name or value.gradient_of or value.state_of is not None or value.stage == EVERYWHERE:
        return False
    return value.call is not None or value.index > 0
