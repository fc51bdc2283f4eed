"""Masks that say which parameters have a gradient: each rank knows its own, and broadcasts them with the step's
results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from farspan.call.leaf import Placed
from farspan.graph import Value
from farspan.record.team.slices.owned import OwnedSlices
from farspan.record.unrecorded import plainly
from farspan.torch_private import DisableTorchFunction, raw_grad

if TYPE_CHECKING:
    from farspan.execute.exchange import Exchange
    from farspan.plan import Team
    from farspan.record.recorder import Recorder

__all__ = ["GradientMasks", "accumulate", "clear_gradients", "set_gradient"]

_NONE, _DENSE, _SPARSE = range(3)


class KeepsGradients(Protocol):
    """Keeps what others may still ask for."""

    def replace(self, items: Iterable[Placed], gradient: torch.Tensor | None) -> None: ...
    def show(self, placed: Placed, value: Value) -> None: ...


class GradientMasks:
    """The gradient masks of all ranks, as one rank knows them."""

    def __init__(self, rank: int, teams: Sequence[Team], parameters: Mapping[str, Placed]) -> None:
        self.rank = rank
        self.teams = teams
        self.parameters = parameters
        self.sparse: set[str] = set()
        """The names of parameters whose gradient is sparse."""
        self._has_gradient: dict[str, bool] = {}
        self._coming: Exchange | None = None
        self.owned = OwnedSlices()
        """The slices that members own, of which all or none have a gradient."""

    def own(self) -> bytes:
        """Returns one byte for each parameter of this rank."""
        ranks = self._ranks()
        own = [item for item in self.parameters.values() if item.is_parameter and ranks[item.stage] == self.rank]
        gradients = [raw_grad(placed.tensor) for placed in own]
        kinds = [_NONE if item is None else _DENSE if item.layout is torch.strided else _SPARSE for item in gradients]
        return bytes(kinds)

    def begin(self, exchange: Exchange) -> None:
        """A backward has run; `exchange` brings what the other ranks know."""
        self._coming = exchange
        self._has_gradient = {}
        self.sparse.clear()

    def resolve(self) -> None:
        """Learn which parameters of the other ranks have a gradient since the last backward."""
        if self._coming is None:
            return
        masks = self._coming.masks()
        of_ranks: list[list[Placed]] = [[] for _ in masks]
        ranks = self._ranks()
        for placed in self.parameters.values():
            if placed.is_parameter:
                of_ranks[ranks[placed.stage]].append(placed)
        for items, mask in zip(of_ranks, masks, strict=True):
            for item, kind in zip(items, mask, strict=True):
                self._has_gradient[item.name] = kind != _NONE
                if kind == _SPARSE:
                    self.sparse.add(item.name)
        self._coming = None

    def has_gradient(self, placed: Placed) -> bool:
        self.resolve()
        slices = self.owned.slices.get(placed.name)
        return self._has_gradient.get(slices[0].name if slices else placed.name, False)

    def names(self) -> list[str]:
        """Returns the parameters that have a gradient."""
        self.resolve()
        return [name for name, has_gradient in self._has_gradient.items() if has_gradient]

    def is_sparse(self, placed: Placed) -> bool:
        """Returns whether a gradient that is there is a sparse one."""
        if placed.is_owned:
            gradient = raw_grad(placed.tensor)
            return gradient is not None and gradient.layout is not torch.strided
        return placed.name in self.sparse

    def set(self, placed: Placed, *, has_gradient: bool, is_sparse: bool = False) -> None:
        """The program has set or deleted a gradient."""
        self.resolve()
        self._has_gradient[placed.name] = has_gradient
        self.sparse.discard(placed.name)
        if is_sparse:
            self.sparse.add(placed.name)

    def clear(self, items: Sequence[Placed]) -> None:
        """The program has deleted gradients."""
        self.resolve()
        names = [item.name for item in items]
        self._has_gradient.update(dict.fromkeys(names, False))
        self.sparse.difference_update(names)

    def _ranks(self) -> list[int]:
        """Returns the rank that owns the parameters of each stage."""
        return [team.leader.rank for team in self.teams]


def accumulate(masks: GradientMasks, recorder: Recorder, placed: Placed, gradient: torch.Tensor | None) -> None:
    """Add what a backward has given to the gradient of a parameter; only its owner has `gradient`."""
    masks.set(placed, has_gradient=True)
    if not placed.is_owned:
        return
    assert gradient is not None
    with plainly(recorder):
        torch.autograd.backward([placed.tensor], [gradient])


def clear_gradients(masks: GradientMasks, kept: KeepsGradients, items: Sequence[Placed]) -> list[str]:
    """Deletes the gradients of parameters that have one; returns their names."""
    own = masks.owned.spread(items) if masks.owned.slices else items
    with DisableTorchFunction():
        masks.clear(own)
        kept.replace(own, None)
    return [item.name for item in items]


def set_gradient(
    masks: GradientMasks, kept: KeepsGradients, placed: Placed, gradient: Value | torch.Tensor | None
) -> None:
    """Put a gradient in the place of a parameter's, or none; only its owner has it."""
    is_sparse = isinstance(gradient, torch.Tensor) and gradient.layout is not torch.strided
    masks.set(placed, has_gradient=gradient is not None, is_sparse=is_sparse)
    kept.replace([placed], gradient.data if isinstance(gradient, Value) else gradient)
    if isinstance(gradient, Value) and gradient.is_gradient and gradient.gradient_of == placed.name:
        kept.show(placed, gradient)  # one that it had before
