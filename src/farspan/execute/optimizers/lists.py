"""Functions over lists of tensors (`_foreach_`, `_fused_`) in a step: each place of the lists by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from farspan.execute.optimizers.functions import written_lists
from farspan.execute.optimizers.own import make_own
from farspan.record.tensor import LazyTensor, StubParameter

if TYPE_CHECKING:
    import torch

__all__ = ["over_lists"]

_RECORDED = (LazyTensor, StubParameter)


class View(Protocol):
    """The protocol of an optimizer's view of a step (`step_view`), for functions over lists."""

    me: int

    def data(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def ranks_of(self, items: Iterable[Any]) -> int: ...
    def stage_of(self, tensor: Any) -> int: ...
    def elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any: ...
    def becomes_known_only(self, tensor: torch.Tensor, stage: int) -> None: ...
    def with_broadcast(self, args: Any, kwargs: Any, *, but: int = 0) -> Any: ...


def over_lists(view: View, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call `func` with the places that are here, replicated or own; of the others only metadata are known."""
    number = len(args[0])
    lists = [place for place, item in enumerate(args) if isinstance(item, (list, tuple)) and len(item) == number]
    written = [place for place in (written_lists(name) if name.endswith("_") else ()) if place in lists]
    args, kwargs = _with_single_broadcast(view, args, kwargs, lists)
    homes = [view.ranks_of(row) for row in zip(*[args[place] for place in lists], strict=True)]
    for index in [index for index, home in enumerate(homes) if home & (home - 1)]:
        homes[index] = _bring_together(view, args, lists, index)
    here = [index for index, home in enumerate(homes) if home in (0, view.me)]
    results: list[Any] = [None] * number
    if here:
        here_args = [[item[i] for i in here] if place in lists else item for place, item in enumerate(args)]
        for place in lists:
            if any(type(item) is LazyTensor for item in here_args[place]):
                here_args[place] = [view.data(item) for item in here_args[place]]
        part = func(*here_args, **kwargs)
        for position, index in enumerate(here):
            results[index] = part[position] if isinstance(part, (list, tuple)) else None
            if homes[index]:
                make_own([args[place][index] for place in written])
                make_own(results[index])
    for index in [index for index, home in enumerate(homes) if home not in (0, view.me)]:
        if not written:
            row = [[item[index]] if place in lists else item for place, item in enumerate(args)]
            results[index] = view.elsewhere(func, row, kwargs)[0]
            continue
        for tensor in [args[place][index] for place in written if type(args[place][index]) not in _RECORDED]:
            row = [args[place][index] for place in lists]
            view.becomes_known_only(tensor, next(view.stage_of(item) for item in row if view.ranks_of([item])))
    if written:
        return args[0] if name.startswith("_foreach_") else None
    return results


def _bring_together(view: View, args: list[Any], lists: Sequence[int], index: int) -> int:
    """Let the tensors at one place of the lists be those of the first one's rank; returns the bit of that rank."""
    row = [args[place][index] for place in lists]
    (row,), _ = view.with_broadcast((row,), {}, but=view.ranks_of(row[:1]))
    for place, item in zip(lists, row, strict=True):
        args[place] = [*args[place][:index], item, *args[place][index + 1 :]]
    return view.ranks_of(row)


def _with_single_broadcast(view: View, args: Any, kwargs: Any, lists: Sequence[int]) -> tuple[list[Any], Any]:
    """Let tensors that are no part of a list be replicated."""
    others = [None if place in lists else item for place, item in enumerate(args)]
    if view.ranks_of(others) | view.ranks_of(kwargs.values()):
        others, kwargs = view.with_broadcast(others, kwargs)
    return [args[place] if place in lists else item for place, item in enumerate(others)], kwargs
