"""Applies hints to the units of one model: where each is pinned, and which units are one group.

units         pins                 together               groups
embed                               ("embed", "head")      embed, head
blocks.0       "blocks.*": rank:1                          blocks.0, blocks.1    pinned to one rank: on its one stage
blocks.1       "
head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farspan.errors import PlanError
from farspan.plan.diagnose import not_found
from farspan.plan.hints.hints import Hints
from farspan.plan.resolve import assign, matched, with_ancestors
from farspan.plan.team import Place, parse_place
from farspan.units import count_of

__all__ = ["Meaning", "meaning_of", "names_meant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Hints, applied to the units of one model.

    Attributes:
        places: Of each pinned unit the place of its group.
        groups: Units that must be on one stage, two or more, or pinned.
        whys: Of each unit that a hint speaks of, which, in words.
    """

    places: Mapping[str, Place]
    groups: tuple[tuple[str, ...], ...]
    whys: Mapping[str, str]

    @property
    def num_named(self) -> int:
        """Returns how many ranks there must be for the pins."""
        return max((place.rank + 1 for place in self.places.values()), default=0)


def names_meant(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Returns the outermost names that patterns match, each at least one.

    Args:
        patterns: Names and globs.
        names: Of modules and parameters.

    Raises:
        PlanError: A pattern matches no name.
    """
    nodes = with_ancestors(names)
    found: set[str] = set()
    for pattern in patterns:
        of_one = matched(pattern, nodes)
        if not of_one:
            raise _unknown(pattern, nodes)
        found.update(of_one)
    return found


def meaning_of(
    hints: Hints, units: Sequence[str], num_ranks: int, *, inseparable: Sequence[Sequence[str]] = ()
) -> Meaning:
    """Find out what `hints` mean.

    Args:
        hints: The user's.
        units: Names of what is placed as a whole.
        num_ranks: How many ranks there are.
        inseparable: Units that are on one stage anyway.

    Raises:
        PlanError: A pattern matches nothing, there is no such rank, or hints contradict each other.
    """
    _check_ranks(hints, num_ranks)
    nodes = with_ancestors(units)
    entries = assign({pattern: pattern for pattern in hints.pins}, nodes, lambda entry: _unknown(entry, nodes))
    pinned = {unit: entry for unit in units if (entry := entries[unit]) is not None}
    groups = _Groups(units)
    whys = {unit: f"pinned to {hints.pins[entry]} by {entry!r}" for unit, entry in pinned.items()}
    for patterns in hints.together:
        names = names_meant(patterns, nodes)
        inside = [unit for unit in units if any(_is_in(unit, name) for name in names)]
        groups.join(inside)
        why = f"together: {', '.join(map(repr, patterns))}"
        for unit in inside:
            whys[unit] = f"{whys[unit]}, and {why}" if unit in whys else why
    for units_of_one in inseparable:
        groups.join(units_of_one)
    by_rank: dict[int, list[str]] = {}
    for unit, entry in pinned.items():
        by_rank.setdefault(parse_place(hints.pins[entry]).rank, []).append(unit)
    for found in by_rank.values():
        groups.join(found)
    sets = groups.sets()
    places: dict[str, Place] = {}
    for group in sets:
        place = _place(hints, [(unit, pinned[unit]) for unit in group if unit in pinned])
        if place is not None:
            places |= dict.fromkeys(group, place)
    return Meaning(
        places=places,
        groups=tuple(tuple(group) for group in sets if len(group) > 1 or group[0] in places),
        whys=whys,
    )


def _check_ranks(hints: Hints, num_ranks: int) -> None:
    if hints.stages is not None and hints.stages > num_ranks:
        raise PlanError(
            f"stages={hints.stages} are more than there are devices.",
            why=f"there are {num_ranks}, and each has one stage in a plan that is searched.",
            hint=f"stages={num_ranks}",
        )
    for name, text in hints.pins.items():
        _check_rank(f"pins: {name!r}", text, hints.stages or num_ranks, num_ranks)
    for text in hints.max_memory if isinstance(hints.max_memory, Mapping) else ():
        _check_rank("max_memory", text, num_ranks, num_ranks)


def _check_rank(what: str, text: str, count: int, num_ranks: int) -> None:
    rank = parse_place(text).rank
    if rank >= count:
        has = f"stages={count} have" if rank < num_ranks else "there are"
        raise PlanError(
            f"{what}: there is no rank {rank}.",
            why=f"{has} {count_of(count, 'rank')}, counted from 0.",
            hint=f'"rank:{count - 1}"' + (f", or stages={rank + 1}" if rank < num_ranks else ""),
        )


def _place(hints: Hints, pinned: Sequence[tuple[str, str]]) -> Place | None:
    """Returns the place that a group is pinned to, from its units with their entries."""
    found: dict[Place, tuple[str, str]] = {}
    for unit, entry in pinned:
        found.setdefault(parse_place(hints.pins[entry]), (unit, entry))
    if len(found) == 2 and len({place.rank for place in found}) == 1:
        found = {place: of for place, of in found.items() if place.device is not None} or found
    if len(found) < 2:
        return next(iter(found), None)
    (one, (first, entry)), (two, (second, other)) = list(found.items())[:2]
    if one.rank == two.rank:
        why = f"rank {one.rank} has one stage in a plan that is searched, on one device."
    else:
        why = f"{first!r} and {second!r} have to be on one stage: they are together, or data flow both ways."
    raise PlanError(
        f"pins contradict each other: {first!r} to {one} ({entry!r}), {second!r} to {two} ({other!r}).",
        why=why,
        hint=f'"{other}": "{one}"' + ("" if one.rank == two.rank else ", or take one of them out of together"),
    )


def _unknown(pattern: str, nodes: Sequence[str]) -> PlanError:
    return not_found(
        pattern,
        nodes,
        f"the hint {pattern!r} matches nothing that can be placed.",
        "unit that can be placed by itself",
    )


def _is_in(unit: str, name: str) -> bool:
    return not name or unit == name or unit.startswith(f"{name}.")


class _Groups:
    """Sets of units, joined one by one."""

    def __init__(self, units: Sequence[str]) -> None:
        self._of = {unit: [unit] for unit in units}

    def join(self, units: Sequence[str]) -> None:
        for unit in units[1:]:
            first, second = self._of[units[0]], self._of[unit]
            if first is not second:
                first += second
                self._of |= dict.fromkeys(second, first)

    def sets(self) -> list[list[str]]:
        """Returns the groups in the order of their first units."""
        return list({id(group): group for group in self._of.values()}.values())
