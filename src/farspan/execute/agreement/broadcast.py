"""Tensors of single ranks, given to all: small ones among the bytes of a gather, large ones pulled from their owners.

every rank    offers its large ones
all           gather: its small ones                  from here on the large ones may be asked for
every rank    pulls the large ones of the others
all           barrier, where there were large ones    from here on nobody asks for them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from farspan.call.wire.checked import damaged
from farspan.comm.tensor_bytes import pack_tensor, unpack_tensor

if TYPE_CHECKING:
    from farspan.execute.running import Running

__all__ = ["broadcast_tensors"]

_SMALL_BYTES = 16 << 10


def broadcast_tensors(engine: Running, what: str, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
    """Writes into each tensor of another rank what that rank has in it; all ranks call it together.

    Args:
        engine: This rank's.
        what: For messages.
        tensors: Of the same shapes and types on all ranks.
        owners: Which rank's data each is to have.
    """
    rank = engine.rank
    large = [number for number, tensor in enumerate(tensors) if _size(tensor) > _SMALL_BYTES]
    small = [number for number in range(len(tensors)) if number not in set(large)]
    engine.values.offered = {str(number): tensors[number] for number in large if owners[number] == rank}
    mine = [tensors[number] for number in small if owners[number] == rank]
    parts = engine.agreement.gather(what, b"".join([bytes(pack_tensor(item)[1]) for item in mine]))
    begins = [0] * len(parts)
    for number in small:
        tensor, owner = tensors[number], owners[number]
        begin = begins[owner]
        begins[owner] = end = begin + _size(tensor)
        if owner != rank:
            header = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            tensor.copy_(unpack_tensor(header, parts[owner][begin:end]))
    if not large:
        return
    for number in large:
        tensor, owner = tensors[number], owners[number]
        if owner != rank:
            found = engine.values.pull(owner, "offered", str(number))
            if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                raise damaged(f"{what}: {found.dtype}{list(found.shape)}, not {tensor.dtype}{list(tensor.shape)}")
            tensor.copy_(found)
    engine.agreement.barrier(f"{what}: all have come")
    engine.values.offered = {}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
