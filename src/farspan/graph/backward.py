"""A recorded backward: its share of each segment, and the stops at which hooks of the program receive a gradient.

    backward   S5 -> S4 --g--> stop | hook(g) = g' | stop --g'--> S3 -> S2 --> stop | hook | ...
    flush      first                  all ranks             second                all ranks

What was recorded before a call with hooks is in other segments than what was recorded after it (`Graph.cut_behind`).
So the calls behind a stop have all been gone through when its hooks are called, and no others: as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farspan.graph.call import Call, MicroBatch, Segment, Value

__all__ = ["Backward", "Edge", "BackwardSegment", "Stops", "RequestedGradients"]


class RequestedGradients:
    """The gradients that `torch.autograd.grad` returns instead of adding them to `.grad`."""

    __slots__ = ("before_hooks", "found", "gradients", "names", "outside", "reached", "values")

    def __init__(self, names: Sequence[str], outside: Sequence[Any], values: Sequence[Value] = ()) -> None:
        self.names = frozenset(names)
        """Names of the parameters asked for."""
        self.outside = tuple(outside)
        """The tensors outside the model that are asked for."""
        self.values = dict.fromkeys(values)
        """Recorded tensors of which gradients are requested."""
        self.reached: set[str | Value] = set()
        """The parameters (by name) and recorded values, of those asked for, that the outputs depend on."""
        self.found: dict[str | Value, Any] = {}
        """The gradients of those that live on this rank."""
        self.before_hooks: dict[Value, Any] = {}
        """The recorded gradients of recorded values from before hooks changed them, where autograd returns these: the
        backward goes on with what the hooks returned."""
        self.gradients: Sequence[Any] = [None] * len(self.outside)
        """The gradients of the tensors in `outside`."""


class Changes:
    """What a backward changes in attributes of modules, on one rank."""

    __slots__ = ("has_read", "is_running", "old")

    def __init__(self) -> None:
        self.old: dict[tuple[Any, str], Any] = {}
        """By module and name what the changed ones were."""
        self.is_running = False
        self.has_read = False
        """Whether it has read a recorded value that a module holds."""


class Backward:
    """One recorded `backward()`: the values it starts from and their gradients (None: ones)."""

    __slots__ = (
        "changes",
        "gradients",
        "graph",
        "modes",
        "moment",
        "retain_graph",
        "roots",
        "stops",
        "requested",
        "where",
    )

    def __init__(
        self,
        graph: MicroBatch,
        roots: Sequence[Value],
        gradients: Sequence[Any],
        *,
        retain_graph: bool,
        modes: Any = (),
        requested: RequestedGradients | None = None,
        where: Any,
    ) -> None:
        self.graph = graph
        self.roots = tuple(roots)
        self.gradients = tuple(gradients)
        self.retain_graph = retain_graph
        self.modes = modes
        """The autocast modes of the region that called the backward: torch runs it under them."""
        self.moment: Any = None
        """The moment of the call: the backward's autograd functions read everything as it was then."""
        self.requested = requested
        """The gradients asked for; None for a backward that goes to all parameters."""
        self.stops: Stops | None = None
        """The stops at which hooks are called; None if there are none."""
        self.changes: Changes | None = None
        """What it changes in attributes of modules on this rank; None where it may change nothing."""
        self.where = where


class Edge:
    """A gradient on its way from one backward segment to another."""

    __slots__ = ("dst", "key", "meta", "src")

    def __init__(self, key: Value | str, meta: Any, src: BackwardSegment, dst: BackwardSegment) -> None:
        self.key = key
        """The value whose gradient it is, or the name of the parameter."""
        self.meta = meta
        self.src = src
        self.dst = dst

    def describe(self) -> str:
        return f"gradient of {self.key if isinstance(self.key, str) else self.key.describe()}"


