"""A gradient and the part of other memory that it is in the program, each with the numbers of its own."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

__all__ = ["Memory", "Pair"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pair:
    """A gradient, and the part of other memory that it is in the program.

    Attributes:
        name: Of the parameter.
        gradient: As the program has it.
        links: How it is taken from a recorded tensor, step by step.
        part: The part itself, of a plain tensor; None when the gradient is the parameter's no more.
        first, last: The elements of the memory that it lies between.
        is_ahead: Whether the gradient has been written into since both were the same.
        is_behind: Whether the other memory has.
        held: A recorded tensor that it is a part of, for as long as that is another gradient or has what this one has
            not, whether or not the program has it.
    """

    def __init__(self, name: str, gradient: LazyTensor, memory: Memory, links: Any, part: torch.Tensor) -> None:
        self.name, self.gradient, self.links = name, gradient, links
        self._memory = weakref.ref(memory)
        self.part: torch.Tensor | None = part
        self.shape, self.stride, self.first = part.shape, part.stride(), part.storage_offset()
        self.last = self.first + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        self.is_ahead = self.is_behind = False
        self.held: LazyTensor | None = None
        self.others: list[Pair] = []
        """Those that share elements of the memory with it."""
        self.seen: torch.Tensor | None = None
        """Of memory that is compared: what the part was when it was last looked at."""

    @property
    def memory(self) -> Memory | None:
        """What it is a part of; None if the program has that no more."""
        return self._memory()

    @property
    def is_torn(self) -> bool:
        """Returns whether a backward has added to it and to what is one memory with it."""
        return self.is_ahead and (self.is_behind or any(other.is_ahead for other in self.others))

    def overlaps(self, other: Pair) -> bool:
        if self.first > other.last or other.first > self.last:
            return False
        start = min(self.first, other.first)
        with DisableTorchFunction():
            elements = torch.zeros(max(self.last, other.last) + 1 - start, dtype=torch.bool)
            elements.as_strided(self.shape, self.stride, self.first - start).fill_(True)
            return bool(elements.as_strided(other.shape, other.stride, other.first - start).any())


class Memory:
    """What gradients are parts of: a recorded tensor, or the memory of plain ones, which every rank has."""

    def __init__(self, root: LazyTensor | None, storage: StorageWeakRef | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self.storage = storage
        self.is_compared = False
        """Whether its numbers tell that it has been written into: tensors that do not count each other's writes
        (`x.data`), or another library, may use it."""
        self.is_outside = False
        """Whether another library may use it, which does not say when."""
        self._counted: dict[int, tuple[torch.Tensor, int]] = {}
        """Of plain tensors one for each count of writes, and that count as it was last looked at."""
        self.pairs: list[Pair] = []
        self._last = -1

    @property
    def root(self) -> LazyTensor | None:
        return None if self._root is None else self._root()

    def is_gone(self) -> bool:
        """Returns whether the program has the plain tensors no more."""
        return self.storage is not None and self.storage.expired()

    def look(self) -> None:
        """Let the gradients know of it if the memory of plain tensors has been written into."""
        if any(part._version != version for part, version in self._counted.values()):
            self.note_versions()
            self.has_been_written()
        if self.is_compared:
            for pair in self.pairs:
                if pair.part is not None and (pair.seen is None or not _have_same_bits(pair.part, pair.seen)):
                    pair.is_behind, pair.seen = pair.is_behind or pair.seen is not None, _copied(pair.part)

    def note_versions(self) -> None:
        """What has been written into the memory of plain tensors by now is known."""
        self._counted = {key: (part, part._version) for key, (part, _) in self._counted.items()}

    def become_outside(self) -> None:
        """Another library gets the memory of plain tensors, and may write into it."""
        self.look()
        self.is_compared = self.is_outside = True
        self.look()

    def add(self, pair: Pair) -> None:
        if pair.first <= self._last:
            pair.others = [other for other in self.pairs if other.overlaps(pair)]
            for other in pair.others:
                other.others.append(pair)
        self._last = max(self._last, pair.last)
        self.pairs.append(pair)
        part = pair.part
        if self.storage is not None and part is not None:
            self._counted.setdefault(_counter_of(part), (part, part._version))
            storage = part.untyped_storage()
            self.is_outside = self.is_outside or not storage.resizable()
            self.is_compared = self.is_compared or self.is_outside or part._base is None
            if self.is_compared:
                pair.seen = _copied(part)

    def release(self, pair: Pair) -> None:
        """The gradient of a pair is its parameter's no more."""
        part, pair.part, pair.seen = pair.part, None, None
        if self.storage is not None and part is not None and self._counted.get(_counter_of(part), part)[0] is part:
            counted = dict(self._counted)
            others = [other.part for other in self.pairs if other.part is not None]
            self._counted = {key: (other, counted[key][1]) for other in others for key in [_counter_of(other)]}

    def remove(self, pair: Pair) -> None:
        self.pairs.remove(pair)
        for other in pair.others:
            other.others.remove(pair)
        if not self.pairs:
            self._last = -1

    def has_been_written(self) -> None:
        for pair in self.pairs:
            pair.is_behind, pair.held = True, self.root


def _counter_of(part: torch.Tensor) -> int:
    """Returns what is the same for tensors that count each other's writes."""
    return id(part if part._base is None else part._base)


def _copied(part: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction(), torch.no_grad():
        return part.clone()


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    with DisableTorchFunction(), torch.no_grad():
        bits = _BITS.get(one.element_size())
        return torch.equal(one, other) if bits is None else torch.equal(one.view(bits), other.view(bits))
