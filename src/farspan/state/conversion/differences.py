"""Finds the tensors in which two sources differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from farspan.state.conversion.source import Entry, Source

__all__ = ["Difference", "differences"]

_MOST_ELEMENTS = 1 << 20
"""Limit on the elements compared at a time: what is computed of them takes memory too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that is not the same in both.

    Attributes:
        name: Of the tensor.
        what: In words.
        num_elements: How many elements differ; None where they cannot be compared.
        largest: The largest difference of two elements; None where there is none to be computed.
    """

    name: str
    what: str
    num_elements: int | None = None
    largest: float | None = None


def differences(one: Source, other: Source) -> Iterator[Difference]:
    """Yields every tensor that only one has, or whose bytes differ; two tensors are in memory at a time."""
    for name in dict.fromkeys([*one.tensors, *other.tensors]):
        mine, theirs = one.tensors.get(name), other.tensors.get(name)
        if mine is None or theirs is None:
            yield Difference(name=name, what=f"only in {(one if theirs is None else other).path}")
        elif mine != theirs:
            yield Difference(name=name, what=f"{_shown(mine)} and {_shown(theirs)}")
        else:
            found = _compared(name, mine, _read(one, name, mine), _read(other, name, theirs))
            if found is not None:
                yield found


def _shown(entry: Entry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _read(source: Source, name: str, entry: Entry) -> bytearray:
    memory = bytearray(entry.size_bytes)
    source.read(name, memoryview(memory))
    return memory


def _compared(name: str, entry: Entry, mine: bytearray, theirs: bytearray) -> Difference | None:
    if mine == theirs:
        return None
    dtype = getattr(torch, entry.dtype)
    first, second = (torch.frombuffer(item, dtype=dtype) for item in (mine, theirs))
    size = dtype.itemsize
    number, largest = 0, 0.0
    for begin in range(0, first.numel(), _MOST_ELEMENTS):
        one, two = (item[begin : begin + _MOST_ELEMENTS] for item in (first, second))
        number += int((one.view(torch.uint8) != two.view(torch.uint8)).view(-1, size).any(1).sum())
        gap = (_wide(one) - _wide(two)).abs()
        largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
    what = f"{number} of {first.numel()} elements differ, by at most {largest:.6g}"
    return Difference(name=name, what=what, num_elements=number, largest=largest)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
