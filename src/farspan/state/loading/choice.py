"""Chooses the checkpoints that may be loaded, the first one first: rank 0 finds them, and broadcasts what it finds."""

from __future__ import annotations

import json
import os
from typing import Any

from farspan.errors import CheckpointError
from farspan.execute.engine import Engine
from farspan.state.format import has_name_of_one, is_checkpoint, verify
from farspan.state.memory.folders import all_candidates, for_other_hosts, from_other_host, newest_of_all

__all__ = ["choices", "latest", "offer"]


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint in a folder of checkpoints: the folder to load; None if there is none yet.

    Checkpoints in memory (`farspan.save(..., memory=True)`) count as those on the disk do. It is what this process
    sees: while a save goes on, other ranks may see it earlier or later.

    Example:
        >>> import farspan
        >>> farspan.latest("no/such/folder") is None
        True
    """
    return newest_of_all(os.path.abspath(os.fspath(folder)))


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
        first = root if is_one else newest_of_all(root)
        if first is None:
            raise CheckpointError(
                f"there is no checkpoint in {root}.",
                why="it has no folder step-N.",
                hint="if farspan.latest(folder): farspan.load(folder, ...)",
            )
        others = [] if is_strict else all_candidates(os.path.dirname(root) if is_one else root)
        return [for_other_hosts(each) for each in dict.fromkeys([first, *others])]

    return [from_other_host(each) for each in _from_rank_0(engine, "checkpoints to load", find)]


def offer(engine: Engine, path: str, damaged: str) -> str | None:
    """Returns the newest checkpoint that is whole, beside a damaged one: all of it is read, on rank 0.

    Args:
        engine: This rank's.
        path: What was to be loaded: a checkpoint, or a folder of checkpoints.
        damaged: The checkpoint that is damaged.
    """

    def find() -> str | None:
        root = os.path.abspath(path)
        others = all_candidates(os.path.dirname(root) if root == damaged else root)
        return next((other for other in others if other != damaged and not verify(other)), None)

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
