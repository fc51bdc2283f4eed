"""A stage is run by a team of workers, each a device of a rank.

place     "rank:1", "rank:1/cuda:0"     as people write it, in the form of torch's remote devices
places    "rank:0+rank:1"               of a wide stage: its members take micro-batches in turn
          "rank:0&rank:1"               of a split stage: its members run each layer together
worker    rank 1, "cuda:0"              what it stands for: one queue of work
team      (worker, ...)                 who runs a stage
home      stage of one member           who owns what a wide stage uses
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farspan.errors import PlanError, quoted
from farspan.units import MAX_COUNT

__all__ = [
    "Homes",
    "Place",
    "RankDevices",
    "Team",
    "Worker",
    "are_direct",
    "format_place",
    "format_places",
    "is_split",
    "parse_place",
    "parse_places",
]

_PLACE = re.compile(r"rank:([0-9]{1,9})(?:/([a-z][a-z_]{0,30}(?::[0-9]{1,4})?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank, and a device of that rank.

    Attributes:
        rank: From 0, below `MAX_COUNT`.
        device: As `torch.device` takes it ("cuda:0", "cpu"); None for the rank's own choice.
    """

    rank: int
    device: str | None = None

    def __str__(self) -> str:
        return format_place(self)


@dataclass(frozen=True, slots=True)
class Worker:
    """A device of a rank, which does one piece of work after the other.

    Attributes:
        rank: From 0.
        device: As torch writes it ("cuda:0", "cpu").
    """

    rank: int
    device: str

    @property
    def device_type(self) -> str:
        """The type of its device ("cpu"), as torch names it."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevices:
    """The devices of a rank, as it has told them.

    Attributes:
        own: Where it computes unless it is told otherwise.
        backend: What carries tensors from one of its devices to that of another rank ("nccl"); "" for the host.
        ids: The device behind each of its accelerators, by index: two ranks may share one, or number them otherwise.
    """

    own: str = "cpu"
    backend: str = ""
    ids: tuple[str, ...] = ()

    def id_of(self, device: str) -> str:
        """The device that the rank calls so; "" for its CPU."""
        kind, _, index = device.partition(":")
        number = int(index or 0)
        return self.ids[number] if kind != "cpu" and number < len(self.ids) else ""


def are_direct(source: Worker, target: Worker, devices: Sequence[RankDevices]) -> bool:
    """Returns whether tensors go from the memory of one worker's device to that of the other's, and not by the host's:
    two ranks that share a device cannot.

    Args:
        source: One of them.
        target: The other one, of another rank.
        devices: Of each rank.
    """
    if max(source.rank, target.rank) >= len(devices):
        return False
    here, there = devices[source.rank], devices[target.rank]
    ids = here.id_of(source.device), there.id_of(target.device)
    return bool(here.backend) and here.backend == there.backend and all(ids) and ids[0] != ids[1]


@dataclass(frozen=True, slots=True)
class Team:
    """The workers that run a stage: one, or several that take micro-batches in turn.

    Attributes:
        members: At least one, no two of them the same.
        part_of: The members of a split stage, of which this is one, with its share of each layer: it owns nothing.
    """

    members: tuple[Worker, ...]
    part_of: tuple[Worker, ...] = ()

    def __contains__(self, rank: object) -> bool:
        """Returns whether a worker of that rank is a member."""
        return any(worker.rank == rank for worker in self.members)

    @property
    def is_part(self) -> bool:
        """Returns whether it is one member of a split stage."""
        return bool(self.part_of)

    @property
    def leader(self) -> Worker:
        """The first member."""
        return self.members[0]

    @property
    def is_wide(self) -> bool:
        """Returns whether several members take micro-batches in turn."""
        return len(self.members) > 1

    @property
    def owns(self) -> bool:
        """Returns whether parameters and values of the program may lie on the stage."""
        return len(self.members) == 1 and not self.is_part

    def member(self, turn: int) -> Worker:
        """Returns the worker that runs the stage in the micro-batch of this turn."""
        return self.members[turn % len(self.members)]


class Homes:
    """The stages that own parameters and buffers, all of one member: behind those of a plan the members of wide ones.

        stage 0   rank:0+rank:1   w0 (4 MB)  w1 (3 MB)  w2 (2 MB)  w3 (1 MB)
        owners                    rank 0     rank 1     rank 1     rank 0

    Every parameter has one owner, so gradients, clipping, hooks, `state_dict` and optimizers mean what they mean on a
    stage of one rank, and what an optimizer keeps is divided too. The same holds for split stages.

    Attributes:
        teams: Who runs each stage: those of the plan, and behind them the members of wide ones.
        first: For each stage the one that has the buffers used on it: itself, or that of its first member.
        owner: Stage that owns each parameter.

    Args:
        teams: Who runs each stage of a plan.
        stage_of: Stage of the plan for each parameter, in the model's order.
        size_bytes: Of each parameter.
    """

    def __init__(self, teams: Sequence[Team], stage_of: Mapping[str, int], size_bytes: Mapping[str, int]) -> None:
        self.teams = list(teams)
        self._of_member: dict[Worker, int] = {}
        self.first = [self._home_of(team.leader) if team.is_wide else stage for stage, team in enumerate(teams)]
        loads = [[0] * len(team.members) for team in teams]
        self.owner = dict(stage_of)
        wide = [name for name, stage in stage_of.items() if teams[stage].is_wide]
        for name in sorted(wide, key=lambda name: -size_bytes[name]):  # the largest first: what is small fills up
            members, load = teams[stage_of[name]].members, loads[stage_of[name]]
            number = load.index(min(load))
            load[number] += size_bytes[name]
            self.owner[name] = self._home_of(members[number])
        self.first += range(len(self.first), len(self.teams))

    def _home_of(self, worker: Worker) -> int:
        if worker not in self._of_member:
            self._of_member[worker] = len(self.teams)
            self.teams.append(Team((worker,)))
        return self._of_member[worker]


def parse_place(text: str | int) -> Place:
    """Read a device string, or the number of a rank (as in the `device_map` of transformers).

    Raises:
        PlanError: It is neither of the form "rank:R" or "rank:R/device" nor a number from 0.

    >>> parse_place("rank:1/cuda:0")
    Place(rank=1, device='cuda:0')
    >>> parse_place(1)
    Place(rank=1, device=None)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        rank, device = text, None
    else:
        match = _PLACE.fullmatch(text) if isinstance(text, str) else None
        rank, device = (int(match[1]), match[2]) if match else (-1, None)
    if not 0 <= rank < MAX_COUNT or (device or "").partition(":")[0] == "gpu":
        raise PlanError(
            f"{quoted(text)} is not a place for a stage.",
            why='a place is a rank, or a rank and a device of it, in the form "rank:R" or "rank:R/device".'
            + (f"\nR is at most {MAX_COUNT - 1}." if rank >= MAX_COUNT else ""),
            hint=_hint(text),
        )
    return Place(rank=rank, device=device)


