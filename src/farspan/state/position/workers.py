"""Replaces parts of a DataLoader: its order is followed, and its workers report where their generators stand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from farspan.state.generators import generators_from_json, generators_to_json

__all__ = ["Order", "Single", "Tagged", "TaggingCollate", "WorkerInit"]


class Order:
    """The batches of indices of a loader, from where the program stands.

    Workers take batches in turn. So that each goes on with its own ones, blank batches come first, of which nothing is
    read, for the workers whose turns are over.

    Args:
        inner: The loader's own sampler of batches, or of single indices.
        is_as_it_is: Else each index becomes a batch of its own.
    """

    def __init__(self, inner: Any, is_as_it_is: bool) -> None:
        self._inner = inner
        self._is_as_it_is = is_as_it_is
        self.begin(lambda: None)

    def begin(self, on_begin: Callable[[], None]) -> None:
        """The next epoch begins at its beginning; `on_begin` is called before anything is drawn for its order."""
        self.go_on(on_begin, 0, 0, lambda: None)

    def go_on(
        self, on_begin: Callable[[], None], num_skipped: int, num_blanks: int, on_found: Callable[[], None]
    ) -> None:
        """The next epoch begins after so many batches; `on_found` is called when they have been skipped."""
        self._next = (on_begin, num_skipped, num_blanks, on_found)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        on_begin, num_skipped, num_blanks, on_found = self._next
        self.begin(lambda: None)
        on_begin()
        order = iter(self._inner)
        skipped = sum(1 for _ in itertools.islice(order, num_skipped))
        first = list(itertools.islice(order, 1)) if skipped else []  # what draws its order at the first one has drawn
        on_found()
        del on_begin, on_found  # through these the loader would hold itself while an epoch goes on
        for _ in range(num_blanks if first or not skipped else 0):
            yield []
        for item in itertools.chain(first, order):
            yield item if self._is_as_it_is else [item]


class Single:
    """Collates the only item of a batch, where the loader makes no batches."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        return self._collate(items[0])


class Tagged(NamedTuple):
    """A batch from a worker, and the states of the worker's generators after it; no batch if `number` is None.

    A loader that pins memory takes named tuples apart, and puts them together again.
    """

    number: int | None
    states: Any
    value: Any


class TaggingCollate:
    """Runs in a worker: collates, and says where the worker stands."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Tagged:
        if isinstance(items, list) and not items:
            return Tagged(None, None, None)
        value = self._collate(items)
        info = get_worker_info()
        assert info is not None
        return Tagged(info.id, generators_to_json(torch.default_generator), value)


class WorkerInit:
    """Runs in a worker at its start: what the program gave, then the states it goes on from."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self._given = given
        self.states: dict[int, Any] = {}

    def __call__(self, number: int) -> None:
        if self._given is not None:
            self._given(number)
        if number in self.states:
            generators_from_json(torch.default_generator, self.states[number], "the generators of a worker")
