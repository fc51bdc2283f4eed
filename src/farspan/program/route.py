"""Routes what a task makes: between which workers it travels, and through which channels.

Every pair of workers of different ranks has a channel for activations and one for gradients; and one each for what
belongs to parameters: their values, which go from owners to the members of wide stages, and their gradients, which come
home. Both ends number them alike without a word, and a channel keeps its number when stages are added:

    devices of the sender    0 1 0 2 ..     in the order in which stages name them
    of the receiver          0 0 1 0 ..
    number of the pair       0 1 2 3 ..     (G. Cantor's: by the sum of the two, then by the receiver's)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from farspan.graph import Graph
from farspan.plan import RankDevices, Team, Worker, are_direct
from farspan.program.program import Channel

__all__ = ["Channels", "queues_of", "take_turns"]


class Channels:
    """The channels between the workers of teams.

    Args:
        teams: Who runs each stage.
        devices: What each rank has told about its devices.
    """

    def __init__(self, teams: Iterable[Team], devices: Sequence[RankDevices]) -> None:
        self._devices = devices
        self._device: dict[Worker, int] = {}
        """For each worker, how many other devices of its rank were named before it."""
        self._known: dict[tuple[Worker, Worker, bool, bool], Channel] = {}
        num_devices: dict[int, int] = {}
        for worker in [worker for team in teams for worker in team.members]:
            if worker not in self._device:
                self._device[worker] = num_devices.get(worker.rank, 0)
                num_devices[worker.rank] = self._device[worker] + 1

    @property
    def between_gpus(self) -> frozenset[Channel]:
        """Returns the channels asked for so far that go from one GPU to another."""
        return frozenset([channel for channel in self._known.values() if channel.is_between_gpus])

    def between(
        self, source: Worker, target: Worker, *, is_gradient: bool, of_parameters: bool = False
    ) -> Channel | None:
        """Returns the channel from one worker to another one; None where both are of one rank, which sends nothing."""
        if source.rank == target.rank:
            return None
        key = source, target, is_gradient, of_parameters
        channel = self._known.get(key)
        if channel is None:
            here, there = self._device[source], self._device[target]
            pair = (here + there) * (here + there + 1) // 2 + there
            number = 4 * pair + 2 * of_parameters + is_gradient
            channel = self._known[key] = Channel(source, target, number, are_direct(source, target, self._devices))
        return channel


def take_turns(graphs: Sequence[Graph], teams: Sequence[Team]) -> None:
    """Let the members of wide stages take the micro-batches of a step in turn, those that such a stage runs."""
    wide = {number for number, team in enumerate(teams) if team.is_wide}
    turn = 0
    for graph in graphs if wide else ():
        graph.turn = turn
        turn += any(segment.stage in wide for segment in graph.segments)


def queues_of(teams: Iterable[Team], num_ranks: int) -> dict[Worker, int]:
    """Returns for each worker which order of a schedule it runs.

    The first worker of a rank runs the rank's, further ones those after the orders of all ranks, as stages name them.
    """
    numbers: dict[Worker, int] = {}
    first: dict[int, Worker] = {}
    for worker in [worker for team in teams for worker in team.members]:
        if first.setdefault(worker.rank, worker) == worker:
            numbers[worker] = worker.rank
        elif worker not in numbers:
            numbers[worker] = num_ranks + len(numbers) - len(first)
    return numbers


def together(teams: Iterable[Team], queues: Mapping[Worker, int]) -> tuple[int, ...]:
    """Returns for each order of a schedule the least one of those that run each layer together with it; nothing where
    no stage is split.

    Args:
        teams: Who runs each stage.
        queues: As `queues_of` gives them.
    """
    least = list(range(max(queues.values(), default=-1) + 1))
    split = [[queues[worker] for worker in team.part_of if worker in queues] for team in teams if team.is_part]
    for members in split:  # a rank may be a member of several: all of those are together
        lowest, own = min(least[number] for number in members), {least[number] for number in members}
        least = [lowest if number in own else number for number in least]
    return tuple(least) if split else ()