def parse_places(text: str | int) -> tuple[Place, ...]:
    """Read the place of a stage, or those of a wide or split one, which have "+" or "&" between them.

    Raises:
        PlanError: One of them is no place, or is named twice; or there are both signs.

    >>> parse_places("rank:0+rank:1/cpu")
    (Place(rank=0, device=None), Place(rank=1, device='cpu'))
    """
    if not isinstance(text, str) or not ("+" in text or "&" in text):
        return (parse_place(text),)
    if "+" in text and "&" in text:
        raise PlanError(
            f"{quoted(text)} has both + and &.",
            why='members of a stage take micro-batches in turn ("+") or run each layer together ("&").',
            hint='"rank:0&rank:1"  or  "rank:0+rank:1"',
        )
    places = tuple([parse_place(part) for part in text.split("&" if is_split(text) else "+")])
    again = next((place for number, place in enumerate(places) if place in places[:number]), None)
    if again is not None:
        raise PlanError(
            f"{quoted(text)} names '{format_place(again)}' twice.",
            why="each member of a stage has one share of its work.",
            hint=f'"{format_places(tuple(dict.fromkeys(places)), is_split=is_split(text))}"',
        )
    return places


def is_split(text: str | int) -> bool:
    """Returns whether the members of a stage, as people write them, run each layer together."""
    return isinstance(text, str) and "&" in text


def format_places(places: tuple[Place, ...], *, is_split: bool = False) -> str:
    """Write the places of a stage, the inverse of `parse_places`.

    >>> format_places((Place(rank=0), Place(rank=1)))
    'rank:0+rank:1'
    """
    return ("&" if is_split else "+").join(map(format_place, places))


def format_place(place: Place) -> str:
    """Write a place as a device string, the inverse of `parse_place`.

    >>> format_place(Place(rank=0, device="cpu"))
    'rank:0/cpu'
    """
    return f"rank:{place.rank}" if place.device is None else f"rank:{place.rank}/{place.device}"


def _hint(text: object) -> str:
    """Returns the numbers the user wrote, in the right form."""
    rank, _, device = (text if isinstance(text, str) else quoted(text)).strip().lower()[:60].partition("/")
    number = re.search(r"(?<![0-9])[0-9]{1,4}(?![0-9])", rank)
    where = f"rank:{number[0]}" if number else "rank:0"
    kind = re.fullmatch(r"([a-z_]+)[: ]?([0-9]+)?", device)
    if kind:
        name = "cuda" if kind[1] == "gpu" else kind[1]  # what most people mean by it
        return f'"{where}/{name}:{kind[2]}"' if kind[2] else f'"{where}/{name}"'
    if number is None and re.fullmatch(r"(cpu|cuda|xpu|mps)(:[0-9]+)?", rank):
        return f'"rank:0/{rank}"'
    return f'"{where}"  or  "{where}/cuda:0"'
