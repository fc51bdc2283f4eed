"""Remembers how a model's calls can be cut: found out for one call of a kind, and used for others like it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from farspan.call.infer.symbolic import Numbers
from farspan.call.pytree.canonical import is_plain
from farspan.call.rows.work import RowsWork
from farspan.call.side_effects.attributes import OwnObjects, own_attributes
from farspan.call.surroundings.around import Surroundings
from farspan.call.surroundings.code import kinds_of

__all__ = ["Around", "Cut", "Kind"]

_MOST = 12
"""Limit on the calls of a kind that are examined; a model that needs more is called with ever new numbers."""


@dataclass(slots=True)
class Cut:
    """The way in which calls are cut, or the reason why not.

    Attributes:
        positions: Which of the tensors among the arguments carry the batch.
        places: Of their numbers of rows among the numbers of such calls.
        reason: Why they are not cut, if they are not.
        dims: Along which the lanes of each output lie; None for a sum of what they give, `SAME` if all give the same.
        is_mean: Whether such a sum is a loss, to be divided by what the whole batch counts.
        is_provisional: Whether the next call is examined too: this one has set attributes, as first calls do.
        fixed: Of the numbers of such calls, by place, those that have to be as they were.
        varying: The places of the others, but for the number of rows.
        holds: Whether what was found out holds for other numbers: of rows, and those that vary.
        work: Of each operation of the call that was examined what its work is, while that is of use.
    """

    positions: tuple[int, ...] = ()
    reason: str = ""
    dims: Sequence[int | None] = ()
    is_mean: bool = False
    is_provisional: bool = False
    fixed: dict[int, int] = field(default_factory=dict[int, int])
    varying: Sequence[int] = ()
    places: frozenset[int] = frozenset()
    holds: Callable[[Sequence[int]], bool] | None = None
    work: Sequence[RowsWork] = ()

    def fits(self, numbers: Numbers, sizes: Sequence[int]) -> bool:
        """Returns whether it is right for a call with these numbers, and `sizes` rows in its lanes."""
        values = numbers.values
        if self.holds is None or any(values[place] != value for place, value in self.fixed.items()):
            return False
        if any(values[place] != sum(sizes) for place in self.places):
            return False
        others = [values[place] for place in self.varying]
        return all(self.holds([size, *others]) for size in dict.fromkeys((sum(sizes), *sizes)))


class Kind:
    """Calls of a model that differ in numbers only: sizes, and whole numbers among their arguments."""

    def __init__(self) -> None:
        self._exact: dict[Any, Cut] = {}
        """Cuts by all numbers, and the number of lanes."""
        self._cuts: list[Cut] = []
        self._first: tuple[int, ...] = ()
        self.varying: set[int] = set()
        """The places of the numbers that have been seen to vary."""

    def known(self, numbers: Numbers, sizes: Sequence[int]) -> Cut | None:
        """Returns how such a call is cut, if that is known."""
        cut = self._exact.get((numbers.values, len(sizes)))
        return cut if cut is not None else next((each for each in self._cuts if each.fits(numbers, sizes)), None)

    def see(self, numbers: Numbers) -> None:
        """Note which numbers of a call are not those of the first."""
        self._first = self._first or numbers.values
        self.varying.update(place for place, value in enumerate(numbers.values) if value != self._first[place])

    def keep(self, numbers: Numbers, sizes: Sequence[int], cut: Cut) -> Cut:
        """Keep what was found out for a call."""
        if len(self._exact) >= _MOST and cut.reason:
            return cut
        self._exact[numbers.values, len(sizes)] = cut
        if cut.holds is not None:
            self._cuts.append(cut)
        return cut

    @property
    def is_worth_more(self) -> bool:
        """Returns whether another call is worth an examination."""
        return len(self._exact) < _MOST


class Around:
    """The surroundings that a model's forward may read besides its arguments and plain attributes: objects (a config),
    globals."""

    def __init__(self) -> None:
        self._surroundings: Surroundings | None = None
        self._objects: OwnObjects | None = None
        self._held: list[Any] = []
        self._num_changes = 0

    def number(self, modules: Sequence[nn.Module]) -> tuple[int, int]:
        """Returns numbers that are the same as at another call where all that is as it was."""
        if self._surroundings is None:
            self._surroundings = Surroundings(*kinds_of(modules))
        self._surroundings.look()
        attributes = [item for module in modules for item in own_attributes(module).values()]
        held = [item for item in attributes if not is_plain(item)]
        is_known = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if self._objects is None or not is_known or self._objects.has_changed():
            self._objects, self._held = OwnObjects(modules, ()), held
            self._num_changes += 1
        return self._surroundings.snapshot.number, self._num_changes
