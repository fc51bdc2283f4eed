"""A plan as JSON for people: stable, one placement per line, every mistake named by its key.

Reading here ends with the keys: that the values make a plan is checked where the plan is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from farspan.documents import as_object, check_keys, parse_json
from farspan.errors import PlanError, quoted

__all__ = ["FORMAT", "read", "write"]

FORMAT = "farspan-plan/1"
_REQUIRED = ("format", "stages", "placement")
_KEYS = (
    "format",
    "stages",
    "schedule",
    "lookahead",
    "remat",
    "micro_batches",
    "gradient_reduction",
    "placement",
    "tensor_layouts",
    "estimates",
)


def write(
    *,
    stages: Sequence[str],
    placement: Mapping[str, int],
    schedule: str,
    lookahead: int,
    remat: bool | Sequence[str],
    micro_batches: int,
    gradient_reduction: str,
    tensor_layouts: Mapping[str, str],
    estimates: Mapping[str, Sequence[float]],
) -> str:
    """Returns a plan's fields as JSON text that ends with a newline."""
    members = [
        ("format", json.dumps(FORMAT)),
        ("stages", _block("[]", [json.dumps(text) for text in stages])),
        ("schedule", json.dumps(schedule)),
        ("lookahead", json.dumps(lookahead)),
        *([("remat", json.dumps(remat))] if remat else []),
        *([("micro_batches", json.dumps(micro_batches))] if micro_batches > 1 else []),
        *([("gradient_reduction", json.dumps(gradient_reduction))] if gradient_reduction != "exact" else []),
        ("placement", _block("{}", [f"{json.dumps(name)}: {stage}" for name, stage in placement.items()])),
    ]
    if tensor_layouts:
        lines = [f"{json.dumps(name)}: {json.dumps(layout)}" for name, layout in tensor_layouts.items()]
        members.append(("tensor_layouts", _block("{}", lines)))
    if estimates:
        rows = [f"{json.dumps(name)}: {json.dumps(list(row))}" for name, row in estimates.items()]
        members.append(("estimates", _block("{}", rows)))
    return "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in members) + "\n}\n"


def read(text: str, source: str) -> dict[str, Any]:
    """Returns the values of a plan's JSON text, by key, without "format".

    Args:
        text: JSON.
        source: What to call the text in errors: a file's path.

    Raises:
        PlanError: It is no JSON, not this format, or a key is unknown, missing or there twice.
    """
    members = as_object(parse_json(text, source), source, hint=f'{{"format": "{FORMAT}", ...}}')
    if members.get("format", FORMAT) != FORMAT:
        raise PlanError(
            f'{source}: "format" is {quoted(members["format"])}.',
            why=f"this version of farspan reads {FORMAT!r} only.",
            hint="save the plan again: farspan.plan_of(model).save(path)",
        )
    check_keys(members, _KEYS, source)
    for key in _REQUIRED:
        if key not in members:
            raise PlanError(
                f'{source}: the key "{key}" is missing.',
                why="a plan needs " + ", ".join(_REQUIRED) + ".",
                hint=f'"format": "{FORMAT}"' if key == "format" else f'"{key}": ...',
            )
    del members["format"]
    return members


def _block(brackets: str, lines: Sequence[str]) -> str:
    return brackets[0] + "\n    " + ",\n    ".join(lines) + "\n  " + brackets[1]
