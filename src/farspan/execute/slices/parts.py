"""What goes with a parameter, whole or in slices: how one is cut, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from farspan.call.leaf import Placed
from farspan.record.team.parts.shares import share_of
from farspan.record.team.slices.layout import Layout
from farspan.record.team.slices.owned import slice_names
from farspan.record.team.team_tensor import whole_of

__all__ = ["Part", "Shares", "joined"]


@dataclass(frozen=True, slots=True)
class Part:
    """What goes with a parameter, or with a slice of one.

    Attributes:
        data: Of the parameter.
        gradient: Its gradient, if there is one.
        kept: What the optimizer keeps for it.
    """

    data: torch.Tensor
    gradient: torch.Tensor | None
    kept: Mapping[str, torch.Tensor | None]

    def things(self) -> dict[str, torch.Tensor]:
        """Returns all its tensors, by what they are."""
        found = {"data": self.data, "gradient": self.gradient}
        found.update((f"kept {key}", tensor) for key, tensor in self.kept.items())
        return {what: tensor for what, tensor in found.items() if tensor is not None}


class Shares(Mapping[str, torch.Tensor]):
    """What the owners of whole parameters give, by name: each slice is cut when it is asked for."""

    def __init__(self, wholes: Mapping[str, Part], layouts: Mapping[str, Layout]) -> None:
        self._cuts = {
            f"{name}: {what}": (tensor, whole.data.shape, layouts[key], member)
            for key, whole in wholes.items()
            for member, name in enumerate(slice_names(key, len(layouts[key].split.members)))
            for what, tensor in whole.things().items()
        }

    def __getitem__(self, key: str) -> torch.Tensor:
        return cut(*self._cuts[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cuts)

    def __len__(self) -> int:
        return len(self._cuts)


def cut(tensor: torch.Tensor, shape: Sequence[int], layout: Layout, member: int) -> torch.Tensor:
    """Returns a member's slice of what goes with a parameter of a shape; all of what has another one, as a count."""
    if tuple(tensor.shape) != tuple(shape):
        return tensor
    return share_of(tensor, layout.dim, layout.sections, member, len(layout.split.members)).contiguous()


def joined(layout: Layout, item: Placed, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the whole of which the members have `parts`; the first of those that are no slices."""
    if parts[0].dim() != len(item.meta.shape):
        return parts[0].clone().to(item.meta.device)
    return whole_of([part.to(item.meta.device) for part in parts], layout.dim, layout.sections)
