"""Places named by the program: `x.to("rank:1/cuda:0")`, `with farspan.on("rank:1")`.

A module that does so in its forward cannot be called as one unit. The run that finds out what it gives, on fakes or
for real, shows it (`LeakError`), and from then on its parts are called one by one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.draws.scope import active
from farspan.call.leaf import LeakError
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.template import flatten_arguments
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["PLAIN_TO", "calls_for_a_place", "ops_at", "to", "leave_places_to_the_recorder", "understand_places"]

PLAIN_TO: Any = torch.Tensor.to
"""torch's own `to`: a process that is alone has another in its place (`understand_places`)."""
_stand_in: Any = None
_ARGUMENTS = ("dtype", "non_blocking", "copy")
"""The arguments of `to` after the device."""


@contextlib.contextmanager
def ops_at(recorder: Recording, place: str) -> Iterator[None]:
    """Ops recorded in the body run at `place`.

    Raises:
        LeakError: In a module that runs as one unit, which it then cannot.
        PlanError: There is no such place.
    """
    if not recorder.is_recording and not recorder.is_in_optimizer:
        raise LeakError(
            f'farspan.on("{place}") is reached inside a module that runs as one unit.',
            why=f"at {format_where(find_where())}: it was not reached in the run that showed what the module does.",
            hint="name the place in every run, or the parts of this module in the plan, on more than one stage",
        )
    before = recorder.here
    recorder.here = recorder.engine.stages_at(place)
    try:
        yield
    finally:
        recorder.here = before


def calls_for_a_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether this is `x.to("rank:...")`, which torch itself would not take."""
    return function is PLAIN_TO and _place_in(args, kwargs) is not None


def to(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.to(place)` is a copy that lives there; `tensor.to(where it is)` is the tensor itself."""
    tensor = args[0]
    place = _place_in(args, kwargs)
    if place is None:
        if len(args) == 2 and not kwargs and isinstance(args[1], torch.device) and tensor.device == args[1]:
            return tensor
        return NotImplemented
    stages = recorder.engine.stages_at(place)
    options = {**dict(zip(_ARGUMENTS, args[2:], strict=False)), **kwargs}
    dtype = options.get("dtype") or tensor.dtype
    layout = {name: options[name] for name in ("memory_format",) if options.get(name) is not None}
    stage = _stage_of(recorder, tensor)
    if stage in stages and dtype == tensor.dtype and not layout and not options.get("copy"):
        return tensor
    given: Any = ((tensor, dtype), {"copy": True, **layout})
    template, tensors = flatten_arguments(*given)
    return recorder.record(PLAIN_TO, template, tensors, stage if stage in stages else stages[0], given=given)


def understand_places(device_at: Callable[[str], torch.device]) -> None:
    """Let `x.to("rank:0/cpu")` be understood in threads that record nothing: there it is a move to a device of torch.

    Args:
        device_at: The device at a place.
    """
    global _stand_in
    if torch.Tensor.to is not PLAIN_TO:
        return

    @functools.wraps(PLAIN_TO)
    def to_device(*args: Any, **kwargs: Any) -> Any:
        place = _place_in(args, kwargs) if active.recorder is None else None
        if place is None:
            return PLAIN_TO(*args, **kwargs)
        device = device_at(place)
        return PLAIN_TO(args[0], device, *args[2:], **{name: item for name, item in kwargs.items() if name != "device"})

    _stand_in = to_device
    torch.Tensor.to = to_device  # type: ignore[method-assign,assignment]


def leave_places_to_the_recorder() -> None:
    """Let `torch.Tensor.to` be torch's own again: what is recorded is looked up by it."""
    if torch.Tensor.to is _stand_in:
        del torch.Tensor.to


def _place_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return device if isinstance(device, str) and device.startswith("rank") else None


def _stage_of(recorder: Recording, tensor: torch.Tensor) -> int:
    """Returns where a tensor lives; -1 for a plain one, which every rank has."""
    if type(tensor) is LazyTensor:
        return tensor._value.stage
    placed = recorder.placed.get(id(tensor))
    return -1 if placed is None else placed.stage
