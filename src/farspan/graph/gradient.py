"""Routes the gradients of one backward, cut at segment borders.

    forward    P  --v-->  S1, S2, S3                 P made v, three segments used it
    backward   S3 --g--> S2 --g+g--> S1 --sum--> P

A part is one segment's share of a backward. Where several segments used a value, its gradient does not fan in at the
producer: the last user hands its gradient to the one before, which adds its own, and so on. That is the order in which
autograd adds them up in one process, so the sum is the same to the last bit; and it costs no more messages. The same
holds for a parameter that several segments use. The gradient of a tensor outside the model, which every rank has, goes
from its first user to all ranks.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from farspan.errors import RecordError
from farspan.graph.backward import BackwardSegment, Edge
from farspan.graph.call import EVERYWHERE, ModuleTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from farspan.graph.backward import Backward, RequestedGradients
    from farspan.graph.call import Call, Segment, Value

__all__ = [
    "differentiated",
    "earliest_uses",
    "first_released",
    "hooked_calls",
    "parameters_of",
    "passed",
    "released_error",
    "route",
]

if TYPE_CHECKING:
    _Users = dict[Value, dict[BackwardSegment, None]]
    """The backward segments in which a value gets gradient."""
    _Segments = dict[Any, BackwardSegment]
    """Backward segments by their segment; those without one by what arrives in them."""


def route(
    backward: Backward,
    home_stages: Sequence[int],
    released: Collection[Call] = (),
    *,
    keeps_order: bool = True,
    part_stages: Collection[int] = (),
) -> list[BackwardSegment]:
    """Returns the segments of `backward` in an order in which they can run.

    Args:
        backward: What was recorded.
        home_stages: A stage of each rank.
        released: Calls that earlier backwards of the same step go through without keeping the graph.
        keeps_order: Whether the gradients of a parameter that several segments use are added up in the order of one
            process; if not, each of them goes straight to the owner.
        part_stages: The members of split stages: none of them hands the gradient of a value on to another stage, for
            they run side by side.

    Raises:
        RuntimeError: The backward would go a second time through what was not kept; torch's own words.
    """
    walk = _Walk(backward)
    walk.run(released)
    parts, users = walk.parts, walk.users
    if backward.requested is None:
        for leaf, using in walk.leaf_calls.items():
            if leaf.parameter_names or not leaf.placed:  # where all parameters are elsewhere, so are their sums
                for part in using:
                    part.accumulates_into[leaf] = None
    stops = _stops(backward, walk.active, walk.queued)
    _link_values(users, parts, stops, frozenset(part_stages))
    _link_outside(backward, users, parts, home_stages)
    _link_parameters(backward, users, walk, parts, keeps_order=keeps_order)
    return sorted(parts.values(), key=lambda part: part.order, reverse=True)


class _Walk:
    """Goes back through the calls of one backward, the latest first, and notes by segments what gets gradient."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
        self.parts: _Segments = {}
        self.active: set[Value] = set()
        """Values that get gradient."""
        self.queued: set[Call] = set()
        """Calls that it goes through."""
        self.users: _Users = {}
        self.leaf_calls: dict[Any, dict[BackwardSegment, list[Call]]] = {}
        """Of each module, its calls by backward segment."""
        self.native: dict[str, tuple[Any, dict[BackwardSegment, None]]] = {}
        """By name the parameters that are used as such where they live, with their metadata and users."""
        self._queue: list[tuple[int, int, Call]] = []
        requested = backward.requested
        self._leading = None if requested is None else _leading(backward.roots, requested)

    def run(self, released: Collection[Call]) -> None:
        """Go through all calls.

        Raises:
            RuntimeError: One is among those released.
        """
        for root in self.backward.roots:
            self._activate(root)
            self._reach(root)
        while self._queue:
            call = heapq.heappop(self._queue)[2]
            if call.arguments is None or call in released:
                raise released_error(call)
            self._go_through(call, released)

    def _go_through(self, call: Call, released: Collection[Call]) -> None:
        for graph, number, text in call.recounted:
            if (graph, number) > (call.graph.index, call.index):
                continue  # torch computes a checkpoint again up to what the backward needs
            raise RecordError(
                f"a checkpoint would run {text} again, and its buffers or attributes would count twice.",
                why="what a checkpoint outside of a placed module runs is not computed again here.",
                hint="leave what counts out of the checkpoint; or name a module around both in the plan",
            )
        segment, part = call.segment, self.parts[call.segment]
        part.calls.append(call)
        if isinstance(call.target, ModuleTarget):
            self.leaf_calls.setdefault(call.target, {}).setdefault(part, []).append(call)
        for value in differentiated(call, self.active, released):
            if self._leading is not None and value not in self._leading:
                continue
            if value.name and value.stage == segment.stage:
                self.native.setdefault(value.name, (value.meta, {}))[1][part] = None
            elif value.segment is not segment:
                self.users.setdefault(value, {})[part] = None
            self._activate(value)
            self._reach(value)

    def _activate(self, value: Value) -> None:
        self.active.add(value)
        call = value.call
        if call is not None and call not in self.queued and (self._leading is None or call in self._leading):
            self.queued.add(call)
            self._part_of(call.segment)
            heapq.heappush(self._queue, (-call.graph.index, -call.index, call))

    def _reach(self, value: Value) -> None:
        requested = self.backward.requested
        if requested is not None and value in requested.values and value.segment is not None:
            requested.reached.add(value)
            self._part_of(value.segment).requested[value] = None

    def _part_of(self, segment: Segment) -> BackwardSegment:
        part = self.parts.get(segment)
        if part is None:
            part = self.parts[segment] = BackwardSegment(self.backward, segment, segment.stage, segment.order)
        return part


