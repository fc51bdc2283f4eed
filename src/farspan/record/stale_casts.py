"""A forward after an optimizer step in one autocast region, for which torch uses weights from before the step.

    with torch.autocast("cpu"):
        for x, y in loader:
            loss_of(model(x), y).backward()     torch casts each weight once, and keeps the cast to the region's end
            optimizer.step()                    the weights change, and the casts do not

In torch such a loop trains on with the first weights, and says nothing. Calls that are recorded have no such casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from farspan.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.call.leaf import Leaf, Placed
    from farspan.call.modes import Modes
    from farspan.record.recording import Recording

__all__ = ["StaleCasts"]

_CASTING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class StaleCasts:
    """The weights that torch would have cast in the autocast region that was open last."""

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self._region = 0
        self.cast: set[int] = set()
        """The ids of weights that have been used in the region."""
        self._seen: set[Leaf] = set()
        """The modules that have been called in it."""
        self._stepped: dict[int, str] = {}
        """Those that a step has changed since, with their names."""

    def see(self, leaf: Leaf, region: int, modes: Modes) -> None:
        """A module is called in a region.

        Raises:
            RecordError: It uses a weight that has been used in the region, and stepped since.
        """
        if region != self._region:
            self._region, self.cast, self._stepped, self._seen = region, set(), {}, set()
        if leaf in self._seen and not self._stepped:
            return
        self._seen.add(leaf)
        kinds = {kind for kind, _, is_cached in modes[2] if is_cached}
        weights = [module.weight for module in leaf.modules if isinstance(module, _CASTING)] if kinds else []
        weights = [item for item in weights if item.dtype is torch.float32 and item.requires_grad]
        used = [id(item) for item in weights if item.device.type in kinds and id(item) in self._recorder.placed]
        if stale := [self._stepped[item] for item in used if item in self._stepped]:
            raise RecordError(
                f"{stale[0]} is used after optimizer.step() in the same autocast region.",
                why="torch casts a weight once in a region, so one process goes on with the weight before the step.",
                hint="leave the region before the step: torch.autocast around the forward and the loss alone",
            )
        self.cast.update(used)

    def note_step(self, placed: Sequence[Placed]) -> None:
        """An optimizer changes these parameters, as far as they have gradients."""
        engine, cast = self._recorder.engine, [each for each in placed if id(each.tensor) in self.cast]
        self._stepped.update((id(each.tensor), each.name) for each in cast if engine.has_gradient(each))
