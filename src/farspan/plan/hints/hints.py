"""Hints: what a user wants of a plan, whatever else is best.

pins         "decoder.*" -> "rank:1"        lies there
together     ("embed", "head")              are on one stage
max_memory   14 GiB, or by rank             a device holds no more
stages       4                              so many, one on each rank
remat        ("blocks.*",)                  these are computed again, and nothing else is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from farspan.errors import PlanError, quoted
from farspan.plan import check
from farspan.plan.team import format_place, parse_place
from farspan.units import BYTES, format_bytes, parse_amount

__all__ = ["Hints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Wishes of the user for a plan that is yet to be found.

    Attributes:
        pins: Names of modules or parameters, or glob patterns of them, to "rank:R" or "rank:R/device". As in a plan, an
            exact name beats a pattern, of patterns the later wins, and what is said of a part beats what is said of the
            whole.
        together: Groups of names or patterns; all that those of a group mean lies on one stage.
        max_memory: The most that a device may hold, as bytes or a text ("14GiB"); or by rank ("rank:0").
        stages: How many stages; None for any number.
        remat: As of a plan: what is computed again; None where the search is to choose.

    Raises:
        PlanError: A place is none, a size is none, ...

    Example:
        >>> Hints(pins={"head": "rank:1"}, max_memory="14GiB")
        Hints(pins={'head': 'rank:1'}, together=(), max_memory=15032385536.0, stages=None, remat=None)
    """

    pins: Mapping[str, str] = field(default_factory=dict[str, str])
    together: Sequence[Sequence[str]] = ()
    max_memory: str | float | Mapping[str, str | float] | None = None
    stages: int | None = None
    remat: bool | Sequence[str] | None = None
    are_stages_given: bool = field(default=True, repr=False, compare=False)
    """Whether `stages` is the user's, and no consequence of the number of ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pins", _pins(self.pins))
        object.__setattr__(self, "together", _groups(self.together))
        if isinstance(self.max_memory, Mapping):
            sizes = {_rank(text): _size(size) for text, size in self.max_memory.items()}
            object.__setattr__(self, "max_memory", sizes)
        elif self.max_memory is not None:
            object.__setattr__(self, "max_memory", _size(self.max_memory))
        _check_stages(self.stages)
        if self.remat is not None:
            object.__setattr__(self, "remat", check.remat(self.remat))

    def __bool__(self) -> bool:
        return self != Hints()

    @property
    def are_about_places(self) -> bool:
        """Returns whether they say what may lie where."""
        return bool(self.pins or self.together or self.max_memory is not None)

    @property
    def patterns(self) -> list[str]:
        """Returns all names and patterns of what is to be placed, each once."""
        return list(dict.fromkeys([*self.pins, *(pattern for group in self.together for pattern in group)]))

    def memory_of(self, rank: int) -> float | None:
        """Returns the most that a rank's device may hold; None where nothing is said."""
        if isinstance(self.max_memory, Mapping):
            return cast("Mapping[str, float]", self.max_memory).get(f"rank:{rank}")
        return cast("float | None", self.max_memory)

    def over(self, others: Hints) -> Hints:
        """Returns these and `others`; these win where both say something.

        >>> Hints(pins={"a": "rank:0"}, stages=2).over(Hints(pins={"a": "rank:1", "b": "rank:1"}, stages=3)).pins
        {'b': 'rank:1', 'a': 'rank:0'}
        """
        kept = {name: place for name, place in others.pins.items() if name not in self.pins}
        return Hints(
            pins={**kept, **self.pins},
            together=(*others.together, *self.together),
            max_memory=others.max_memory if self.max_memory is None else self.max_memory,
            stages=others.stages if self.stages is None else self.stages,
            remat=others.remat if self.remat is None else self.remat,
        )

    def renumbered(self, ranks: Sequence[int]) -> Hints:
        """Returns the same for ranks in another order: `ranks[i]` becomes i.

        >>> Hints(pins={"head": "rank:2/cuda:0"}, max_memory={"rank:2": 8}).renumbered([2, 0, 1])
        Hints(pins={'head': 'rank:0/cuda:0'}, together=(), max_memory={'rank:0': 8.0}, stages=None, remat=None)
        """
        number = {rank: at for at, rank in enumerate(ranks)}

        def moved(text: str) -> str:
            place = parse_place(text)
            return format_place(replace(place, rank=number[place.rank]))

        pins = {name: moved(text) for name, text in self.pins.items()}
        memory = self.max_memory
        if isinstance(memory, Mapping):
            memory = {moved(text): size for text, size in memory.items() if parse_place(text).rank in number}
        return replace(self, pins=pins, max_memory=memory)

    def with_memory(self, times: float) -> Hints:
        """Returns the same with so many times the memory.

        >>> Hints(max_memory="1GiB").with_memory(2).max_memory
        2147483648.0
        """
        if isinstance(self.max_memory, Mapping):
            sizes = cast("Mapping[str, float]", self.max_memory)
            return replace(self, max_memory={text: times * size for text, size in sizes.items()})
        return replace(self, max_memory=None if self.max_memory is None else times * cast(float, self.max_memory))

    def with_rounded_memory(self) -> Hints:
        """Returns the same with the memory that `memory_in_words` says.

        >>> Hints(max_memory=2100).with_rounded_memory().max_memory
        2150.4
        """
        if isinstance(self.max_memory, Mapping):
            sizes = cast("Mapping[str, float]", self.max_memory)
            return replace(self, max_memory={text: format_bytes(size) for text, size in sizes.items()})
        return replace(self, max_memory=None if self.max_memory is None else format_bytes(cast(float, self.max_memory)))

    def memory_in_words(self) -> str:
        """Returns `max_memory` as the user writes it.

        >>> Hints(max_memory={"rank:0": 2**30}).memory_in_words()
        "max_memory={'rank:0': '1.0 GiB'}"
        """
        if isinstance(self.max_memory, Mapping):
            sizes = cast("Mapping[str, float]", self.max_memory)
            return f"max_memory={ {text: _in_words(size) for text, size in sizes.items()} }"
        return f"max_memory={_in_words(cast(float, self.max_memory))!r}"

    def said(self) -> dict[str, Hints]:
        """Yields each hint in words, with all hints but that one."""
        found: dict[str, Hints] = {
            f"{name!r} pinned to {place}": replace(
                self, pins={other: at for other, at in self.pins.items() if other != name}
            )
            for name, place in self.pins.items()
        }
        for number, group in enumerate(self.together):
            rest = (*self.together[:number], *self.together[number + 1 :])
            found[f"{' and '.join(map(repr, group))} together"] = replace(self, together=rest)
        if self.max_memory is not None:
            found[self.memory_in_words()] = replace(self, max_memory=None)
        if self.stages is not None and self.are_stages_given:
            found[f"stages={self.stages}"] = replace(self, stages=None)
        if self.remat is not None:
            found[f"remat={self.remat!r}"] = replace(self, remat=None)
        return found


