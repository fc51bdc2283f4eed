"""Checks that values make a plan: they may come from a file that a person edited, so every mistake is named by its
key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeGuard, cast

from farspan.documents import MAX_AMOUNT
from farspan.errors import PlanError, quoted
from farspan.plan.team import format_places, is_split, parse_places
from farspan.schedule import SCHEDULES
from farspan.units import MAX_COUNT

__all__ = [
    "estimates",
    "gradient_reduction",
    "lookahead",
    "micro_batches",
    "placement",
    "remat",
    "schedule",
    "stages",
    "tensor_layouts",
]

LAYOUTS = ("column", "row", "sequence", "vocab", "whole")
"""How a matrix of a split stage may be asked to lie on its members."""


def stages(value: object) -> tuple[str, ...]:
    """Returns the device strings, in their one spelling; at least one."""
    if not isinstance(value, (list, tuple)):
        raise _wrong("stages", value, 'a list of device strings such as ["rank:0", "rank:1"]')
    if not value:
        raise PlanError(
            "the plan is empty.",
            why='"stages" lists none.',
            hint='Plan.from_mapping({"": "rank:0"}) puts the whole model on rank 0',
        )
    if len(cast("Sequence[object]", value)) > MAX_COUNT:
        raise PlanError("the plan has too many stages.", why=f"at most {MAX_COUNT} are read.", hint="fewer stages")
    places: list[str] = []
    for text in cast("Sequence[object]", value):
        if not isinstance(text, str):
            raise _wrong("stages", text, 'device strings such as "rank:0"')
        try:
            places.append(format_places(parse_places(text), is_split=is_split(text)))
        except PlanError as error:
            raise PlanError(f'"stages": {error.what}', why=error.why, hint=error.hint) from None
    return tuple(places)


def placement(value: object, num_stages: int) -> dict[str, int]:
    """Returns a copy of the names and their stages; at least one, in their order."""
    if not isinstance(value, Mapping):
        raise _wrong("placement", value, 'names to stages such as {"embed": 0, "blocks.*": 1}')
    owners: dict[str, int] = {}
    for name, stage in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str):
            raise _wrong("placement", name, "names of modules or parameters")
        if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < num_stages:
            has = "is stage 0 only" if num_stages == 1 else f"are stages 0 to {num_stages - 1}"
            raise PlanError(
                f'"placement": "{name}" is on {quoted(stage)}, which is no stage.',
                why=f'a stage is an index into "stages": there {has}.',
                hint=f'"{name}": {num_stages - 1}  or another place in "stages"',
            )
        owners[name] = stage
    if not owners:
        raise PlanError("the plan is empty.", why='"placement" names nothing.', hint='"placement": {"": 0}')
    return owners


def schedule(value: object) -> None:
    """A name in `SCHEDULES`."""
    if not isinstance(value, str) or value not in SCHEDULES:
        near = difflib.get_close_matches(quoted(value).lower(), SCHEDULES, n=1, cutoff=0.3)
        raise PlanError(
            f'"schedule" cannot be {quoted(value)}.',
            why=f"the schedules are {', '.join(SCHEDULES)}.",
            hint=f'"schedule": "{near[0] if near else SCHEDULES[0]}"',
        )


def gradient_reduction(value: object) -> None:
    """Returns the name, which must be one of the two ways."""
    if value not in ("exact", "sum"):
        raise _wrong("gradient_reduction", value, '"exact", as in one process, or "sum", which sends less')


def tensor_layouts(value: object) -> dict[str, str]:
    """Returns a copy of the names and their layouts, in their order."""
    if not isinstance(value, Mapping):
        raise _wrong("tensor_layouts", value, 'names to layouts such as {"lm_head": "vocab"}')
    found: dict[str, str] = {}
    for name, layout in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str):
            raise _wrong("tensor_layouts", name, "names of modules or parameters")
        if not isinstance(layout, str) or layout not in LAYOUTS:
            near = difflib.get_close_matches(quoted(layout).lower(), LAYOUTS, n=1, cutoff=0.3)
            raise PlanError(
                f'"tensor_layouts": "{name}" cannot be {quoted(layout)}.',
                why=f"a matrix is split in one of the ways {', '.join(LAYOUTS[:-1])}, or is {LAYOUTS[-1]}.",
                hint=f'"{name}": "{near[0] if near else LAYOUTS[0]}"',
            )
        found[name] = layout
    return found


def lookahead(value: object) -> None:
    """A count."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise _wrong("lookahead", value, f"a number of micro-batches, from 0 to {MAX_COUNT}")


def micro_batches(value: object) -> None:
    """Raise unless it is a number of micro-batches."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise _wrong("micro_batches", value, f"a number of micro-batches, from 1 to {MAX_COUNT}")


def remat(value: object) -> bool | tuple[str, ...]:
    """Returns all, nothing, or a copy of the names; no names are nothing."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)):
        raise _wrong("remat", value, 'true, false, or a list of names of modules such as ["blocks.*"]')
    names: list[str] = []
    for name in cast("Sequence[object]", value):
        if not isinstance(name, str):
            raise _wrong("remat", name, 'names of modules such as ["blocks.*"]')
        names.append(name)
    return tuple(names) or False


def estimates(value: object, num_stages: int) -> dict[str, tuple[float, ...]]:
    """Returns a copy of the rows, each of one number from 0 per stage."""
    if not isinstance(value, Mapping):
        raise _wrong("estimates", value, "names to one number per stage")
    rows: dict[str, tuple[float, ...]] = {}
    for name, row in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not name.strip():
            raise _wrong("estimates", name, "names to one number per stage")
        numbers = tuple(number for number in row if _is_number(number)) if _is_row(row) else ()
        if not _is_row(row) or not len(numbers) == len(row) == num_stages:
            raise _wrong(f"estimates.{name}", row, f"{num_stages} numbers, one per stage; or leave it out")
        rows[name] = numbers
    return rows


def _is_row(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, (list, tuple))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_AMOUNT


def _wrong(key: str, value: object, expected: str) -> PlanError:
    return PlanError(
        f'"{key}" cannot be {quoted(value)}.',
        why="such a text means nothing here." if isinstance(value, str) else f"it is of type {type(value).__name__}.",
        hint=f'"{key}": {expected}',
    )
