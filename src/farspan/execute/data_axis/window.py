"""Averages gradients over the groups once, beside the step whose backwards compute them.

F0 F1 F2 F3 B0 B1 B2 B3                     the actions of a step on one rank
mask|                 [d d|c c] [b b|a]     collectives: which gradients, then these, the last parameters first
                       each begins when the last that is added to it has been, in one order on all ranks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from farspan.call.leaf import Leaf, Placed
from farspan.comm.transport import TransferError
from farspan.errors import RecordError
from farspan.graph import BackwardSegment, whole_name
from farspan.torch_private import raw_grad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.comm.collectives import Collectives, Pending
    from farspan.execute.data_axis.gradient_buckets import Bucket, Trained
    from farspan.program.program import Program

__all__ = ["Additions", "Watcher", "Window", "additions_of"]


@dataclass(slots=True)
class Additions:
    """The last additions of a step to the gradients of this rank's parameters."""

    last: dict[str, int] = field(default_factory=dict)
    """The number of the action, by name of a parameter."""
    at_once: dict[int, list[Placed]] = field(default_factory=dict)
    """The parameters, by number of an action, to which autograd adds all of it at once, perhaps long before its end."""


class Groups(Protocol):
    """The protocol of the rank's `Reduction`, as a window uses it."""

    @property
    def num_groups(self) -> int: ...
    @property
    def peers(self) -> Collectives: ...
    @property
    def outlives_losses(self) -> bool: ...

    def buckets_of(self, own: Sequence[Trained], mask: bytes) -> list[Bucket]: ...
    def watch(self, placed: Trained) -> None: ...
    def wait(self, work: Pending) -> None: ...


class Window:
    """One averaging, on one rank.

    Args:
        number: Windows are counted from 0.
        own: This rank's parameters, in the order of the model; or what else is trained.
        touched: The names of those of them to whose gradients something is added before it ends.
        additions: Of the step that is about to run; nothing where it has run.
        groups: Of this rank.
    """

    def __init__(
        self, number: int, own: Sequence[Trained], touched: Collection[str], additions: Additions, groups: Groups
    ) -> None:
        self.number = number
        self._own = own
        self._groups = groups
        self._additions = additions
        self._pending: dict[int, list[str]] = {}
        """The parameters, by number of an action, that are complete when it has run."""
        for name, action in additions.last.items():
            self._pending.setdefault(action, []).append(name)
        self._incomplete = set(additions.last)
        is_kept = groups.outlives_losses  # what is averaged again is to be what it was
        self._fresh = set() if is_kept else {placed.name for placed in own if raw_grad(placed.tensor) is None}
        """The parameters whose gradients the step makes, which may be given up: the program has not seen them."""
        self._mask = torch.tensor([placed.name in touched for placed in own], dtype=torch.uint8)
        self._coming: Pending | None = None
        """The masks of the other groups, until they are here."""
        self._broken_by: TransferError | None = None
        """Why nothing of it can be averaged: it is begun again when it is known which groups are left."""
        self._buckets: list[Bucket] | None = None
        self._bucket_of: dict[str, int] = {}
        self._num_missing: list[int] = []
        """The number of incomplete gradients in each bucket."""
        self._works: list[Pending] = []
        """The collectives of the first buckets."""
        self.num_groups = groups.num_groups
        """The number of groups that the mean is over."""
        self._watched: set[str] = set()
        """The parameters of whose gradients the action that runs adds all at once what is still missing."""
        if own:
            self._try(self._begin)
        self._watch(0)

    def _begin(self) -> None:
        self._coming = self._groups.peers.maximum(self._mask)

    def _try(self, act: Callable[[], None]) -> None:
        """Do something with the other groups, beside a step that does not need them."""
        try:
            if self._broken_by is None:
                act()
        except TransferError as error:
            if not self._groups.outlives_losses:
                raise
            self._broken_by = error

    def go_on(self, action: int) -> None:
        """An action has run: begin to reduce what is complete by now."""
        for name in self._pending.get(action, ()):
            self._complete(name)
        self._try(self._reduce)
        self._watch(action + 1)

    def end(self) -> None:
        """The step has run: the gradients become what has been reduced."""
        for bucket, work in self._last():
            self._groups.wait(work)
            with torch.no_grad():
                bucket.spread()

    def complete(self) -> None:
        """The step has run: wait for all sums, and leave the gradients what they are.

        Raises:
            TransferError: A group is lost.
        """
        for _, work in self._last():
            self._groups.wait(work)

    def spread(self) -> None:
        """Let the gradients become what has been reduced; it is `complete`."""
        with torch.no_grad():
            for bucket in self._buckets or ():
                bucket.spread()

    def _last(self) -> list[tuple[Bucket, Pending]]:
        """Returns all buckets, each on its way."""
        if self._broken_by is not None:
            raise self._broken_by
        for name in sorted(self._incomplete):  # those that other ranks have added to, beside the actions
            self._complete(name)
        if self._coming is not None:
            self._groups.wait(self._coming)
        self._reduce()
        assert self._buckets is not None
        return list(zip(self._buckets, self._works, strict=True))

    def _watch(self, action: int) -> None:
        """See each gradient of an action as it becomes complete."""
        items = self._additions.at_once.get(action, ())
        self._watched = {placed.name for placed in items}
        for placed in items:
            if placed.tensor.requires_grad:
                self._groups.watch(placed)

    def added(self, name: str) -> None:
        """Autograd has added to a gradient."""
        if name not in self._watched:
            return
        if name not in self._incomplete:
            number = self._bucket_of.get(name)
            if number is not None and number < len(self._works):
                raise RecordError(
                    f"one backward has added to the gradient of {name} twice.",
                    why="a reentrant checkpoint runs backwards inside of backwards; the gradient is on its way to the\n"
                    "other groups.",
                    hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
                )
            return
        self._complete(name)
        self._try(self._reduce)

    def _complete(self, name: str) -> None:
        if name in self._incomplete:
            self._incomplete.discard(name)
            if name in self._bucket_of:
                self._num_missing[self._bucket_of[name]] -= 1

    def _reduce(self) -> None:
        """Begin to reduce those buckets, in their order, that are complete."""
        if self._buckets is None:
            if self._coming is not None:
                if not self._coming.is_done():
                    return
                self._groups.wait(self._coming)  # raises where it cannot come: a layout of our own would be another one
            self._lay_out()
        assert self._buckets is not None
        while len(self._works) < len(self._buckets) and not self._num_missing[len(self._works)]:
            bucket = self._buckets[len(self._works)]
            with torch.no_grad():
                flat = bucket.fill(1 / self.num_groups, self._fresh)
            self._works.append(self._groups.peers.sum(flat))

    def _lay_out(self) -> None:
        self._buckets = self._groups.buckets_of(self._own, self._mask.numpy().tobytes())
        for number, bucket in enumerate(self._buckets):
            names = [placed.name for placed in bucket.members]
            self._bucket_of.update(dict.fromkeys(names, number))
            self._num_missing.append(sum(name in self._incomplete for name in names))


