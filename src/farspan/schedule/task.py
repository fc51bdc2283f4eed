"""A task: the forward of one segment of one micro-batch, its backward, or the deferred weight gradients of that."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Kind", "Task"]


class Kind(enum.Enum):
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    """The weight gradients that a backward task has deferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of a rank's work, as the schedule sees it.

    Attributes:
        kind: Forward, backward, or weight gradients.
        rank: Who runs it. The first worker of a rank has the rank's number, its other devices have numbers after those
            of all ranks.
        micro_batch: Position of the micro-batch in the step; earlier ones go first.
        level: Depth of its segment in the micro-batch: 0 for what needs nothing.
        duration: Relative cost; any unit.
        needs: Indices of the tasks that must have ended, all smaller than this task's own index.
        holds: Whether the micro-batch's activations stay with the rank until its backward, weight gradients included,
            has run here.
        memory: What the rank holds more from its start on (a forward keeps activations) or, if negative, less from its
            end on (a backward releases most of them, weight gradients of the rest). Any unit.
        team: The least rank of those that run each layer together with it; None for a rank that runs them alone.
        output_bytes: Of each other rank that needs it the size of the message there; nothing for those left out.
    """

    kind: Kind
    rank: int
    micro_batch: int
    level: int
    duration: float
    needs: tuple[int, ...]
    holds: bool
    memory: float = 0.0
    team: int | None = None
    output_bytes: tuple[tuple[int, float], ...] = ()

    def bytes_to(self, rank: int) -> float:
        """Returns the size of its message to that rank."""
        return sum(size for other, size in self.output_bytes if other == rank)
