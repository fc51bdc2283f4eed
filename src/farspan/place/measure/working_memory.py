"""Measures the memory that a part of a step needs while it runs, and has given back when it is over or keeps for its
backward.

forward     alive |====__      most - kept by autograd           backward    |==__         most, from where it begins;
                  |========                                                  |======____     what was kept goes

What a backward begins with stays until its end where it has come from another rank. In the middle of a stage autograd
alone holds it, and releases it as soon as it was used: so it does here, and both are known from one run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from farspan.call.infer.watch import storage_id
from farspan.graph import BackwardSegment, Edge, Value
from farspan.torch_private import TorchDispatchMode, poisoned, tensors_in

__all__ = ["Working", "hand_over"]


class Working(TorchDispatchMode):
    """Notes the memory that operations make, and when it goes."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []
        """(number of the piece of memory, its bytes; negative when it goes)."""
        self._numbers = itertools.count()
        self._alive: dict[int, int] = {}
        """Numbers of the live storages, by id."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(item) for item in _tensors((args, kwargs))}
        for item in _tensors(result):
            key = storage_id(item)
            if key not in self._alive and key not in given:
                storage = item.untyped_storage()
                self._alive[key] = number = next(self._numbers)
                self._events.append((number, storage.nbytes()))
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return result

    def begin(self) -> int:
        """Marks the beginning of a part of the step, for `peak`."""
        return len(self._events)

    def numbers(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Returns the numbers of the storages in which these tensors lie."""
        return {self._alive[key] for key in map(storage_id, _tensors(tensors)) if key in self._alive}

    def peak(
        self, begin: int, apart: Collection[int] = (), passing: Collection[int] = (), staying: Collection[int] = ()
    ) -> int:
        """Returns the most bytes that were alive since `begin`, more than at `begin`; without the storages of the ids
        `apart`, those `passing` only at the moment when they were made (a gradient that others are added to), and the
        pieces of memory of the numbers `staying` as if they had not gone.
        """
        left_out = {self._alive.get(key) for key in apart}.union(staying)
        gone_at_once = {self._alive.get(key) for key in passing}
        alive = most = 0
        for number, size in self._events[begin:]:
            if number not in left_out:
                most = max(most, alive + size)
                alive += 0 if number in gone_at_once else size
        return most

    def made(self, begin: int, keys: Collection[int]) -> int:
        """Returns the bytes of those storages of these ids that were made since `begin`."""
        wanted = {self._alive.get(key) for key in keys}
        return sum(size for number, size in self._events[begin:] if size > 0 and number in wanted)

    def given_back(self, begin: int) -> int:
        """Returns the bytes of what was there at `begin` and is not any more."""
        made = {number for number, size in self._events[begin:] if size > 0}
        return -sum(size for number, size in self._events[begin:] if size < 0 and number not in made)

    def _free(self, key: int, size: int) -> None:
        self._events.append((self._alive.pop(key), -size))


class _HandedOver(torch.autograd.Function):
    """A value without its memory, and its gradient, which is there until autograd asks for it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradient: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradient = gradient
        return poisoned(value.shape, value.dtype, value.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return ctx.gradient.pop(), None


def hand_over(part: BackwardSegment, gradients: dict[Edge, torch.Tensor | None]) -> None:
    """Let autograd alone hold the gradients that a backward begins with, and the values that they are of.

    Args:
        part: Whose backward is about to run, for the only time.
        gradients: Changed: what has been handed over takes no memory there.
    """
    for edge in part.incoming:
        value = edge.key
        if not isinstance(value, Value) or value.segment is not part.segment:
            continue
        gradient = gradients[edge]
        is_needed = value.is_held or value.num_readers > 0  # as by the next micro-batch, which gets it by detach()
        if is_needed or value in part.backward.roots or gradient is None:
            continue
        with torch.enable_grad():
            value.data = _HandedOver.apply(value.data, [gradient])
        gradients[edge] = value.data.detach()


def _tensors(item: Any) -> list[torch.Tensor]:
    return [each for each in tensors_in(item) if each.layout is torch.strided]
