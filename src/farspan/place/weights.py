"""The weights that training begins with: rank 0's are everybody's, as with DDP.

A script without a seed, or one that loads a checkpoint on rank 0 alone, builds another model on each rank; the stages
of several of them would be a mixture that nobody has built. So when a model is distributed all ranks compare checksums
of their parameters and buffers, and of plain tensors among their modules' attributes. Where these are equal nothing is
sent; where they differ, rank 0's go to the ranks that will hold them, and it is said once. Of a model that was built
without data (`deferred_init`) they compare what makes each; where that differs, rank 0 makes one after another and
gives them away.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from farspan.comm.tensor_bytes import crc_of, overwrite
from farspan.execute.engine import Engine
from farspan.place.deferred.models import Offered, digest_of, fill_tensor
from farspan.place.owners import ModelPlan
from farspan.torch_private import DisableTorchFunction

__all__ = ["agree_on_model", "give_weights"]


def agree_on_model(engine: Engine, model: nn.Module) -> None:
    """Raise on every rank if the ranks have built models of different parameters or buffers.

    Raises:
        DivergenceError: With the first line that differs.
    """
    if engine.agreement_of_all.side.world_size > 1:
        engine.agreement_of_all.agree_on(
            "model", "\n".join([f"{name}: {_described(item)}" for name, item in _items(model)])
        )


def give_weights(engine: Engine, model: nn.Module, plan: ModelPlan) -> None:
    """Let `model`, which has not been placed yet, have rank 0's parameters and buffers; all ranks call it."""
    if engine.num_ranks == 1:
        return
    items, plain = _items(model), _plain_items(model)
    with DisableTorchFunction():
        own = array("I", [_checksum(item) for _, item in [*items, *plain]])
    names = "\n".join(f"{name}: {_described(item)}" for name, item in plain)
    digest, of_names = (hashlib.blake2b(each, digest_size=16).digest() for each in (own.tobytes(), names.encode()))
    found = engine.agreement.gather("checksum of the weights", of_names + digest)
    if len(set(found)) == 1:
        return
    if len({each[: len(of_names)] for each in found}) == 1:
        items += plain
    else:  # each rank holds others, on purpose
        own = own[: len(items)]
    if engine.rank == 0:
        engine.values.offered = Offered(items)
    first = np.frombuffer(engine.agreement.broadcast("checksums of the weights", own.tobytes(), 0), dtype=np.uint32)
    differs = first != np.frombuffer(own, dtype=np.uint32)
    for number, (name, item) in enumerate(items):
        stage = plan.owner.get(name)
        is_needed = stage is None or plan.is_mine(stage)  # buffers are needed wherever their modules run
        if differs[number] and is_needed:
            fill_tensor(item)
            overwrite(item, engine.values.pull(0, "offered", name))
    by_rank = engine.agreement.gather_at(0, "weights that differ", np.packbits(differs).tobytes())
    if by_rank:
        engine.console.warn(_words([name for name, _ in items], by_rank))
    engine.agreement.barrier("rank 0's weights are everybody's")
    engine.values.offered = {}


def _checksum(item: torch.Tensor) -> int:
    """Returns a checksum of its data, or of all that makes them, where they have not been made."""
    digest = digest_of(item)
    return crc_of(item) if digest is None else digest


def _items(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns all parameters and buffers, each once."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, item in [*model.named_parameters(), *model.named_buffers()]:
        seen.setdefault(id(item), (name, item))
    return list(seen.values())


def _plain_items(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors that modules hold themselves and have not registered (a random projection), each once."""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, item in vars(module).items():
            if type(item) is torch.Tensor and _is_plain(item):
                seen.setdefault(id(item), (f"{prefix}.{name}" if prefix else name, item))
    return list(seen.values())


def _is_plain(item: torch.Tensor) -> bool:
    """Returns whether it has data of its own, in one piece."""
    with DisableTorchFunction():
        is_whole = item.layout is torch.strided and item.device.type != "meta" and item.is_contiguous()
        return is_whole and item.is_leaf and not item.is_quantized and digest_of(item) is None


def _described(item: torch.Tensor) -> str:
    words = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    words += "" if item.layout is torch.strided else f" ({item.layout})"
    words += " without data" if item.device.type == "meta" else ""
    return words + (" that is trained" if item.requires_grad else "")


def _words(names: Sequence[str], by_rank: Sequence[bytes]) -> str:
    """Returns the error's words for weights that differ between ranks.

    Args:
        names: Of all parameters and buffers.
        by_rank: For each rank a bit for each of them: whether it is unlike rank 0's.
    """
    differs = np.stack([np.unpackbits(np.frombuffer(bits, np.uint8), count=len(names)) for bits in by_rank])
    found = np.flatnonzero(differs.any(axis=0))
    first, rank = found[0], np.flatnonzero(differs[:, found[0]])[0]
    return (
        f"farspan: the ranks have built {len(found)} of {len(names)} parameters and buffers differently "
        f"({names[first]} on rank {rank}{', ...' if len(found) > 1 else ''}); all train on from rank 0's."
    )
