"""A process that is alone: its script runs as it is, for recording it would win nothing.

One rank has nobody to overlap with, to agree with or to send to. So unless something is asked for that only a recorded
program has (another plan than the automatic one, computing again, an order, random numbers of farspan's own, a report),
torch is left as it was, and the program's numbers are the plain program's for there is no other.
"""

from __future__ import annotations

from itertools import chain

from torch import nn

from farspan import settings
from farspan.call.draws.scope import active
from farspan.devices import current_device
from farspan.execute.engine import Engine

__all__ = ["runs_as_it_is"]


def runs_as_it_is(engine: Engine, model: nn.Module) -> bool:
    """Returns whether `model`, for which nothing else is asked, needs no recording here."""
    if engine.num_ranks > 1 or active.recorder is not None or settings.text("REPORT"):
        return False
    if settings.flag("RECORD", default=False):
        return False
    device = current_device()
    return all(item.device == device for item in chain(model.parameters(), model.buffers()))