class Watcher:
    """Lets the window know, in each step, when autograd has added to a gradient.

    Args:
        window: Gives the window while a step runs.
    """

    def __init__(self, window: Callable[[], Window | None]) -> None:
        self._window = window
        self._nodes: dict[str, Any] = {}
        """By parameter, autograd's node that adds to its gradient: its hook lasts as long as somebody holds it."""

    def watch(self, placed: Trained) -> None:
        """Watch the gradient of a parameter, in this step and in later ones."""
        known = self._nodes.get(placed.name)
        if known is None or known.variable is not placed.tensor:
            self._nodes[placed.name] = node = get_gradient_edge(placed.tensor).node
            node.register_hook(functools.partial(self._added, placed.name))

    def close(self) -> None:
        self._nodes.clear()

    def _added(self, name: str, *_: Any) -> None:
        window = self._window()
        if window is not None:
            window.added(name)


def additions_of(program: Program, parameters: Mapping[str, Placed]) -> Additions:
    """Returns the last additions of `program` to the gradients of this rank's parameters."""
    found = Additions()
    for part, _ in program.reductions:  # as they arrive: the last may come behind all actions
        found.last[whole_name(part.brought)] = len(program.actions)
    for number in range(len(program.actions) - 1, -1, -1):
        work = program.actions[number].work
        if not isinstance(work, BackwardSegment) or work.backward.requested is not None:
            continue
        for key in work.accumulates_into:
            is_whole = isinstance(key, Leaf)  # a name stands for one whose gradient goes from segment to segment
            for placed in key.placed if isinstance(key, Leaf) else [parameters[whole_name(key)]]:
                if placed.is_owned and placed.is_trained and placed.name not in found.last:
                    found.last[placed.name] = number
                    if is_whole and not placed.is_shared:
                        found.at_once.setdefault(number, []).append(placed)
    return found