def released_error(call: Call) -> RuntimeError:
    """Returns torch's own error for a backward through a call of which the graph was not kept."""
    return RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors after they "
        "have already been freed). Specify retain_graph=True if you need to backward through the graph a "
        f"second time. An earlier backward went through {call.describe()}, which runs as one unit: all "
        "that it returned has one graph."
    )


def first_released(roots: Sequence[Value], earlier: Iterable[Backward], keeps: Callable[[Call], bool]) -> Call | None:
    """Returns the call at which a backward from `roots` ends, in torch, before it has added to any gradient: an earlier
    one has not kept the graph of it. None where there is no such call.

    Args:
        roots: What the backward starts from.
        earlier: Backwards that wait to be run.
        keeps: Whether an operation has kept tensors for its backward, which have been freed then. torch goes once more
            through others.
    """
    gone: set[Call] = set()
    for backward in earlier:
        if not backward.retain_graph:
            leading = None if backward.requested is None else _leading(backward.roots, backward.requested)
            gone.update(call for call in passed(backward) if leading is None or call in leading)
    found, active = None, set(roots)
    for call in passed_from(roots, active, gone):
        if call.arguments is None:
            return None if call.raised else call  # one that has never run is another error, when it is to be run
        if call in gone:
            found = found or call
        has_parameters = isinstance(call.target, ModuleTarget) and bool(call.target.parameter_names)
        if call in gone and (has_parameters or keeps(call)):
            return found
        if has_parameters or any(value.name or value.stage == EVERYWHERE for value in differentiated(call, active)):
            return None
    return found


def earliest_uses(backward: Backward) -> dict[str, tuple[int, int]]:
    """Maps the name of a parameter to the first call that uses it, of those that `backward` goes through. Autograd has
    the whole gradient once it has been through that call.
    """
    uses: dict[str, tuple[int, int]] = {}
    active: set[Value] = set(backward.roots)
    for call in passed(backward, active):
        place = (call.graph.index, call.index)
        uses.update((call.target.placed[number].name, place) for number in parameters_of(call, active))
        uses.update((value.name, place) for value in differentiated(call, active) if value.name)
    return uses


