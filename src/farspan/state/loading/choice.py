"""Chooses the checkpoints that may be loaded, the first one first: rank 0 finds them, and broadcasts what it finds."""

from __future__ import annotations

import json
import os
from typing import Any

from farspan.errors import CheckpointError
from farspan.execute.engine import Engine
from farspan.state.format import candidates, has_name_of_one, is_checkpoint, newest, verify

__all__ = ["choices", "latest", "offer"]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint in a folder of checkpoints: the folder to load; None if there is none yet.

    It is what this process sees: while a save goes on, other ranks may see it earlier or later.

    Example:
        >>> import farspan
        >>> farspan.latest("no/such/folder") is None
        True
    """
    return newest(os.path.abspath(os.fspath(folder)))


def choices(engine: Engine, path: str, *, is_strict: bool) -> list[str]:
    """Returns the checkpoints to try.

    Args:
        engine: This rank's.
        path: A checkpoint, or a folder of checkpoints.
        is_strict: Whether only the first one counts.

    Raises:
        CheckpointError: There is none; the same on every rank.
    """

    def find() -> list[str]:
        root = os.path.abspath(path)
        is_one = is_checkpoint(root) or has_name_of_one(root)
        first = root if is_one else newest(root)
        if first is None:
            raise CheckpointError(
                f"there is no checkpoint in {root}.",
                why="it has no folder step-N.",
                hint="if farspan.latest(folder): farspan.load(folder, ...)",
            )
        if is_strict:
            return [first]
        return list(dict.fromkeys([first, *candidates(os.path.dirname(root) if is_one else root)]))

    return _from_rank_0(engine, "checkpoints to load", find)


def offer(engine: Engine, damaged: str) -> str | None:
    """Returns the newest checkpoint beside a damaged one that is whole: all of it is read, on rank 0."""

    def find() -> str | None:
        others = (path for path in candidates(os.path.dirname(damaged)) if path != damaged)
        return next((path for path in others if not verify(path)), None)

    return _from_rank_0(engine, "a checkpoint that is whole", find)


def _from_rank_0(engine: Engine, what: str, find: Any) -> Any:
    """Returns on every rank what `find` gives on rank 0, as JSON. Its error is raised on every rank."""
    said: dict[str, Any] = {}
    agreement = engine.agreement_of_all
    if agreement.side.rank == 0:
        try:
            said["found"] = find()
        except CheckpointError as error:
            said["error"] = [error.what, error.why, error.hint]
        except OSError as error:
            said["error"] = [f"{error.filename} cannot be read.", f"{error.strerror}.", ""]
    said = json.loads(agreement.broadcast(what, json.dumps(said).encode(), 0))
    if "error" in said:
        what, why, hint = said["error"]
        raise CheckpointError(what, why=why, hint=hint)
    return said["found"]
