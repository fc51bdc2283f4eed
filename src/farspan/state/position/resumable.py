"""A DataLoader whose place in its data is saved, and found again by a program that is resumed.

    epoch 3:   start                  order begins          batch 0 ... batch k-1 | save
               states of generators   states of generators                        | k, states of workers

    resumed:   put to the start's  -> to the order's  ->  k batches of indices are skipped, no data is read  ->  batch k

So the order is the one that was drawn, and what is drawn afterwards goes on where it was. Workers go on from the states
that they had when they had made the last batch that the program took. Of an `IterableDataset`, which only its own code
can move, k batches are read again.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from farspan.errors import CheckpointError, PlanError
from farspan.execute.process.world import current_engine
from farspan.outputs import write_line
from farspan.state.generators import generators_from_json, generators_to_json, one_from_json, one_to_json
from farspan.state.position.place import Place, place_from_json, place_to_json
from farspan.state.position.workers import Order, Single, TaggingCollate, WorkerInit
from farspan.torch_private import forget_workers

__all__ = ["Resumable", "loaders_from_json", "loaders_to_json", "resumable"]

_T = TypeVar("_T")


class Resumable(Generic[_T]):
    """A DataLoader whose place is saved; all else of it is the loader's own.

    Attributes:
        epoch: How often its data have been gone through; the one that is going on counts when it is over.
        position: How many batches of this epoch the program has taken.
    """

    def __init__(self, loader: DataLoader[_T]) -> None:
        self._given = loader
        self._loader = copy.copy(loader)
        forget_workers(self._loader)
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._has_workers = loader.num_workers > 0 and not self._is_iterable
        self._order: Order | None = None
        if not self._is_iterable:
            self._follow_order()
        self.epoch = 0
        self.position = 0
        self._is_begun = False
        self._place: Place | None = None
        """Where the epoch that goes on began."""
        self._resumed: Place | None = None
        """Where the next epoch is to go on."""
        self._has_ended_workers = False
        """Whether workers that would have stayed begin again with the next epoch."""
        self._workers: dict[int, Any] = {}
        """The states of workers after the last batch of each that the program has taken."""

        engine = current_engine()
        self._num_shares = None if engine is None else engine.groups.num_groups
        """Among how many groups its data are shared, which stays when one is lost; None for as many as began."""

    def _follow_order(self) -> None:
        """Let batches of indices come from this object: without the setters, which take no other ones."""
        parts, loader = vars(self._loader), self._loader
        is_batched = loader.batch_sampler is not None
        self._order = Order(loader.batch_sampler if is_batched else loader.sampler, is_batched or not self._has_workers)
        if is_batched or self._has_workers:
            parts["batch_sampler"] = self._order
        else:
            parts["sampler"] = self._order
        if self._has_workers:
            collate = loader.collate_fn if is_batched else Single(loader.collate_fn)
            parts["collate_fn"] = TaggingCollate(collate)
            parts["worker_init_fn"] = WorkerInit(loader.worker_init_fn)

    def __len__(self) -> int:
        return len(self._given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    def __iter__(self) -> Iterator[_T]:
        resumed, self._resumed = self._resumed, None
        if resumed is None and self._is_begun:  # the last one was not gone through to its end
            self.epoch += 1
        self._is_begun = True
        return self._batches(self._begin() if resumed is None else self._go_on(resumed))

    def _batches(self, iterator: Iterator[Any]) -> Iterator[_T]:
        for item in iterator:
            if self._has_workers:
                number, states, value = item
                if number is None:  # of no batch: see `Order`
                    continue
                self._workers[number] = states
            else:
                value = item
            self.position += 1
            yield value
        self.epoch += 1
        self.position = 0
        self._is_begun = False

    def _begin(self) -> Iterator[Any]:
        self.position = 0
        states, own = _states(), self._own_states()
        self._place = place = Place(start=states, own=own)
        goes_on, self._has_ended_workers = self._has_ended_workers, False

        def order_begins() -> None:
            if goes_on:  # workers that stay draw their seed before their first epoch alone
                self._set_states(states, own)
            place.order, place.own_order = _states(), self._own_states()

        if self._order is not None:
            self._order.begin(order_begins)
        if self._has_workers and not self._loader.persistent_workers:
            self._workers = {}
        return self._started(self._workers if goes_on else {})

    def _go_on(self, place: Place) -> Iterator[Any]:
        """Begin an epoch again, and skip what has been taken of it."""
        now = _states()
        self._place, self.position, self._has_ended_workers = place, place.position, False
        self._set_states(place.start, place.own)

        def order_begins() -> None:
            if place.order is not None:
                self._set_states(place.order, place.own_order)

        if self._order is None:
            iterator = iter(self._loader)
            for _ in range(place.position):
                next(iterator, None)
            _set_states(now)
            return iterator
        num_blanks = place.position % self._loader.num_workers if self._has_workers else 0
        self._order.go_on(order_begins, place.position, num_blanks, lambda: _set_states(now))
        return self._started(self._workers)

    def _started(self, workers: dict[int, Any]) -> Iterator[Any]:
        """The loader's iterator; workers that begin with it go on from these states."""
        if not self._has_workers:
            return iter(self._loader)
        vars(self._loader)["worker_init_fn"].states = dict(workers)
        iterator = iter(self._loader)
        vars(self._loader)["worker_init_fn"].states = {}
        return iterator

    def _own_generators(self) -> list[torch.Generator]:
        """Returns the generators that are the loader's, or its samplers'."""
        given = self._given
        holders = (given, given.sampler, given.batch_sampler, getattr(given.batch_sampler, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())

    def _own_states(self) -> list[Any]:
        return [one_to_json(each) for each in self._own_generators()]

    def _set_states(self, program: Any, own: list[Any]) -> None:
        """Put the program's generators, and the loader's own, to such states."""
        _set_states(program)
        for generator, saved in zip(self._own_generators(), own, strict=False):
            one_from_json(generator, saved, "the generator of a loader")

    # What is saved.

    def to_json(self, num_groups: int) -> dict[str, Any]:
        place = self._resumed or self._place or Place()
        is_between = self._resumed is None and not self._is_begun
        now = Place(own=self._own_states()) if is_between else copy.copy(place)
        now.epoch, now.num_groups = self.epoch, self._num_shares or num_groups
        now.position = 0 if is_between else (place.position if self._resumed else self.position)
        now.workers = dict(place.workers if self._resumed else self._workers)
        return place_to_json(now)

    def from_json(self, value: Any, num_groups: int, where: str) -> None:
        place = place_from_json(value, where)
        total = place.position * place.num_groups
        place.position = total // num_groups
        if total % num_groups:
            write_line(f"farspan: {total} batches do not divide among {num_groups} groups: some are taken again.")
        self.epoch, self.position = place.epoch, place.position
        self._is_begun = False
        self._workers = dict(place.workers)
        self._resumed = place if place.start is not None else None
        self._has_ended_workers = self._has_workers and self._loader.persistent_workers
        forget_workers(self._loader)
        for generator, saved in zip(self._own_generators(), () if self._resumed else place.own, strict=False):
            one_from_json(generator, saved, "the generator of a loader")


def resumable(loader: DataLoader[_T]) -> Resumable[_T]:
    """Let `farspan.save` save where the program stands in `loader`, and `farspan.load` find it again.

    The first loop over it after `farspan.load` goes on with the next batch of the epoch that was going on, with the
    same order, and `epoch` says which one that is. Workers of a `DataLoader` go on with the random numbers that they
    would have drawn. The order is drawn again, so a sampler must draw what it did then.

    Args:
        loader: A torch `DataLoader`; it is not changed.

    Returns:
        What the program loops over instead.

    Raises:
        PlanError: It is no `DataLoader`.

    Example:
        >>> import torch, farspan
        >>> loader = farspan.resumable(torch.utils.data.DataLoader(range(6), batch_size=2))
        >>> [batch.tolist() for batch in loader], loader.epoch
        ([[0, 1], [2, 3], [4, 5]], 1)
    """
    if not isinstance(loader, DataLoader):
        raise PlanError(
            f"resumable takes a torch.utils.data.DataLoader, not a {type(loader).__name__}.",
            why="it has to know in which order a loader reads.",
            hint='save your own place: farspan.save(..., extra={"position": n})',
        )
    made = Resumable(loader)
    _known().append(weakref.ref(made))
    waiting = _waiting()
    if waiting:
        value, num_groups, where = waiting.pop(0)
        made.from_json(value, num_groups, where)
    return made


_thread = threading.local()
"""`loaders`: those of this thread's program; `waiting`: places of those that it has not made yet."""


def _known() -> list[weakref.ref[Resumable[Any]]]:
    return vars(_thread).setdefault("loaders", [])


def _waiting() -> list[tuple[Any, int, str]]:
    return vars(_thread).setdefault("waiting", [])


def loaders_to_json(num_groups: int) -> list[Any]:
    """Returns the places of the program's loaders, in the order in which it has made them."""
    return [loader.to_json(num_groups) for known in _known() if (loader := known()) is not None]


def loaders_from_json(value: Any, num_groups: int, where: str) -> None:
    """Let the program's loaders go on there; those that it has not made yet, when it makes them."""
    if not isinstance(value, list):
        raise CheckpointError(f"{where} are no places.", hint="another checkpoint")
    loaders = [loader for known in _known() if (loader := known()) is not None]
    _waiting().clear()
    for number, item in enumerate(value):
        if number < len(loaders):
            loaders[number].from_json(item, num_groups, where)
        else:
            place_from_json(item, where)
            _waiting().append((item, num_groups, where))


def _states() -> Any:
    """Returns the generators as they are in the program now."""
    engine = current_engine()
    if engine is None:
        return generators_to_json(torch.default_generator)
    engine.recorder.draws.settle()
    return generators_to_json(engine.recorder.draws.generator)


def _set_states(states: Any) -> None:
    engine = current_engine()
    if engine is not None:
        engine.recorder.draws.settle()
    generator = torch.default_generator if engine is None else engine.recorder.draws.generator
    generators_from_json(generator, states, "the generators of a loader")