class BackwardSegment:
    """The share of one segment in one backward. One without a segment stands for the arrival of a gradient: that of a
    parameter at its owner, that of a tensor outside the model on each rank.
    """

    __slots__ = (
        "backward",
        "calls",
        "incoming",
        "order",
        "outgoing",
        "segment",
        "stage",
        "stop",
        "accumulates_into",
        "requested",
    )

    def __init__(self, backward: Backward, segment: Segment | None, stage: int, order: tuple[int, ...]) -> None:
        self.backward = backward
        self.segment = segment
        self.stage = stage
        self.order = order
        self.stop: Call | None = None
        """The call whose hooks receive these gradients before they go on to its segment (`Stops`)."""
        self.incoming: list[Edge] = []
        self.outgoing: list[Edge] = []
        self.calls: list[Call] = []
        """The calls that are differentiated here, latest first."""
        self.accumulates_into: dict[Any, None] = {}
        """The leaves, and names of parameters, whose gradient grows here: micro-batches must add up in order."""
        self.requested: dict[Value, None] = {}
        """Values made here whose gradients `torch.autograd.grad` is to return."""

    @property
    def turn(self) -> int:
        """Returns the turn of the micro-batch through which it goes back."""
        return (self.backward.graph if self.segment is None else self.segment.graph).turn

    @property
    def sends_gradients(self) -> bool:
        """Returns whether gradients of parameters are made here that are added up elsewhere."""
        return any(isinstance(edge.key, str) for edge in self.outgoing)

    @property
    def brings_outside(self) -> bool:
        """Returns whether the gradient of a tensor outside the model arrives here."""
        return self.segment is None and self.stop is None and not isinstance(self.incoming[0].key, str)

    @property
    def brought(self) -> str:
        """Returns the name of the parameter, or of the slice of one, whose gradient arrives here."""
        key = self.incoming[0].key
        assert isinstance(key, str)
        return key

    def forget(self) -> None:
        """It has run, or does not run here: parts and edges know each other."""
        self.incoming, self.outgoing, self.calls = [], [], []

    @property
    def title(self) -> str:
        """Returns what it goes through, for people."""
        return "arrival of a gradient" if self.segment is None else self.segment.title

    def describe(self) -> str:
        if self.segment is None:
            return f"arrival of a gradient, micro-batch {self.backward.graph.index}"
        return f"backward of {self.segment.describe()}"


class Stops:
    """The stops of one backward, and how far it has come."""

    __slots__ = ("arrived", "calls", "done", "has_begun", "left", "waiting")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = frozenset(calls)
        self.waiting: dict[Call, list[BackwardSegment]] = {call: [] for call in calls}
        """Calls whose hooks have not been called, the latest first, each with the stops of its outputs that get
        gradient."""
        self.has_begun = False
        self.left: list[BackwardSegment] = []
        """The backward segments that have not run, in an order in which they can run."""
        self.done: set[BackwardSegment] = set()
        """The backward segments that have run, and the stops that have been passed."""
        self.arrived: list[tuple[Value, Any]] = []
        """The gradients of tensors outside the model, with which autograd goes on at the end."""

    def begin(self, parts: Sequence[BackwardSegment]) -> None:
        """Takes the backward's segments, stops among them."""
        self.has_begun = True
        for part in parts:
            if part.stop is None:
                self.left.append(part)
            else:
                self.waiting[part.stop].append(part)
        self.waiting = {call: sorted(stops, key=_output) for call, stops in self.waiting.items() if stops}

    def next_call(self) -> Call | None:
        """Returns the call whose hooks come next: the latest one that waits for no other's hooks."""
        for call, stops in self.waiting.items():
            if all(part.stop is None for part in self._before(stops)):
                return call
        return None

    def next_parts(self) -> list[BackwardSegment]:
        """Returns what can run now: what the next hooks wait for, and what comes before them in one process."""
        call = self.next_call()
        if call is None:
            return list(self.left)
        requested = self._before(self.waiting[call])
        found: list[BackwardSegment] = []
        ready = set(self.done)
        for part in self.left:
            is_behind = all((item.graph.index, item.index) > (call.graph.index, call.index) for item in part.calls)
            if (part in requested or is_behind) and all(edge.src in ready for edge in part.incoming):
                found.append(part)
                ready.add(part)
        return found

    def take(self, parts: Sequence[BackwardSegment]) -> None:
        """Marks `parts` as run."""
        self.done.update(parts)
        self.left = [part for part in self.left if part not in self.done]

    def go_on(self, call: Call) -> None:
        """Marks the hooks of `call` as called."""
        self.done.update(self.waiting.pop(call))

    def _before(self, parts: Sequence[BackwardSegment]) -> set[BackwardSegment]:
        """Returns all that `parts` wait for and that has not run, stops included."""
        found: set[BackwardSegment] = set()
        stack = [edge.src for part in parts for edge in part.incoming]
        while stack:
            part = stack.pop()
            if part not in found and part not in self.done:
                found.add(part)
                stack += [edge.src for edge in part.incoming]
        return found


def _output(part: BackwardSegment) -> int:
    key = part.outgoing[0].key
    assert isinstance(key, Value)
    return key.index
