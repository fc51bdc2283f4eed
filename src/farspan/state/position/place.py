"""A place in the data, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from farspan.documents import as_count, as_list, as_object

__all__ = ["Place", "place_from_json", "place_to_json"]

_KEYS = ("epoch", "position", "num_groups", "start", "order", "own", "own_order", "workers")
_MOST = 10**15


@dataclass(slots=True, kw_only=True)
class Place:
    """The place of a loader in its data.

    Attributes:
        epoch: How many epochs are over.
        position: How many batches of this one have been taken.
        num_groups: Of ranks, each of which has taken so many.
        start: The states of the program's generators when the epoch began; None between epochs.
        order: The same when its sampler began; None before that.
        own: The states of the loader's own generators when the epoch began; between epochs, the present ones.
        own_order: The same when its sampler began.
        workers: The states of workers, by number.
    """

    epoch: int = 0
    position: int = 0
    num_groups: int = 1
    start: Any = None
    order: Any = None
    own: list[Any] = field(default_factory=list)
    own_order: list[Any] = field(default_factory=list)
    workers: dict[int, Any] = field(default_factory=dict)


def place_to_json(place: Place) -> dict[str, Any]:
    workers = [[number, states] for number, states in sorted(place.workers.items())]
    return {key: getattr(place, key) for key in _KEYS[:-1]} | {"workers": workers}


def place_from_json(value: Any, where: str) -> Place:
    """Raise unless `place_to_json` may have given `value`.

    Raises:
        PlanError: It may not.
    """
    found = as_object(value, where, known=_KEYS, needed=_KEYS)
    return Place(
        epoch=as_count(found["epoch"], where, most=_MOST),
        position=as_count(found["position"], where, most=_MOST),
        num_groups=as_count(found["num_groups"], where, least=1),
        start=None if found["start"] is None else as_object(found["start"], where),
        order=None if found["order"] is None else as_object(found["order"], where),
        own=as_list(found["own"], where),
        own_order=as_list(found["own_order"], where),
        workers={
            as_count(number, where): as_object(states, where)
            for number, states in [as_list(item, where, length=2) for item in as_list(found["workers"], where)]
        },
    )
