"""The way gradients take: one backward, cut at segment borders.

    forward    P  --v-->  S1, S2, S3                 P made v, three segments used it
    backward   S3 --g--> S2 --g+g--> S1 --sum--> P

A part is one segment's share of a backward. Where several segments used a value, its gradient does not fan in at the
producer: the last user hands its gradient to the one before, which adds its own, and so on. That is the order in which
autograd adds them up in one process, so the sum is the same to the last bit; and it costs no more messages. The same
holds for a parameter that several segments use.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from farspan.graph.graph import Backward, Call, Segment
    from farspan.graph.value import Value

__all__ = ["Edge", "Part", "route"]


class Edge:
    """A gradient on its way from one part to another."""

    __slots__ = ("dst", "key", "meta", "src")

    def __init__(self, key: Value | str, meta: Any, src: Part, dst: Part) -> None:
        self.key = key
        """Of which value, or of which parameter (by name)."""
        self.meta = meta
        self.src = src
        self.dst = dst

    def describe(self) -> str:
        return f"gradient of {self.key if isinstance(self.key, str) else self.key.describe()}"


class Part:
    """One segment's share of one backward; without a segment, the adding up of a parameter's gradient at its owner."""

    __slots__ = ("backward", "calls", "incoming", "order", "outgoing", "segment", "stage", "touches")

    def __init__(self, backward: Backward, segment: Segment | None, stage: int, order: tuple[int, int, int]) -> None:
        self.backward = backward
        self.segment = segment
        self.stage = stage
        self.order = order
        self.incoming: list[Edge] = []
        self.outgoing: list[Edge] = []
        self.calls: list[Call] = []
        """What is differentiated here, latest first."""
        self.touches: dict[Any, None] = {}
        """The leaves, and names of parameters, that receive gradient here: micro-batches must add up in order."""

    def describe(self) -> str:
        if self.segment is None:
            return f"adding up the gradient of a parameter, micro-batch {self.backward.graph.index}"
        return f"backward of {self.segment.describe()}"


def route(backward: Backward, released: Collection[Call] = ()) -> list[Part]:
    """Return the parts of `backward` in the order they can run.

    Args:
        backward: What was recorded.
        released: Calls that earlier backwards of the same step go through without keeping the graph.

    Raises:
        RuntimeError: The backward would go a second time through what was not kept; torch's own words.
    """
    parts: dict[Any, Part] = {}
    active: set[Value] = set()
    queue: list[tuple[int, int, Call]] = []
    queued: set[Call] = set()
    users: dict[Value, dict[Part, None]] = {}
    leaf_calls: dict[Any, dict[Part, list[Call]]] = {}
    native: dict[str, tuple[Any, dict[Part, None]]] = {}  # parameters used as such, where they live, by name

    def part_of(segment: Segment) -> Part:
        part = parts.get(segment)
        if part is None:
            part = parts[segment] = Part(backward, segment, segment.stage, segment.order)
        return part

    def activate(value: Value) -> None:
        active.add(value)
        call = value.call
        if call is not None and call not in queued:
            queued.add(call)
            part_of(call.segment)
            heapq.heappush(queue, (-call.graph.index, -call.index, call))

    for root in backward.roots:
        activate(root)
    while queue:
        call = heapq.heappop(queue)[2]
        segment = call.segment
        part = parts[segment]
        if call.arguments is None or call in released:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Specify retain_graph=True if you need to backward through the graph a second "
                "time."
            )
        part.calls.append(call)
        if hasattr(call.target, "placed"):
            leaf_calls.setdefault(call.target, {}).setdefault(part, []).append(call)
        reached: set[int] = set()
        for output, sources in zip(call.outputs, call.entry.depends_on, strict=True):
            if output in active:
                reached.update(sources)
        for number in sorted(reached):
            value = call.arguments[number]
            if not hasattr(value, "meta") or not value.meta.requires_grad:
                continue
            if value.name and value.stage == segment.stage:
                native.setdefault(value.name, (value.meta, {}))[1][part] = None
            elif value.segment is not segment:
                users.setdefault(value, {})[part] = None
            activate(value)
    for leaf, using in leaf_calls.items():
        for part in using:
            part.touches[leaf] = None
    _link_values(users, parts)
    _link_parameters(backward, users, native, leaf_calls, parts)
    return sorted(parts.values(), key=lambda part: part.order, reverse=True)


def _link_values(users: dict[Value, dict[Part, None]], parts: dict[Any, Part]) -> None:
    for value, using in users.items():
        if not value.name:
            assert value.segment is not None
            _link(value, value.meta, [*_latest_first(using), parts[value.segment]])


def _link_parameters(
    backward: Backward,
    users: dict[Value, dict[Part, None]],
    native: dict[str, tuple[Any, dict[Part, None]]],
    leaf_calls: dict[Any, dict[Part, list[Call]]],
    parts: dict[Any, Part],
) -> None:
    remote: dict[str, tuple[Value, dict[Part, None]]] = {}
    for value, using in users.items():
        if value.name:  # after each flush another value stands for the same parameter
            remote.setdefault(value.name, (value, {}))[1].update(using)
    for leaf, calls in leaf_calls.items():
        for number, placed in enumerate(leaf.placed):
            if placed.stage != leaf.stage or not placed.is_parameter:
                continue
            if len(calls) > 1 or placed.is_shared or placed.name in native or placed.name in remote:
                using = {
                    part: None
                    for part, there in calls.items()
                    if any(number not in call.entry.unused_parameters for call in there)
                }
                native.setdefault(placed.name, (placed.meta, {}))[1].update(using)
    for name, (meta, using) in native.items():
        for part in using:
            part.touches[name] = None
        if name not in remote:
            _link(name, meta, _latest_first(using))
    for name, (value, using) in remote.items():
        chain = _latest_first({**using, **native.get(name, (None, {}))[1]})
        if chain[-1] in using:
            last = chain[-1].order
            home = parts[name] = Part(backward, None, value.stage, (last[0], last[1], -1))
            home.touches[name] = None
            chain.append(home)
        _link(name, value.meta, chain)


def _latest_first(using: dict[Part, None]) -> list[Part]:
    return sorted(using, key=lambda part: part.order, reverse=True)


def _link(key: Value | str, meta: Any, chain: list[Part]) -> None:
    for src, dst in pairwise(chain):
        edge = Edge(key, meta, src, dst)
        src.outgoing.append(edge)
        dst.incoming.append(edge)
