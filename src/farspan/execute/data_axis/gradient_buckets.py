"""Gradients laid out in buckets, each of which is reduced at once.

    parameters of this rank, the last one first        d          c      b   a
    buckets of one type and device, filled in turn     [d d d d | c c]  [b b|a] ...
    behind its parameters, one element for each        [......... 1 1]     whether it has a gradient here

The layout depends on which parameters there are and which of them get a gradient in some group, on nothing else: two
runs of one plan add up the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farspan.call.leaf import Placed
from farspan.errors import RecordError
from farspan.torch_private import copy_all, raw_grad, set_raw_grad

__all__ = ["Bucket", "bucket_layout"]

_NUM_BUCKETS = 8
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 25 << 20
"""A bucket is large enough to use a link fully, and small enough to begin before the end: the last one to be complete
is what no backward hides. The most is that of torch's DistributedDataParallel.
"""


@dataclass(slots=True)
class Bucket:
    """Some parameters, and the memory in which their gradients are reduced."""

    members: list[Placed]
    flat: torch.Tensor
    views: list[torch.Tensor]
    """Views of the parts of `flat`, in the shapes of the parameters."""

    def fill(self, share: float) -> None:
        """Put in this rank's gradients, each times `share`."""
        gradients = [raw_grad(placed.tensor) for placed in self.members]
        for placed, gradient in zip(self.members, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise RecordError(
                    f"the gradient of {placed.name} is sparse.",
                    why="only dense gradients are averaged over groups.",
                    hint="torch.nn.Embedding(..., sparse=False), or data_parallel=1",
                )
        if any(gradient is None for gradient in gradients):
            self.flat.zero_()
            self._flags.copy_(torch.tensor([share * (gradient is not None) for gradient in gradients]))
        else:
            self._flags.fill_(share)
        for view, gradient in zip(self.views, gradients, strict=True):
            if gradient is not None:
                torch.mul(gradient, share, out=view)

    def spread(self) -> None:
        """Give the parameters what has been reduced; one that no rank has a gradient for keeps none."""
        gradients = [raw_grad(placed.tensor) for placed in self.members]
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        if there:
            copy_all([gradients[number] for number in there], [self.views[number] for number in there])
        if len(there) < len(gradients):
            for placed, gradient, view, flag in zip(
                self.members, gradients, self.views, self._flags.tolist(), strict=True
            ):
                if gradient is None and flag:
                    set_raw_grad(placed.tensor, view.detach().clone())

    @property
    def _flags(self) -> torch.Tensor:
        return self.flat[-len(self.members) :]


def bucket_layout(parameters: Sequence[Placed]) -> list[Bucket]:
    """Lay out the gradients of `parameters`, the last one first: that is about the order in which they are ready."""
    total_bytes = sum(placed.meta.numel * placed.tensor.dtype.itemsize for placed in parameters)
    bucket_bytes = min(max(total_bytes // _NUM_BUCKETS, _LEAST_BYTES), _MOST_BYTES)
    chosen: list[list[Placed]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Placed], int]] = {}
    for placed in reversed(parameters):
        tensor = placed.tensor
        kind = (tensor.dtype, tensor.device)
        members, size_bytes = open_buckets.get(kind, ([], bucket_bytes))
        if size_bytes >= bucket_bytes:
            members, size_bytes = [], 0
            chosen.append(members)
        members.append(placed)
        open_buckets[kind] = (members, size_bytes + placed.meta.numel * tensor.dtype.itemsize)
    return [_bucket_of(members) for members in chosen]


def _bucket_of(members: list[Placed]) -> Bucket:
    tensor = members[0].tensor
    is_complex = tensor.is_complex()  # gloo adds up none: their parts are real
    sizes = [placed.meta.numel * (2 if is_complex else 1) for placed in members]
    flat = torch.zeros(sum(sizes) + len(members), dtype=tensor.dtype.to_real(), device=tensor.device)
    views: list[torch.Tensor] = []
    for part, placed in zip(flat[: sum(sizes)].split(sizes), members, strict=True):
        shape = placed.meta.shape
        views.append(torch.view_as_complex(part.view(*shape, 2)) if is_complex else part.view(shape))
    return Bucket(members, flat, views)
