"""Gradients laid out in buckets, each of which is reduced at once.

    parameters of this rank, the last one first        d          c      b   a
    buckets of one type and device, filled in turn     [d d d d | c c]  [b b|a] ...
    behind its parameters, one element for each        [......... 1 1]     whether it has a gradient here

A gradient that a step has just made becomes a view of its bucket, which so is no memory beside it. One that was there
before may be held by the program: what is reduced is copied into it.

The layout depends on which parameters there are and which of them get a gradient in some group, on nothing else: two
runs of one plan add up the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from farspan.errors import RecordError
from farspan.graph import Meta
from farspan.torch_private import copy_all, raw_grad, set_raw_grad

__all__ = ["Bucket", "Trained", "bucket_layout"]

_NUM_BUCKETS = 8
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 25 << 20
"""A bucket is large enough to use a link fully, and small enough to begin before the end: the last one to be complete
is what no backward hides. The most is that of torch's DistributedDataParallel.
"""


class Trained(Protocol):
    """The protocol of what has a gradient that is averaged: a parameter, or a tensor outside the model."""

    @property
    def name(self) -> str: ...
    @property
    def meta(self) -> Meta: ...
    @property
    def tensor(self) -> torch.Tensor: ...


class Bucket:
    """Some parameters, and the memory in which their gradients are reduced, while they are.

    Args:
        members: The parameters, of one type and device.
    """

    def __init__(self, members: list[Trained]) -> None:
        self.members = members
        self._sizes = [placed.meta.numel * (2 if placed.tensor.is_complex() else 1) for placed in members]
        """The number of elements of each; gloo adds up no complex numbers, so their parts count, which are real."""
        self._flat: torch.Tensor | None = None
        self._to_copy: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The gradients that are to stay where they are, and the views with what is reduced of them."""
        self._absent: list[tuple[Trained, torch.Tensor]] = []
        """The parameters without a gradient here, and the views with what other ranks may have."""

    @property
    def num_elements(self) -> int:
        """Returns how many numbers are reduced: the gradients' and one for each of them."""
        return sum(self._sizes) + len(self.members)

    def fill(self, share: float, fresh: Collection[str]) -> torch.Tensor:
        """Lay out this rank's gradients, each times `share`; returns the memory that is to be reduced.

        Args:
            share: One over the number of groups.
            fresh: The parameters whose gradients nobody has seen yet: these become views of the bucket.
        """
        gradients = [raw_grad(placed.tensor) for placed in self.members]
        for placed, gradient in zip(self.members, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise RecordError(
                    f"the gradient of {placed.name} is sparse.",
                    why="only dense gradients are averaged over groups.",
                    hint="torch.nn.Embedding(..., sparse=False), or data_parallel=1",
                )
        self._flat = flat = self._memory()
        if any(gradient is None for gradient in gradients):
            self._flags.copy_(torch.tensor([share * (gradient is not None) for gradient in gradients]))
        else:
            self._flags.fill_(share)
        for placed, gradient, view in zip(self.members, gradients, self._views(flat), strict=True):
            if gradient is None:
                self._absent.append((placed, view.zero_()))
                continue
            torch.mul(gradient, share, out=view)
            if placed.name in fresh and gradient.stride() == view.stride():
                set_raw_grad(placed.tensor, view)
            else:
                self._to_copy.append((gradient, view))
        return flat

    def spread(self) -> None:
        """Give the parameters what has been reduced; one that no rank has a gradient for keeps none."""
        if self._to_copy:
            gradients, views = zip(*self._to_copy, strict=True)
            copy_all(list(gradients), list(views))
        if self._absent:
            flags = dict(zip([placed.name for placed in self.members], self._flags.tolist(), strict=True))
            for placed, view in self._absent:
                if flags[placed.name]:
                    set_raw_grad(placed.tensor, view)
        self._flat, self._to_copy, self._absent = None, [], []

    def _memory(self) -> torch.Tensor:
        tensor = self.members[0].tensor
        return torch.empty(self.num_elements, dtype=tensor.dtype.to_real(), device=tensor.device)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of the bucket's memory, in the shapes of the parameters."""
        parts = flat[: -len(self.members)].split(self._sizes)
        return [
            torch.view_as_complex(part.view(*placed.meta.shape, 2))
            if placed.tensor.is_complex()
            else part.view(placed.meta.shape)
            for part, placed in zip(parts, self.members, strict=True)
        ]

    @property
    def _flags(self) -> torch.Tensor:
        assert self._flat is not None
        return self._flat[-len(self.members) :]


def bucket_layout(parameters: Sequence[Trained]) -> list[Bucket]:
    """Lay out the gradients of `parameters`, the last one first: that is about the order in which they are ready."""
    total_bytes = sum(placed.meta.numel * placed.tensor.dtype.itemsize for placed in parameters)
    bucket_bytes = min(max(total_bytes // _NUM_BUCKETS, _LEAST_BYTES), _MOST_BYTES)
    chosen: list[list[Trained]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Trained], int]] = {}
    for placed in reversed(parameters):
        tensor = placed.tensor
        kind = (tensor.dtype, tensor.device)
        members, size_bytes = open_buckets.get(kind, ([], bucket_bytes))
        if size_bytes >= bucket_bytes:
            members, size_bytes = [], 0
            chosen.append(members)
        members.append(placed)
        open_buckets[kind] = (members, size_bytes + placed.meta.numel * tensor.dtype.itemsize)
    return [Bucket(members) for members in chosen]