def _check_stages(value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PlanError(
            f"stages={quoted(value)} is not a number of stages.",
            why="it is how many stages an automatic plan has: one for each rank, unless it says otherwise.",
            hint='stages=2, or "auto", or "wide"',
        )


def _pins(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _wrong("pins", value, 'names to places, {"decoder.*": "rank:1"}')
    found: dict[str, str] = {}
    for name, text in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str):
            raise _wrong("pins", name, 'names to places, {"decoder.*": "rank:1"}')
        try:
            found[name] = format_place(parse_place(cast(str, text)))
        except PlanError as error:
            raise PlanError(f"pins: {name!r}: {error.what}", why=error.why, hint=error.hint) from None
    return found


def _groups(value: object) -> tuple[tuple[str, ...], ...]:
    example = '[["embed", "head"]]'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong("together", value, example)
    return tuple(tuple(_texts(group, "together", example)) for group in cast("Sequence[object]", value))


def _texts(value: object, key: str, example: str) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    items = cast("Sequence[object]", value) if is_list else ()
    found = [item for item in items if isinstance(item, str)]
    if not found or len(found) < len(items):
        raise _wrong(key, cast(object, value), example)
    return found


def _rank(text: object) -> str:
    place = parse_place(cast(str, text))
    if place.device is not None:
        raise PlanError(
            f"max_memory: {text!r} is a device of a rank.",
            why="a rank has one stage, and so one device that a plan fills.",
            hint=f'max_memory={{"rank:{place.rank}": "14GiB"}}',
        )
    return format_place(place)


class _Size(float):
    """A size in bytes that was given as a text, which it is known by."""

    text: str


def _in_words(size: float) -> str:
    return size.text if isinstance(size, _Size) else format_bytes(size)


def _size(given: object) -> float:
    if isinstance(given, _Size):
        return given
    size = parse_amount(given, BYTES)
    if size is None or size <= 0:
        raise PlanError(
            f"max_memory={given!r} is no size.",
            why="a size is a positive number of bytes, or a text with one of the units B, KiB, MiB, GiB, TiB, GB, ...",
            hint='max_memory="14GiB", or max_memory={"rank:0": "14GiB"}',
        )
    if isinstance(given, str):
        size = _Size(size)
        size.text = given
    return size


def _wrong(key: str, value: object, expected: str) -> PlanError:
    return PlanError(
        f"{key}={value!r:.60} cannot be.", why=f"it is of type {type(value).__name__}.", hint=f"{key}={expected}"
    )
