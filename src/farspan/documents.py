"""Reading files that people write (a plan, a cluster, a costed graph): every mistake is named by its file and key."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from farspan.errors import PlanError

__all__ = ["check_keys", "parse_json", "read_text"]


def read_text(path: str | os.PathLike[str], *, hint: str) -> str:
    """The text of a file.

    Raises:
        PlanError: It cannot be read; with `hint` as what to try.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(f"{os.fspath(path)} cannot be read.", why=f"{why}.", hint=hint) from None


def parse_json(text: str, source: str, *, object_of: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """The value of a JSON text.

    Args:
        text: JSON.
        source: What to call the text in errors: a file's path.
        object_of: Makes an object of its members, in their order.

    Raises:
        PlanError: It is no JSON; names the place.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{source} is not JSON: line {error.lineno}, column {error.colno}.",
            why=f"{error.msg}.",
            hint="look for a missing or a trailing comma there; JSON has no comments",
        ) from None


def check_keys(keys: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise if a key is not known.

    Raises:
        PlanError: It names the nearest key.
    """
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise PlanError(
                f'{where}: unknown key "{key}".',
                why=f"the keys here are {', '.join(known)}.",
                hint=f'"{near[0]}"' if near else "take the key out",
            )
