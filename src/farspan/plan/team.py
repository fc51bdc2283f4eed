"""Who runs a stage: a team of workers, each a device of a rank.

place     "rank:1", "rank:1/cuda:0"     as people write it, in the form of torch's remote devices
worker    rank 1, "cuda:0"              what it stands for: one queue of work
team      (worker, ...)                 who runs a stage together; the first one is its leader
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from farspan.errors import PlanError, quoted
from farspan.units import MAX_COUNT

__all__ = ["Place", "Team", "Worker", "format_place", "parse_place"]

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
        """The kind of its device ("cuda")."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Team:
    """The workers that run a stage together; today there is one in each.

    Attributes:
        members: At least one, no two of them the same.
    """

    members: tuple[Worker, ...]

    def __contains__(self, rank: object) -> bool:
        """Whether a worker of that rank is a member."""
        return any(worker.rank == rank for worker in self.members)

    @property
    def leader(self) -> Worker:
        """The member that has what the stage holds."""
        return self.members[0]


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


def format_place(place: Place) -> str:
    """Write a place as a device string, the inverse of `parse_place`.

    >>> format_place(Place(rank=0, device="cpu"))
    'rank:0/cpu'
    """
    return f"rank:{place.rank}" if place.device is None else f"rank:{place.rank}/{place.device}"


def _hint(text: object) -> str:
    """The numbers the user wrote, in the right form."""
    rank, _, device = (text if isinstance(text, str) else quoted(text)).strip().lower()[:60].partition("/")
    number = re.search(r"(?<![0-9])[0-9]{1,4}(?![0-9])", rank)
    where = f"rank:{number[0]}" if number else "rank:0"
    kind = re.fullmatch(r"([a-z_]+)[: ]?([0-9]+)?", device)
    if kind:
        name = "cuda" if kind[1] == "gpu" else kind[1]
        return f'"{where}/{name}:{kind[2]}"' if kind[2] else f'"{where}/{name}"'
    if number is None and re.fullmatch(r"(cpu|cuda|xpu|mps)(:[0-9]+)?", rank):
        return f'"rank:0/{rank}"'
    return f'"{where}"  or  "{where}/cuda:0"'