def passed(backward: Backward, active: set[Value] | None = None) -> Iterator[Call]:
    """Returns the calls that `backward` goes through, the latest first; what is taken of them adds to
    `active` the values that get gradient."""
    calls = passed_from(backward.roots, set(backward.roots) if active is None else active)
    return (call for call in calls if call.arguments is not None)  # `route` says what is wrong with others


def passed_from(roots: Sequence[Value], active: set[Value], released: Collection[Call] = ()) -> Iterator[Call]:
    queue = [(-root.call.graph.index, -root.call.index, root.call) for root in roots if root.call is not None]
    queue = list({entry[2]: entry for entry in queue}.values())
    heapq.heapify(queue)
    queued = {entry[2] for entry in queue}
    while queue:
        call = heapq.heappop(queue)[2]
        for value in differentiated(call, active, released) if call.arguments is not None else ():
            active.add(value)
            if value.call is not None and value.call not in queued:
                queued.add(value.call)
                heapq.heappush(queue, (-value.call.graph.index, -value.call.index, value.call))
        yield call


def differentiated(call: Call, active: Collection[Any], released: Collection[Call] = ()) -> list[Value]:
    """Returns the arguments that get gradient from those outputs of `call` that are active. Where data decide whether
    one does (a state that is detached inside), not what was made by a call that is `released`: it cannot get any.
    """
    assert call.arguments is not None
    reached: set[int] = set()
    for output, sources in zip(call.outputs, call.entry.depends_on, strict=False):
        if output in active:
            reached.update(sources)
    arguments = [call.arguments[number] for number in sorted(reached)]
    found = [item for item in arguments if hasattr(item, "meta") and item.meta.requires_grad]
    if not getattr(call.target, "is_resolved", False):
        return found
    return [item for item in found if item.call is None or not (_is_released(item.call) or item.call in released)]


def _is_released(call: Call) -> bool:
    return call.arguments is None and not call.raised


def parameters_of(call: Call, active: Collection[Any]) -> set[int]:
    """Returns the parameters, by their numbers in what is placed of its module, that may get gradient from those
    outputs of `call` that are active."""
    return {
        number
        for output, numbers in zip(call.outputs, call.entry.parameters, strict=False)
        if output in active
        for number in numbers
    }


def _leading(roots: Sequence[Value], requested: RequestedGradients) -> set[Value | Call]:
    """Returns the values and calls by way of which the roots depend on what is requested."""
    calls: set[Call] = set()
    todo = [root.call for root in roots]
    while todo:
        call = todo.pop()
        if call is not None and call not in calls and call.arguments is not None:
            calls.add(call)
            todo += [value.call for value in differentiated(call, call.outputs)]
    leading: set[Value | Call] = set()
    for call in sorted(calls, key=lambda call: (call.graph.index, call.index)):
        for value in differentiated(call, call.outputs):
            is_outside = value.stage == EVERYWHERE and bool(requested.outside)
            if value.name in requested.names or is_outside or value in requested.values:
                leading.add(value)
        has_requested = not requested.names.isdisjoint(getattr(call.target, "parameter_names", ()))
        for output in call.outputs:
            if has_requested or not leading.isdisjoint(differentiated(call, [output])):
                leading.update((call, output))
    return leading


def _stops(backward: Backward, active: Collection[Value], queued: Collection[Call]) -> dict[Value, BackwardSegment]:
    """Maps a value to the backward segment that stands for its stop."""
    stops: dict[Value, BackwardSegment] = {}
    if backward.stops is None:
        return stops
    requested = () if backward.requested is None else backward.requested.values
    for call in backward.stops.calls:
        for value in call.outputs:
            if value in active and (call in queued or value in requested):
                stop = stops[value] = BackwardSegment(backward, None, value.stage, (*call.segment.order, value.index))
                stop.stop = call
    return stops


