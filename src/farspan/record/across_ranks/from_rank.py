"""A batch that one rank has read, as all ranks see it: its structure and plain values, and recorded tensors.

rank 0   {"ids": tensor, "n": 3}  --announce-->  structure and metadata, as JSON
every    {"ids": LazyTensor, "n": 3}             the data stay on rank 0 until a call elsewhere needs them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.infer.entry import meta_of
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.wire.checked import damaged
from farspan.call.wire.structure import NotPlainError, structure_from_json, structure_to_json
from farspan.errors import RecordError
from farspan.graph import Value
from farspan.record.saving.reserved import fill_reserved
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["announce", "take_in"]

_MOST_TEXT = 4_000


def announce(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Makes the announcement of the rank that has read `batch` (also that it cannot be sent), and the data of its
    tensors.

    Args:
        batch: Any structure of lists, tuples, dictionaries and objects with tensors and plain values in it.
    """
    fill_reserved()
    template, tensors = flatten(batch)
    try:
        for tensor in tensors:
            _check(tensor)
        return structure_to_json(template, list(map(meta_of, tensors))), [_detached(tensor) for tensor in tensors]
    except RecordError as error:
        if isinstance(error, NotPlainError):
            error = _refused(
                f"a {error.kind} cannot be sent to the other ranks",
                why="only tensors, numbers, strings, arrays, and what is made of them can.",
                hint="farspan.from_rank(rank, {...}) with what the model needs",
            )
        return json.dumps({"error": [error.what, error.why, error.hint]}).encode(), []


def take_in(
    recorder: Recording,
    text: bytes,
    data: Sequence[torch.Tensor],
    stage_of: Callable[[torch.device], int],
    number: Callable[[], int],
) -> tuple[Any, list[Value]]:
    """Make the batch that `announce` has described, with a recorded tensor for each of its tensors.

    Args:
        recorder: Of this rank.
        text: From `announce`.
        data: From `announce`, on the rank that has read the batch; elsewhere nothing.
        stage_of: The stage of that rank where tensors of a device lie.
        number: Gives every input its number, the same on every rank.

    Raises:
        RecordError: The batch cannot be sent; the same on every rank.
    """
    if text.startswith(b"{"):
        raise _sendable_error(text)
    template, metas = structure_from_json(text)
    values = [Value(meta, stage_of(meta.device), index=number()) for meta in metas]
    for value, tensor in zip(values, data, strict=False):
        value.data = tensor
    return rebuild(template, [LazyTensor.make(value, recorder) for value in values]), values


def _sendable_error(text: bytes) -> RecordError:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return damaged("an error that is no JSON")
    parts = document.get("error")
    if document.keys() != {"error"} or not isinstance(parts, list) or len(parts) != 3:
        return damaged("an error without its parts")
    what, why, hint = [str(part)[:_MOST_TEXT] for part in parts]
    return RecordError(what, why=why, hint=hint)


def _check(tensor: torch.Tensor) -> None:
    if isinstance(tensor, LazyTensor):
        raise _refused(
            "one of its tensors is recorded already",
            why="every rank knows it: there is nothing to tell.",
            hint="give the recorded tensor to the model as it is",
        )
    shown = f"its {meta_of(tensor)} " if tensor.layout is torch.strided else "one of its tensors "
    if tensor.requires_grad:
        raise _refused(
            f"{shown}requires grad",
            why="it is no parameter of the model, so its gradient would have nowhere to go.",
            hint="tensor.detach(), or make it a parameter of the model that is distributed",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) not in (torch.Tensor, nn.Parameter):
        raise _refused(
            f"{shown}is of class {type(tensor).__name__} and layout {tensor.layout}",
            why="only plain strided tensors can be sent.",
            hint="tensor.to_dense(), or its parts as plain tensors",
        )


def _refused(what: str, *, why: str, hint: str) -> RecordError:
    return RecordError(
        f"farspan.from_rank cannot take this batch: {what}.", why=f"{why}\nat {format_where(find_where())}", hint=hint
    )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_inference():
        return tensor.detach()  # the same memory, and the same count of writes
    with torch.inference_mode(False):
        return tensor.clone()
