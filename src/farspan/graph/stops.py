"""Where a backward stops, for hooks of the program to be called with the gradient that has come so far.

    backward   S5 -> S4 --g--> stop | hook(g) = g' | stop --g'--> S3 -> S2 --> stop | hook | ...
    flush      first                  all ranks             second                all ranks

What was recorded before a call with hooks is in other segments than what was recorded after it (`Graph.cut_behind`).
So the calls behind a stop have all been gone through when its hooks are called, and no others: as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farspan.graph.gradient import Part, differentiated, passed
from farspan.graph.graph import Backward, Call
from farspan.graph.value import Value

__all__ = ["Stops", "hooked_calls"]


class Stops:
    """The stops of one backward."""

    __slots__ = ("arrived", "calls", "done", "has_begun", "left", "waiting")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = frozenset(calls)
        self.waiting: dict[Call, list[Part]] = {call: [] for call in calls}
        """Calls whose hooks have not been called, the latest first; for each output that gets gradient the part that
        stands for the stop."""
        self.has_begun = False
        self.left: list[Part] = []
        """The parts of the backward that have not run, in the order in which they can run."""
        self.done: set[Part] = set()
        """What has run, and the stops behind which the backward has gone on."""
        self.arrived: list[tuple[Value, Any]] = []
        """The gradients of tensors outside the model, which autograd takes on at the end."""

    def begin(self, parts: Sequence[Part]) -> None:
        """The backward takes these parts, stops among them."""
        self.has_begun = True
        for part in parts:
            if part.stop is None:
                self.left.append(part)
            else:
                self.waiting[part.stop].append(part)
        self.waiting = {call: sorted(stops, key=_output) for call, stops in self.waiting.items() if stops}

    def next_call(self) -> Call | None:
        """Whose hooks come next: the latest call, of those that wait for no other's."""
        for call, stops in self.waiting.items():
            if all(part.stop is None for part in self._before(stops)):
                return call
        return None

    def next_parts(self) -> list[Part]:
        """What can run now: what the next hooks wait for, and what comes before them in one process."""
        call = self.next_call()
        if call is None:
            return list(self.left)
        wanted = self._before(self.waiting[call])
        found: list[Part] = []
        ready = set(self.done)
        for part in self.left:
            is_behind = all((item.graph.index, item.index) > (call.graph.index, call.index) for item in part.calls)
            if (part in wanted or is_behind) and all(edge.src in ready for edge in part.incoming):
                found.append(part)
                ready.add(part)
        return found

    def take(self, parts: Sequence[Part]) -> None:
        """These run now."""
        self.done.update(parts)
        self.left = [part for part in self.left if part not in self.done]

    def go_on(self, call: Call) -> None:
        """The hooks of `call` have been called."""
        self.done.update(self.waiting.pop(call))

    def _before(self, parts: Sequence[Part]) -> set[Part]:
        """All that `parts` wait for and that has not run, stops included."""
        found: set[Part] = set()
        stack = [edge.src for part in parts for edge in part.incoming]
        while stack:
            part = stack.pop()
            if part not in found and part not in self.done:
                found.add(part)
                stack += [edge.src for edge in part.incoming]
        return found


def _output(part: Part) -> int:
    key = part.outgoing[0].key
    assert isinstance(key, Value)
    return key.index


def hooked_calls(backward: Backward) -> tuple[list[Call], Value | None]:
    """The calls with hooks that `backward` goes through, the latest first; and a value of theirs at which it cannot
    stop, for it comes from a user in the same segment, if there is one.
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
