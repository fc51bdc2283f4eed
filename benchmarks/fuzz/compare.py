"""What a program shows, and how two runs of it differ."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
TIMES = 100.0
"""How often the plain program's own distance from the float64 one a rounded difference may be."""
SHORTEST = 6
"""What is shorter of a message names nothing."""
_OF_TORCH = {*vars(nn.Module())}
_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one rank has seen: values that the loop recorded, and what is left at the end."""

    recorded: list[Any]
    state: dict[str, Any]
    attributes: dict[str, Any]
    generators: str
    printed: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run compares with the plain one.

    Attributes:
        kind: equal, wrong, printed (numbers are equal, printed lines are not), error (that docs/limits.md names),
            unnamed (another error of farspan), crash, hang, slow (not at its end on a busy machine).
        text: Where it differs first, or the first line of an error.
    """

    kind: str
    text: str = ""


def observed(train: Callable[..., Any], model: Any, printed: list[str]) -> Observed:
    """Trains, and takes down what there is to see."""
    recorded: list[Any] = []
    train(model, lambda name, value: recorded.append([name, data_of(value)]))
    return Observed(
        recorded=recorded,
        state={name: data_of(value) for name, value in model.state_dict().items()},
        attributes={
            f"{name}.{key}": data_of(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in _OF_TORCH and not key.startswith("_")
        },
        generators=repr(torch.get_rng_state().tolist()),
        printed=list(printed),
    )


def data_of(value: Any) -> Any:
    """A value as numbers, texts, lists and dictionaries; the names of classes for what is none of these."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "values": value.detach().tolist()}
    if isinstance(value, dict):
        return {str(key): data_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [data_of(item) for item in value]
    return value if isinstance(value, _SIMPLE) else type(value).__name__


def compare(plain: Observed, ranks: list[Observed], exact: Observed | None = None) -> Outcome:
    """The first difference of a rank from the plain program; with the float64 program's numbers, up to rounding."""
    allowed = _allowed(plain, exact) if exact else 0.0
    for rank, got in enumerate(ranks):
        for part in ("recorded", "state", "attributes", "generators"):
            wanted, found = getattr(plain, part), getattr(got, part)
            if repr(wanted) == repr(found):
                continue
            if exact and (part == "generators" or _distance(wanted, found) <= allowed):
                continue
            return Outcome(kind="wrong", text=f"rank {rank}, {part}: {first_difference(wanted, found)}")
    texts = ["".join(plain.printed), "".join(ranks[0].printed)]
    if exact:  # its numbers are those that have been recorded
        texts = [re.sub(r"\d+\.\d+(e[+-]\d+)?", "#", text) for text in texts]
    if texts[0] != texts[1]:
        count = texts[0].count("\n"), texts[1].count("\n")
        return Outcome(kind="printed", text=f"{count[0]} lines plainly, {count[1]} on rank 0")
    return Outcome(kind="equal")


def first_difference(wanted: Any, found: Any) -> str:
    """Where two structures differ first, in words."""
    if isinstance(wanted, dict) and isinstance(found, dict) and list(wanted) == list(found):
        name = next(key for key in wanted if repr(wanted[key]) != repr(found[key]))
        return f"{name}: {first_difference(wanted[name], found[name])}"
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)) and len(wanted) == len(found):
        number = next(i for i, item in enumerate(wanted) if repr(item) != repr(found[i]))
        return f"[{number}] {first_difference(wanted[number], found[number])}"
    return f"{str(wanted)[:60]} plainly, {str(found)[:60]}"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield float(value)


def _distance(one: Any, other: Any) -> float:
    """The largest difference of numbers, over the size of the number or 1; infinite where structures differ."""
    a, b = list(_numbers(one)), list(_numbers(other))
    if len(a) != len(b):
        return math.inf
    parts = [abs(x - y) / max(1.0, abs(x)) for x, y in zip(a, b, strict=True) if not (x != x and y != y)]
    return max((math.inf if part != part else part for part in parts), default=0.0)


def _allowed(plain: Observed, exact: Observed) -> float:
    parts = ("recorded", "state", "attributes")
    own = max(_distance(getattr(plain, part), getattr(exact, part)) for part in parts)
    return TIMES * max(own, torch.finfo(torch.float32).eps)


@functools.cache
def _named_errors() -> list[tuple[str, list[str]]]:
    """Of each row of docs/limits.md: the class, and parts of its message."""
    found: list[tuple[str, list[str]]] = []
    for line in LIMITS.read_text().splitlines():
        cells = line.replace("\\|", "/").split("|")
        if line.startswith("| ") and len(cells) > 3:
            kind, _, texts = cells[2].strip().partition(":")
            name = kind.split()[0].removesuffix("'s")
            parts = [text.strip() for text in re.split("[;,]", texts) if len(text.strip()) >= SHORTEST]
            found.append((name, parts or ([name] if name == "WholeError" else [])))
    return found


def outcome_of(error: BaseException) -> Outcome:
    """How a run that raised ended."""
    from farspan.errors import DeadlineError, FarspanError, RemoteError

    text = str(error).strip()
    first = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
    if isinstance(error, AssertionError) and "a rank hangs" in text:
        return Outcome(kind="hang", text=first)
    if isinstance(error, DeadlineError):
        return Outcome(kind="hang", text=first)
    remote = error.remote_traceback.strip().splitlines()[-1:] if isinstance(error, RemoteError) else []
    whole = "\n".join([type(error).__name__, text, *getattr(error, "__notes__", []), *remote])
    if any(part in whole for kind, texts in _named_errors() for part in texts if kind in whole):
        return Outcome(kind="error", text=first)
    return Outcome(kind="unnamed" if isinstance(error, FarspanError) else "crash", text=" / ".join([first, *remote]))
