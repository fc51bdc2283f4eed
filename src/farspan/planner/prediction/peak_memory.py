"""Computes what a stage holds, task by task, and so its peak.

parameters, gradients, optimizer state                           always
what autograd saves; what is sent or received and not saved      from a forward to its backward
the same, if it gets no gradient                                 from a forward to the last that uses it
what the gradients of weights still need                         from there to these, where they are tasks
what has been received for a task that is yet to come            from when it is posted to that task
gradients, small tensors, and what else only the message needs,
on their way to another rank                                     until that rank has taken them
what one unit needs while it runs                               during its forward or backward, less what the
                                                                 units after it have given back by then
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farspan.planner.prediction.parts import Part, Stages
from farspan.planner.prediction.segments import Hop, Segment
from farspan.planner.simulation import Simulation
from farspan.schedule import Channel, Kind, Message, channels_of, run_ahead_of

__all__ = ["in_flight", "peak_bytes", "saved_bytes"]

_PACKED_BYTES = 64 * 1024
"""Tensors up to this size travel together in one message: they are copied into it and stay where they are, too."""


def saved_bytes(stages: Stages, part: Part) -> float:
    """Returns what autograd saves of a micro-batch: what several nodes keep is there once."""
    return sum(each.saved_bytes for each in stages.segments if stages.parts[each.stage] is part)


def in_flight(simulation: Simulation, rank: int) -> int:
    """Returns the most micro-batches of which a rank holds anything."""
    tasks = simulation.schedule.tasks
    held: dict[int, float] = {}
    most = 0
    for index in simulation.schedule.orders[rank]:
        task = tasks[index]
        held[task.micro_batch] = held.get(task.micro_batch, 0.0) + task.memory
        if held[task.micro_batch] == 0.0:
            del held[task.micro_batch]
        most = max(most, len(held))
    return most


def peak_bytes(stages: Stages, simulation: Simulation, schedule: str, lookahead: int) -> dict[int, float]:
    """Returns by rank the most that it holds in a step, as the runtime executes it."""
    channels = channels_of(simulation.schedule, lookahead=lookahead - run_ahead_of(schedule, lookahead))
    if any(part.width > 1 for part in stages.parts):
        return {
            rank: _at_most(stages, part, simulation, rank, lookahead) for part in stages.parts for rank in part.ranks
        }
    return {
        part.rank: max(_held(stages, part, simulation, channels), default=part.memory_bytes) for part in stages.parts
    }


def _at_most(stages: Stages, part: Part, simulation: Simulation, rank: int, lookahead: int) -> float:
    """Returns what a rank of a plan with wide stages holds at most: all that its stage has, as if it were the owner,
    values and gradients of what others own, and all micro-batches in flight with what is received for them.
    """
    own = [number for number, each in enumerate(stages.segments) if stages.parts[each.stage] is part]
    amounts = [_Amounts(stages, number) for number in own]
    received = sum(hop.held_bytes for each in amounts for hop in (*each.segment.received, *each.segment.returned))
    kept = sum(each.of_micro_batch + max(0.0, each.handed) for each in amounts)
    copies = 2 * part.parameter_bytes if part.width > 1 else 0.0
    working = max((max(each.forward_working, each.backward_working) for each in amounts), default=0.0)
    in_all = in_flight(simulation, rank)
    return part.memory_bytes + copies + in_all * kept + (in_all + lookahead) * received + working


_Channels = Mapping[Channel, Sequence[Message]]


def _held(stages: Stages, part: Part, simulation: Simulation, channels: _Channels) -> list[float]:
    """Returns for each task of its rank what is held while it runs."""
    tasks, order = simulation.schedule.tasks, simulation.schedule.orders[part.rank]
    split = {(tasks[index].micro_batch, tasks[index].level) for index in order if tasks[index].kind is Kind.WEIGHT}
    amounts = {
        segment.level: _Amounts(stages, number)
        for number, segment in enumerate(stages.segments)
        if stages.parts[segment.stage] is part
    }
    held = part.memory_bytes + sum(
        2 * hop.held_bytes for each in amounts.values() for hop in each.segment.received if hop.is_once
    )
    under_way = _under_way(stages, part, simulation, channels)
    found: list[float] = []
    for index, more in zip(order, under_way, strict=True):
        task = tasks[index]
        amount, is_split = amounts[task.level], (task.micro_batch, task.level) in split
        if task.kind is Kind.FORWARD:
            held += amount.handed + (amount.of_micro_batch if task.memory else 0.0)
            working = amount.forward_working
        elif task.kind is Kind.BACKWARD:
            held -= amount.taken
            working = amount.split_working if is_split else amount.backward_working
        else:
            working = 0.0
        found.append(held + more + working)
        if task.kind is Kind.FORWARD:
            held -= amount.ended
        elif task.kind is Kind.BACKWARD:
            held += amount.given
            held -= amount.of_micro_batch - (amount.left if is_split else 0.0)
        elif task.kind is Kind.WEIGHT:
            held -= amount.left
    return found


class _Amounts:
    """Of a segment: what a micro-batch keeps there, what is left of that after the first half of its backward, what its
    tasks need besides, the gradients that it is given by other segments of its stage, and gives to them, and what stays
    for later segments alone: how much more while its forward runs, and what goes then.
    """

    def __init__(self, stages: Stages, number: int) -> None:
        segment = self.segment = stages.segments[number]
        beside = [hop for each in stages.segments if each.stage == segment.stage for hop in each.returned]
        self.given = sum(hop.held_bytes for hop in beside if hop.source == number)
        self.taken = sum(
            hop.held_bytes for hop in segment.returned if stages.segments[hop.source].stage == segment.stage
        )
        self.of_micro_batch = max(0.0, segment.saved_bytes + segment.kept_bytes)
        self.handed = segment.handed_bytes - segment.taken_bytes
        self.ended = segment.ended_bytes
        self.left = sum(node.left_bytes for node in segment.nodes)
        self.forward_working = _forward_working_bytes(segment)
        self.backward_working = _working_bytes(segment, is_split=False)
        self.split_working = _working_bytes(segment, is_split=True)


def _forward_working_bytes(segment: Segment) -> float:
    """Returns the most that a segment needs in its forward besides what it will have kept at its end."""
    most = yet_to_come = 0.0
    for node, passed in zip(reversed(segment.nodes), reversed(segment.passed_bytes), strict=True):
        most = max(most, node.forward_working_bytes + passed - yet_to_come)
        yet_to_come += node.saved_bytes - sum(node.shared_bytes.values())
    return most


def _working_bytes(segment: Segment, *, is_split: bool) -> float:
    """Returns the most that a segment needs besides what it keeps: in its backward, node by node, which then give back.
    Gradients that have come from other segments stay to its end; others go as soon as they were used.
    """
    come: dict[str, float] = {}
    for hop in segment.returned:
        come[hop.node] = come.get(hop.node, 0.0) + hop.held_bytes
    total = sum(come.values())
    users: dict[str, int] = {}
    for node in segment.nodes:
        for word in node.shared_bytes:
            users[word] = users.get(word, 0) + 1
    most = total
    given_back = 0.0
    for node in reversed(segment.nodes):
        own = node.split_working_bytes if is_split else node.working_bytes
        if node.name in come:
            own -= come[node.name]
        else:
            own -= node.split_released_bytes if is_split else node.released_bytes
        most = max(most, own - given_back + total)
        given_back += node.saved_bytes - (node.left_bytes if is_split else 0.0)
        for word, size in node.shared_bytes.items():
            users[word] -= 1
            given_back -= size if users[word] else 0.0  # a node before it keeps it, too
    return most


def _under_way(stages: Stages, part: Part, simulation: Simulation, channels: _Channels) -> list[float]:
    """Returns for each task of its rank what is there for tasks to come, and what is yet to be taken by another
    rank."""
    tasks, order = simulation.schedule.tasks, simulation.schedule.orders[part.rank]
    place = {index: number for number, index in enumerate(order)}
    number_of = {(stages.ranks[number], each.level): number for number, each in enumerate(stages.segments)}
    found = [0.0] * len(order)
    for channel, messages in channels.items():
        if part.rank not in channel[:2]:
            continue
        hops = _hops_by_source(stages, channel)
        for message in messages:
            sent = hops.get(number_of[channel.source, tasks[message.task].level], [])
            if channel.destination == part.rank:
                size = sum(hop.sent_bytes for hop in sent)
                for at in range(message.posted_at, min(place[user] for user in message.users)):
                    found[at] += size
                continue
            gone = [hop for hop in sent if channel.is_gradient or hop.is_dropped or hop.sent_bytes <= _PACKED_BYTES]
            size = sum(hop.sent_bytes for hop in gone)
            taken = _taken_at(simulation, message)
            for at in range(place[message.task] + 1, len(order)):
                if simulation.starts[order[at]] >= taken:
                    break
                found[at] += size
    return found


def _hops_by_source(stages: Stages, channel: Channel) -> dict[int, list[Hop]]:
    """Returns what travels on a channel, by the number of the segment that sends it."""
    found: dict[int, list[Hop]] = {}
    for segment, rank in zip(stages.segments, stages.ranks, strict=True):
        if rank == channel.destination:
            for hop in segment.returned if channel.is_gradient else segment.received:
                if not hop.is_once and stages.ranks[hop.source] == channel.source:
                    found.setdefault(hop.source, []).append(hop)
    return found


def _taken_at(simulation: Simulation, message: Message) -> float:
    """Returns when the receiver checks for it: after the first task that ends when it is sent and posted, or when it
    waits."""
    sent = simulation.ends[message.task]
    for index in simulation.schedule.orders[message.channel.destination][message.posted_at :]:
        if index in message.users:
            return simulation.starts[index]
        if simulation.ends[index] >= sent:
            return simulation.ends[index]
    return sent
