"""Presents this process to trainers as they are to see it: as one of one."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Collection

import torch

from farspan.execute.process.world import current_engine
from farspan.launch.files import catch_up

__all__ = ["as_alone", "barrier", "existing", "is_first", "noted_by_first", "run_recorded", "say_once"]

_log = logging.getLogger(__name__)


def is_first() -> bool:
    """Returns whether this process is the one that writes."""
    engine = current_engine()
    return engine is None or engine.rank == engine.groups.number == 0


def barrier(what: str) -> None:
    """Wait until all ranks have come here: what rank 0 has written before, all can read after."""
    engine = current_engine()
    if engine is not None:
        engine.barrier(what)
        if engine.groups.num_groups > 1:
            engine.agreement_of_all.barrier(what)
        catch_up()


def noted_by_first(what: str, note: bytes) -> bytes:
    """Returns on every rank what the rank that writes has noted; all ranks call it together.

    Args:
        what: What it is about, for messages.
        note: What this rank has noted; only that of the rank that writes counts.
    """
    engine = current_engine()
    if engine is None:
        return note
    agreement = engine.agreement_of_all if engine.groups.num_groups > 1 else engine.agreement
    return agreement.broadcast(what, note, 0)


@functools.cache
def say_once(text: str) -> None:
    """Log for the user what was changed; on rank 0."""
    if is_first():
        _log.warning(text)


def run_recorded(what: str) -> None:
    """Run what waits, on every rank, before one of them alone reads the model."""
    engine = current_engine()
    if engine is not None:
        engine.flush(what)


def existing(kinds: Collection[type]) -> type | None:
    """Returns the kind of some object of one of `kinds` that the program has made, if there is any."""
    wanted = tuple(kinds)
    return next((type(item) for item in gc.get_objects() if issubclass(type(item), wanted)), None)


def as_alone(device: torch.device) -> torch.device:
    """Returns the device as one process names it: among several, trainers say "cpu:0", which torch takes for another
    device."""
    return torch.device("cpu") if device.type == "cpu" else device
