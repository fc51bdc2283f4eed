"""Where a stage lies, written as torch writes remote devices: "rank:1", "rank:1/cuda:0", "rank:0/cpu"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from farspan.errors import PlanError, quoted
from farspan.units import MAX_COUNT

__all__ = ["Place", "format_place", "parse_place"]

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
