"""What a program depends on besides what was recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from farspan.schedule import LEAST_WEIGHT_WORK_S

__all__ = ["Settings", "Site", "sites_of"]


class Site(NamedTuple):
    """Where a stage lies."""

    rank: int
    device: torch.device


class _HasSite(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


def sites_of(stages: Iterable[_HasSite]) -> tuple[Site, ...]:
    """Where the stages lie now."""
    return tuple([Site(stage.rank, stage.device) for stage in stages])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all ranks but for `rank` agree on.

    Attributes:
        sites: Of all stages.
        rank: Whose program.
        num_ranks: How many ranks there are.
        lookahead: How many boundary buffers a rank may hold beyond one for each stage, to hide transfers: one for
            receives that are posted a task ahead, the others for forwards more than the schedule has in flight. GPipe
            and 1F1B have no such forwards: all are for receives, posted so many tasks ahead.
        hosts: A stage of each rank, where gradients of tensors outside the model arrive; if there are such tensors.
        schedule: The name of the order.
        least_weight_work_s: A backward is split if its weight gradients are likely to take so long.
    """

    sites: tuple[Site, ...]
    rank: int
    num_ranks: int
    lookahead: int
    hosts: tuple[int, ...] = ()
    schedule: str = "auto"
    least_weight_work_s: float = LEAST_WEIGHT_WORK_S["auto"]
