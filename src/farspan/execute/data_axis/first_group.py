"""Gives all groups what they take from the first one: the weights that training begins with, and buffers that calls
write.

Batch statistics are those of a group's own batches. As under torch's DistributedDataParallel, the first group's count
for all: they are given to the others when gradients have been averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from farspan.comm.tensor_bytes import crc_of, overwrite, raw_bytes
from farspan.errors import DivergenceError
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.comm.collectives import Collectives, Pending

__all__ = [
    "COMPARED_EVERY",
    "Named",
    "data_of_first",
    "find_different",
    "groups_differ",
    "sample_of",
    "take_from_first",
    "write",
]

COMPARED_EVERY = 1024
"""Number of times after which what all groups have is compared; in the first ones it is compared more often."""
_MOST_SAMPLED = 1 << 10


class Named(Protocol):
    """The protocol of a tensor with a name: a parameter, a buffer, one outside the model."""

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...


_N = TypeVar("_N", bound=Named)


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns some elements of a tensor, evenly spread."""
    if tensor.layout is not torch.strided or tensor.numel() <= _MOST_SAMPLED:
        return tensor
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
    return flat[:: tensor.numel() // _MOST_SAMPLED]


def find_different(
    items: Sequence[_N],
    peers: Collectives,
    wait: Callable[[Pending], None],
    part: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> list[_N]:
    """Returns the parameters and buffers of which not all groups have the same data; all groups call it.

    Args:
        items: This rank's.
        peers: The ranks that have the same ones in other groups.
        wait: Waits for a collective.
        part: Gives what of each is compared.
    """
    if not items:
        return []
    with DisableTorchFunction():
        numbers = torch.tensor([crc_of(part(item.tensor)) for item in items], dtype=torch.int64)
        bounds = torch.cat([numbers, -numbers])
        wait(peers.maximum(bounds))
        largest, negative_of_least = bounds.tolist()[: len(items)], bounds.tolist()[len(items) :]
    return [item for item, high, low in zip(items, largest, negative_of_least, strict=True) if high != -low]


def groups_differ(what: str, items: Sequence[Named], after: str) -> DivergenceError:
    """Returns the error for groups that have not the same data of what all train.

    Args:
        what: Weights or gradients.
        items: Those that differ.
        after: After how many steps that is found, and where.
    """
    others = f" and {len(items) - 1} more" if len(items) > 1 else ""
    return DivergenceError(
        f"the groups have different {what}: {items[0].name}{others}.",
        why=f"found after {after}: a group has written into a parameter,\n"
        "or into an averaged gradient, or has stepped with other hyperparameters; or what is trained outside of the\n"
        "model began with other numbers.",
        hint="what depends on farspan.data_rank() may choose batches, and read; not change the model",
    )


def take_from_first(items: Sequence[Placed], peers: Collectives, wait: Callable[[Pending], None]) -> None:
    """Give all groups the data that the first one has; all groups call it."""
    write(data_of_first(items, peers, wait))


def data_of_first(
    items: Sequence[Placed], peers: Collectives, wait: Callable[[Pending], None]
) -> list[tuple[Placed, torch.Tensor]]:
    """Returns the data that the first group has, where this one is another; all groups call it."""
    with torch.no_grad(), DisableTorchFunction():
        begun: list[tuple[Placed, torch.Tensor, Pending]] = []
        for item in items:
            data = item.tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            begun.append((item, data, peers.broadcast(raw_bytes(data))))
        for _, _, work in begun:
            wait(work)
    return [(item, data) for item, data, _ in begun] if peers.rank > 0 else []


def write(received: Sequence[tuple[Placed, torch.Tensor]]) -> None:
    """Put data into parameters and buffers."""
    with torch.no_grad(), DisableTorchFunction():
        for item, data in received:
            overwrite(item.tensor, data)
