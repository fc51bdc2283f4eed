"""TeamTensor: a tensor of which each member of a split stage has a part, or all.

    x [4, 16]   dim None    member 0  x          member 1  x           each has all of it
    h [4, 64]   dim 1       member 0  h[:, :32]  member 1  h[:, 32:]

What the members have are recorded tensors like any other, so the gradient of the whole is that of its parts; where each
has all, it is the sum of what comes to the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from farspan.call.infer.entry import intern
from farspan.call.leaf import WholeError
from farspan.graph import EVERYWHERE, Meta, Value
from farspan.record.tensor import LazyTensor
from farspan.torch_private import make_wrapper

__all__ = [
    "SplitStage",
    "Splits",
    "TeamTensor",
    "gradient_of_parts",
    "joined",
    "settled",
    "split_meta",
    "used",
    "whole_of",
]


@dataclass(frozen=True, slots=True)
class SplitStage:
    """A stage whose members run each layer together.

    Attributes:
        home: The recorder's number of the stage on which the first member runs what is not split.
        members: The numbers of the members' own stages, in the order in which sums are made.
        owners: For each member the number of the stage that owns its parameters.
    """

    home: int
    members: tuple[int, ...]
    owners: tuple[int, ...]


class Splits(Protocol):
    """The protocol of what records operations on the tensors of a split stage."""

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def dispatch_whole(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def join(self, item: Any, reason: str) -> Any: ...
    def gathered(self, tensor: TeamTensor) -> LazyTensor: ...
    def kept(self) -> AbstractContextManager[None]: ...
    def settles(self) -> bool: ...
    def record(self, function: Any, args: tuple[Any, ...], stage: int, kwargs: dict[str, Any] | None = None) -> Any: ...


class TeamTensor(LazyTensor):
    """A tensor of a split stage. What cannot be done part by part is done on the whole (`joined`)."""

    _splitting: Splits
    _split: SplitStage
    _parts: Sequence[LazyTensor]
    _dim: int | None
    """Along which the parts lie behind each other; None where each member has all."""
    _sections: int
    """Into how many equal sections the whole falls along it (q, k and v), of each of which a member has a share."""
    _weights: frozenset[str]
    """Names of the parameters whose split has made it one of parts; none if a sum has, divided along positions."""
    _is_used: bool = False
    """True once an operation has taken it: its copies have gradients of their own."""
    _whole: tuple[tuple[Value, ...], LazyTensor] | None = None
    _settled: LazyTensor | None = None
    """The whole, where that alone is used from now on: the program wants its gradient."""

    @staticmethod
    def of(
        splitting: Splits,
        split: SplitStage,
        parts: Sequence[Any],
        dim: int | None,
        weights: frozenset[str] = frozenset(),
        meta: Meta | None = None,
        sections: int = 1,
    ) -> TeamTensor:
        """Returns the tensor of which the members have `parts`.

        Args:
            splitting: Knows the split stages.
            split: The stage.
            parts: A recorded tensor for each member.
            dim: See the attribute.
            weights: See the attribute.
            meta: Of the whole, if that is known.
            sections: See the attribute.
        """
        first = parts[0]._value.meta
        if meta is None:
            size = 0 if dim is None else sum(part._value.meta.shape[dim] for part in parts)
            meta = split_meta(first, dim, size)
        if meta.requires_grad != first.requires_grad:
            meta = intern(replace(meta, requires_grad=first.requires_grad))
        tensor: TeamTensor = make_wrapper(TeamTensor, meta)  # type: ignore[assignment]
        vars(tensor).update(
            _value=Value(meta, EVERYWHERE),  # for its metadata; it is in no graph
            _recorder=parts[0]._recorder,
            _splitting=splitting,
            _split=split,
            _parts=tuple(parts),
            _dim=dim,
            _sections=sections,
            _weights=weights,
        )
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        splitting: Splits = next(item._splitting for item in _team_tensors((args, kwargs or {})))
        return splitting.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise WholeError(f"{func} reached a tensor of which each member of a split stage has a part.")

    @property
    def is_by_positions(self) -> bool:
        """Returns whether each member has some positions of what all of them have added up."""
        return self._dim is not None and not self._weights

    def join(self) -> LazyTensor:
        """Returns one recorded tensor, with the parts behind each other; the parts stay what they are."""
        values = tuple([part._value for part in self._parts])
        if self._settled is not None:
            return self._settled
        if self._dim is None:
            return self._parts[0]
        if self._whole is None or self._whole[0] != values:
            vars(self)["_whole"] = (values, self._splitting.gathered(self))
        assert self._whole is not None
        return self._whole[1]

    def _data(self) -> torch.Tensor:
        """Returns the data of the whole, as a plain tensor."""
        parts = [part.read() for part in (self._parts[:1] if self._dim is None else self._parts)]
        return parts[0] if self._dim is None else whole_of(parts, self._dim, self._sections)

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        self.join().backward(joined(gradient), retain_graph, create_graph, inputs)

    @property
    def grad(self) -> Any:  # type: ignore[override]
        return None if self._settled is None else self._settled.grad

    def register_hook(self, hook: Any) -> Any:
        return self._with_gradient("register_hook").register_hook(hook)

    def retain_grad(self) -> None:
        self._with_gradient("retain_grad").retain_grad()

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._settled is not None and self._settled.retains_grad

    def _with_gradient(self, what: str) -> LazyTensor:
        """Returns the whole, which is used in the place of the parts from now on, so that all gradient comes to it.

        Raises:
            WholeError: Parts have been used, or more of them is going to be: no member has the gradient of the whole.
        """
        if self._settled is None:
            if self._is_used or not self._splitting.settles():
                raise WholeError(
                    f"{what} on a tensor inside of a split stage.",
                    why="its gradient is the sum of what the members have, and comes to none of them.",
                    hint="farspan.distribute(model, tensor_parallel=...) without the module around it, or the hook\n"
                    "outside, before anything uses the tensor",
                )
            vars(self)["_settled"] = self._splitting.join(self, what)
        assert self._settled is not None
        return self._settled


def split_meta(part: Meta, dim: int | None, size: int) -> Meta:
    """Returns the metadata of the whole of which `part` is one along `dim`, where it has `size`, as a contiguous
    tensor."""
    if dim is None:
        return part
    shape = list(part.shape)
    shape[dim] = size
    strides = [1] * len(shape)
    for number in range(len(shape) - 1, 0, -1):
        strides[number - 1] = strides[number] * max(shape[number], 1)
    return intern(Meta(tuple(shape), tuple(strides), part.dtype, part.device, part.requires_grad))


def whole_of(parts: Sequence[torch.Tensor], dim: int, sections: int) -> torch.Tensor:
    """Returns the whole of which each of `parts` has a share of each section."""
    if sections == 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.unflatten(dim, (sections, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


def gradient_of_parts(item: Any, parts: Sequence[Any]) -> Any:
    """Returns the gradient of a tensor, of which `parts` are the gradients of what the members have; the only one of
    a tensor that is no team's."""
    if type(item) is not TeamTensor:
        return parts[0]
    if all(part is None for part in parts):
        return None
    if item._dim is None:
        total: Any = None
        for part in parts:
            total = part if total is None else total if part is None else total + part
        return total
    known = [
        torch.zeros_like(own.detach()) if part is None else part for own, part in zip(item._parts, parts, strict=True)
    ]
    return whole_of(known, item._dim, item._sections)


def joined(item: Any) -> Any:
    """Returns the recorded tensor that `item` is as a whole, if it is a team's; else itself."""
    return item.join() if type(item) is TeamTensor else item


def settled(item: Any) -> Any:
    """Returns the whole that is used in the place of a tensor's parts; `item` itself where those are."""
    return item._settled if type(item) is TeamTensor and item._settled is not None else item


def used(tensor: TeamTensor) -> TeamTensor:
    """Returns `tensor`, of which an operation takes the parts."""
    vars(tensor)["_is_used"] = True
    return tensor


def _team_tensors(item: Any) -> list[TeamTensor]:
    if type(item) is TeamTensor:
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    return [found for each in item for found in _team_tensors(each)] if isinstance(item, (list, tuple)) else []
