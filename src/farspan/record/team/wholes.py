"""Does an operation on whole tensors where it cannot be done part by part.

h[..., 0] = 0        h = gathered (h0, h1)      h[..., 0] = 0        h0, h1 written with their parts of h
v = h[..., :3]       h = gathered (h0, h1)      v is a view of this copy, so neither may be written from then on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farspan.call.pytree.template import flatten_arguments, map_tensors
from farspan.record.ops.views import is_shared, root_of
from farspan.record.team.parts.shares import extent_of
from farspan.record.team.team_tensor import Splits, TeamTensor, used
from farspan.record.tensor import LazyTensor

__all__ = ["Reads", "Views", "Writes", "on_whole"]

_Record = Callable[[Any, tuple[Any, ...], int], Any]


class Writes(str):
    """Why an operation that writes into a team's tensor is not done part by part."""

    __slots__ = ()


class Reads(str):
    """Why an operation that gives no gradient is not done part by part."""

    __slots__ = ()


class Views(str):
    """Why an operation whose result shares memory with a team's tensor is not done part by part."""

    __slots__ = ()


def on_whole(splitting: Splits, record: _Record, function: Any, args: Any, kwargs: Any, reason: str | None) -> Any:
    """Do an operation once, on whole tensors; what it writes into them is in the parts, too.

    Args:
        splitting: Knows the split stages.
        record: Records a function on a stage.
        function: Which.
        args: As the program gives them.
        kwargs: By name.
        reason: Why not part by part: what has split the tensors stays whole. None: it is split on, in another way.
    """
    _, tensors = flatten_arguments(args, kwargs)
    teams: dict[int, TeamTensor] = {id(item): item for item in tensors if isinstance(item, TeamTensor)}
    wholes: dict[int, LazyTensor] = {
        number: used(item).join() if reason is None else splitting.join(item, reason) for number, item in teams.items()
    }
    if type(reason) is Writes:
        wholes |= {number: splitting.gathered(item) for number, item in teams.items() if item._dim is not None}
    before = {number: whole._value for number, whole in wholes.items()}
    args, kwargs = map_tensors((args, kwargs), lambda item: wholes.get(id(item), item))
    result = function(*args, **kwargs)
    for number, whole in wholes.items():
        if whole._value is not before[number]:
            _write_back(teams[number], whole, record)
        elif teams[number]._dim is not None and is_shared(whole):
            for root in map(root_of, (whole, *teams[number]._parts)):  # of which one would not see what is
                if type(root) is LazyTensor:  # written into the other
                    vars(root)["_is_torn"] = True
    known = {id(whole): teams[number] for number, whole in wholes.items()}
    return map_tensors(result, lambda item: known.get(id(item), item))


def _write_back(item: TeamTensor, whole: LazyTensor, record: _Record) -> None:
    """Let the parts be those of the whole, into which an operation has written."""
    dim, home = item._dim, item._split.home
    for member, (part, stage) in enumerate(zip(item._parts, item._split.members, strict=True)):
        if part is whole:
            continue
        own: Any = whole
        if dim is not None and item._sections == 1:
            own = record(torch.narrow, (own, dim, *extent_of(whole.shape[dim], member, len(item._parts))), home)
        elif dim is not None:
            own = record(torch.unflatten, (own, dim, (item._sections, len(item._parts), -1)), home)
            own = record(torch.flatten, (record(torch.select, (own, dim + 1, member), home), dim, dim + 1), home)
        record(torch.Tensor.copy_, (part, own), stage)
