"""The order in which one process runs the actions of its several workers: each worker keeps its own order.

    worker 0    F0 F1 .. .. B0 ..      waits for a message
    worker 1    .. F0 F1 F2 .. B0      goes on meanwhile

One loop runs them all, always one that is ready. It waits only where none is: a message that comes for any of them
lets it go on. What one worker makes for another one lies in the same process, so that is an order, and no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from farspan.program.program import Action, Message

__all__ = ["in_turn"]


def in_turn(
    actions: Sequence[Action],
    *,
    begin: Callable[[Action], None],
    has_arrived: Callable[[Message], bool],
    wait_any: Callable[[Sequence[Action]], None],
) -> Iterator[tuple[int, Action]]:
    """Yields the actions in an order in which they can run, with their numbers; each has run when the next one is asked
    for.

    Args:
        actions: Of all workers of this rank.
        begin: Called with an action when the one before it on its worker has run.
        has_arrived: Whether a message is here; never waits.
        wait_any: Returns when all messages of one of these actions are here.
    """
    queues: dict[int, deque[tuple[int, Action]]] = {}
    for number, action in enumerate(actions):
        queues.setdefault(action.queue, deque()).append((number, action))
    place = {id(action): place for queue in queues.values() for place, (_, action) in enumerate(queue)}
    waiting = set(place)
    for queue in queues.values():
        begin(queue[0][1])
    while queues:
        heads = [queue[0] for queue in queues.values()]
        free = [head for head in heads if waiting.isdisjoint(map(id, head[1].after))]
        ready = [head for head in free if all(map(has_arrived, head[1].receives))]
        assert free, "the orders of the workers wait for each other"
        if not ready:
            wait_any([action for _, action in free])
            continue
        number, action = min(ready, key=lambda head: (place[id(head[1])], head[0]))
        yield number, action
        waiting.discard(id(action))
        queue = queues[action.queue]
        queue.popleft()
        if queue:
            begin(queue[0][1])
        else:
            del queues[action.queue]
