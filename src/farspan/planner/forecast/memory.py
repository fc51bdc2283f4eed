"""What a stage holds, task by task, and so its peak.

parameters, gradients, optimizer state                           always
what autograd saves; what is sent or received and not saved      from a forward to its backward
what the gradients of weights still need                         from there to these, where they are tasks
what has been received for a task that is yet to come            from when it is posted to that task
gradients, and small tensors, on their way to another rank       until that rank has taken them
what one piece needs while it runs                               during its forward or backward, less what the
                                                                 pieces after it have given back by then
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farspan.planner.forecast.parts import Hop, Part
from farspan.planner.simulation import Simulation
from farspan.schedule import LOOKAHEAD, Channel, Kind, Message, channels_of, run_ahead_of

__all__ = ["peak_bytes", "saved_bytes"]

_PACKED_BYTES = 64 * 1024
"""Tensors up to this size travel together in one message: they are copied into it and stay where they are, too."""


def saved_bytes(part: Part) -> float:
    """What autograd saves of a micro-batch: what several nodes keep is there once."""
    own = sum(node.saved_bytes for node in part.chosen)
    words: dict[str, float] = {}
    for node in part.chosen:
        for word, size in node.shared_bytes.items():
            own -= size if word in words else 0.0
            words[word] = size
    return own


def peak_bytes(parts: Sequence[Part], simulation: Simulation, schedule: str) -> list[float]:
    """The most that each part holds in a step, as the runtime executes it."""
    channels = channels_of(simulation.schedule, lookahead=LOOKAHEAD - run_ahead_of(schedule))
    return [max(_held(parts, part, simulation, channels), default=part.memory_bytes) for part in parts]


_Channels = Mapping[Channel, Sequence[Message]]


def _held(parts: Sequence[Part], part: Part, simulation: Simulation, channels: _Channels) -> list[float]:
    """By task of its rank, while this runs."""
    tasks, order = simulation.schedule.tasks, simulation.schedule.orders[part.rank]
    of_micro_batch = saved_bytes(part) + part.kept_bytes
    left = sum(node.left_bytes for node in part.chosen)
    split = {tasks[index].micro_batch for index in order if tasks[index].kind is Kind.WEIGHT}
    forward_working = _forward_working_bytes(part)
    backward_working = {is_split: _working_bytes(part, is_split=is_split) for is_split in (False, True)}
    held = part.memory_bytes + sum(2 * hop.held_bytes for hop in part.received if hop.is_once)
    under_way = _under_way(parts, part, simulation, channels)
    found: list[float] = []
    for index, more in zip(order, under_way, strict=True):
        task = tasks[index]
        is_split = task.micro_batch in split
        working = 0.0
        if task.kind is Kind.FORWARD:
            held += of_micro_batch * task.memory
            working = forward_working
        elif task.kind is Kind.BACKWARD:
            working = backward_working[is_split]
        found.append(held + more + working)
        if task.kind is Kind.BACKWARD:
            held -= of_micro_batch - left if is_split else of_micro_batch * -task.memory
        elif task.kind is Kind.WEIGHT:
            held -= left
    return found


def _forward_working_bytes(part: Part) -> float:
    """The most that a stage needs in its forward besides what it will have kept at its end."""
    most = yet_to_come = 0.0
    for node in reversed(part.chosen):
        most = max(most, node.forward_working_bytes - yet_to_come)
        yet_to_come += node.saved_bytes - sum(node.shared_bytes.values())
    return most


def _working_bytes(part: Part, *, is_split: bool) -> float:
    """The most that a stage needs besides what it keeps: in its backward, node by node, which then give back. Gradients
    that have come from other stages stay to its end; others go as soon as they were used.
    """
    come: dict[str, float] = {}
    for hop in part.returned:
        come[hop.node] = come.get(hop.node, 0.0) + hop.held_bytes
    total = sum(come.values())
    users: dict[str, int] = {}
    for node in part.chosen:
        for word in node.shared_bytes:
            users[word] = users.get(word, 0) + 1
    most = total
    given_back = 0.0
    for node in reversed(part.chosen):
        own = node.halved_working_bytes if is_split else node.working_bytes
        if node.name in come:
            own -= come[node.name]
        else:
            own -= node.halved_let_go_bytes if is_split else node.let_go_bytes
        most = max(most, own - given_back + total)
        given_back += node.saved_bytes - (node.left_bytes if is_split else 0.0)
        for word, size in node.shared_bytes.items():
            users[word] -= 1
            given_back -= size if users[word] else 0.0  # a node before it keeps it, too
    return most


def _under_way(parts: Sequence[Part], part: Part, simulation: Simulation, channels: _Channels) -> list[float]:
    """By task of its rank what is there for tasks to come, and what is yet to be taken by another rank."""
    order = simulation.schedule.orders[part.rank]
    place = {index: number for number, index in enumerate(order)}
    found = [0.0] * len(order)
    number_of = {each.rank: number for number, each in enumerate(parts)}
    for channel, messages in channels.items():
        hops = _hops(parts[number_of[channel.destination]], number_of[channel.source], channel)
        if channel.destination == part.rank:
            size = sum(hop.sent_bytes for hop in hops)
            for message in messages:
                first = min(place[user] for user in message.users)
                for number in range(message.posted_at, first):
                    found[number] += size
        elif channel.source == part.rank:
            small = sum(hop.sent_bytes for hop in hops if hop.sent_bytes <= _PACKED_BYTES)
            size = sum(hop.sent_bytes for hop in hops) if channel.is_gradient else small
            for message in messages:
                taken = _taken_at(simulation, message)
                for number in range(place[message.task] + 1, len(order)):
                    if simulation.starts[order[number]] >= taken:
                        break
                    found[number] += size
    return found


def _hops(target: Part, source: int, channel: Channel) -> list[Hop]:
    hops = target.returned if channel.is_gradient else target.received
    return [hop for hop in hops if hop.source == source and not hop.is_once]


def _taken_at(simulation: Simulation, message: Message) -> float:
    """When the receiver looks for it: after the first task that ends when it is sent and posted, or when it waits."""
    sent = simulation.ends[message.task]
    for index in simulation.schedule.orders[message.channel.destination][message.posted_at :]:
        if index in message.users:
            return simulation.starts[index]
        if simulation.ends[index] >= sent:
            return simulation.ends[index]
    return sent
