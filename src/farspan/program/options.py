"""Options that a program depends on besides what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from farspan.plan import RankDevices, Team, Worker
from farspan.schedule import LEAST_WEIGHT_WORK_S

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that all ranks agree on, but for `rank`.

    Attributes:
        teams: The team that runs each stage.
        rank: Whose program.
        num_ranks: How many ranks there are.
        lookahead: How many boundary buffers a rank may hold beyond one for each stage, to hide transfers: one for
            receives that are posted a task ahead, the others for forwards more than the schedule has in flight. GPipe
            and 1F1B have no such forwards: all are for receives, posted so many tasks ahead.
        home_stages: A stage of each rank, where gradients of tensors outside the model arrive, if there are any.
        schedule: The name of the order.
        least_weight_work_s: A backward is split if its weight gradients are likely to take so long.
        gradient_reduction: "exact": gradients that arrive at their parameter's owner are added up one by one, in the
            loop's order; "sum": those of each worker are added up there, and sent to the owner once.
        devices: What each rank has told about its devices; nothing where all is on CPUs.
        replicas: The parameters that members of wide stages have as they are now, from an earlier step.
    """

    teams: tuple[Team, ...]
    rank: int
    num_ranks: int
    lookahead: int
    home_stages: tuple[int, ...] = ()
    schedule: str = "auto"
    least_weight_work_s: float = LEAST_WEIGHT_WORK_S["auto"]
    gradient_reduction: str = "exact"
    devices: tuple[RankDevices, ...] = ()
    replicas: frozenset[tuple[str, Worker]] = frozenset()

    @property
    def part_stages(self) -> list[int]:
        """Returns the stages that are members of split ones."""
        return [number for number, team in enumerate(self.teams) if team.is_part]
