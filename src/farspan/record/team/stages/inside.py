"""What operations belong to as the model's Python runs: the split stage of their module, and what is computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from farspan.record.team.team_tensor import SplitStage

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["Inside"]


class Inside:
    """Where the program stands among the modules of split stages.

    Args:
        recorder: Knows all modules that have a place.
    """

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.stages: dict[int, SplitStage] = {}
        """The split stages, by the id of the module that is placed on each."""
        self.current: SplitStage | None = None
        """The split stage of the module that is running."""
        self.again: set[int] = set()
        """Ids of the modules that are computed again in the backward, and of all below them."""
        self.unit: object | None = None  # for the call of the outermost of them
        self.is_inside = False
        """Whether a module runs that the program has called."""

    @property
    def inside(self) -> tuple[SplitStage | None, object | None]:
        """Returns what operations belong to: a stage, and a unit."""
        return self.current, self.unit

    @inside.setter
    def inside(self, inside: tuple[SplitStage | None, object | None]) -> None:
        self.current, self.unit = inside

    def enter(self, module_id: int) -> tuple[SplitStage | None, object | None]:
        """Let operations be those of a module; returns what they belonged to before."""
        around = self.inside
        if (split := self.stages.get(module_id)) is not None:
            begins = self.unit is None and module_id in self.again
            self.inside = split, object() if begins else self.unit
        elif module_id in self.recorder.leaves:
            self.current = None  # one rank runs it
        return around

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps for the backward what the operations in the body give."""
        around, self.inside = self.inside, (self.current, None)
        try:
            yield
        finally:
            self.inside = around