def _link_values(
    users: _Users,
    parts: _Segments,
    stops: Mapping[Value, BackwardSegment],
    part_stages: frozenset[int],
) -> None:
    for value, using in [*users.items(), *((value, {}) for value in stops if value not in users)]:
        if not value.name and value.stage != EVERYWHERE:
            assert value.segment is not None
            chain = _latest_first(using)
            stop = stops.get(value)
            if stop is None and not part_stages.isdisjoint(part.stage for part in chain):
                for stage in dict.fromkeys(part.stage for part in chain):
                    _link(value, value.meta, [*(part for part in chain if part.stage == stage), parts[value.segment]])
                continue
            if stop is not None:
                stop.stage = chain[-1].stage if chain else value.stage
                chain.append(stop)
                parts[value, "stop"] = stop
            _link(value, value.meta, [*chain, parts[value.segment]])


def _link_outside(
    backward: Backward,
    users: _Users,
    parts: _Segments,
    home_stages: Sequence[int],
) -> None:
    for value, using in users.items():
        if value.stage == EVERYWHERE:
            chain = _latest_first(using)
            _link(value, value.meta, chain)
            last = chain[-1]
            for stage in home_stages:
                home = parts[value, stage] = BackwardSegment(backward, None, stage, (last.order[0], last.order[1], -1))
                _link(value, value.meta, [last, home])


def _link_parameters(
    backward: Backward,
    users: _Users,
    walk: _Walk,
    parts: _Segments,
    *,
    keeps_order: bool,
) -> None:
    requested, native, leaf_calls = backward.requested, walk.native, walk.leaf_calls
    keeps_order |= requested is not None or backward.stops is not None
    remote: dict[str, tuple[Value, dict[BackwardSegment, None]]] = {}
    for value, using in users.items():
        if value.name:  # after each flush another value stands for the same parameter
            remote.setdefault(value.name, (value, {}))[1].update(using)
    for leaf, calls in leaf_calls.items():
        for number, placed in enumerate(leaf.placed):
            if placed.stage != leaf.stage or not placed.is_parameter:
                continue
            if requested is not None and placed.name not in requested.names:
                continue
            has_others = len(calls) > 1 or placed.is_shared or placed.name in native or placed.name in remote
            if placed.is_trained and (requested is not None or has_others):
                using = {
                    part: None
                    for part, there in calls.items()
                    if any(number in parameters_of(call, walk.active) for call in there)
                }
                native.setdefault(placed.name, (placed.meta, {}))[1].update(using)
    if requested is not None:
        requested.reached.update(name for name, (_, using) in [*native.items(), *remote.items()] if using)
    for name, (meta, using) in native.items():
        for part in using:
            part.accumulates_into[name] = None
        if name not in remote or not keeps_order:
            _link(name, meta, _latest_first(using))
    for name, (value, using) in remote.items():
        if not keeps_order:
            for part in _latest_first(using):
                home = parts[name, part] = BackwardSegment(backward, None, value.stage, (*part.order[:2], -1))
                home.accumulates_into[name] = None
                _link(name, value.meta, [part, home])
            continue
        chain = _latest_first({**using, **native.get(name, (None, {}))[1]})
        if chain[-1] in using:
            last = chain[-1].order
            home = parts[name] = BackwardSegment(backward, None, value.stage, (last[0], last[1], -1))
            home.accumulates_into[name] = None
            chain.append(home)
        _link(name, value.meta, chain)


def _latest_first(using: dict[BackwardSegment, None]) -> list[BackwardSegment]:
    return sorted(using, key=lambda part: part.order, reverse=True)


def _link(key: Value | str, meta: Any, chain: list[BackwardSegment]) -> None:
    for src, dst in pairwise(chain):
        edge = Edge(key, meta, src, dst)
        src.outgoing.append(edge)
        dst.incoming.append(edge)


def hooked_calls(backward: Backward) -> tuple[list[Call], Value | None]:
    """Returns the calls with hooks that `backward` goes through, the latest first; and an output of such a call at
    which the backward cannot stop, because a user in the same segment passes on its gradient, if there is one.
    """
    calls: list[Call] = []
    near: Value | None = None
    active = set(backward.roots)
    for call in passed(backward, active):
        if call.hooks:
            calls.append(call)
        for value in differentiated(call, active):
            if value.call is not None and value.call.hooks and value.segment is call.segment:
                near = value
    return calls, near
