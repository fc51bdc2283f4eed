"""Finds the first recorded call at which the ranks' programs differ, and says it.

rank 0   embed   blocks.0   blocks.1   blocks.2
rank 1   embed   blocks.0   flush                   -> rank 0 blocks.1 / ranks 1, 2 flush
rank 2   embed   blocks.0   flush
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from farspan.control.text import clip_head, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["HINT", "Entry", "History", "describe_difference", "describe_ended", "first_difference", "history_to_json"]

_log = logging.getLogger(__name__)
Entry = tuple[int, str] | tuple[int, str, str]
History = list[Entry]
"""The actions of a rank in one step, in order: (digest, description), and perhaps what to try where it differs."""

HINT = (
    "make every rank run the same Python: same branches, same batches, same order;\n"
    "rank-dependent code may only read values after optimizer.step()"
)
_ENDS = "ends here (step begins)"
_MAX_VARIANTS = 4
_MAX_DESCRIPTION = 240


def first_difference(histories: Sequence[History]) -> int | None:
    """Returns the first index whose digests are not all the same, counting an ended history as different."""
    for index in range(max(map(len, histories), default=0)):
        digests = {history[index][0] if index < len(history) else None for history in histories}
        if len(digests) > 1:
            return index
    return None


def describe_difference(
    starts: Mapping[int, tuple[int, int]], histories: Mapping[int, History]
) -> tuple[str, str, str]:
    """Returns what differs and where, as (what, why, hint).

    Args:
        starts: For each rank involved: (step, digest) that it announced.
        histories: For each rank that answered: what it recorded in that step.
    """
    full = {rank: histories.get(rank, []) for rank in starts}
    steps = {step for step, _ in starts.values()}
    index = first_difference(list(full.values()))
    variants: dict[tuple[object, ...], list[int]] = {}
    texts: dict[tuple[object, ...], str] = {}
    hints: list[str] = []
    for rank in sorted(starts):
        step, digest = starts[rank]
        entry: Entry | None = None
        if index is None:
            text = f"digest {digest:#x}, but its recorded calls read the same"
        elif index < len(full[rank]):
            entry = full[rank][index]
            text = clip_head(entry[1], _MAX_DESCRIPTION)
            hints += entry[2:3] if len(entry) > 2 and entry[2] else ()
        else:
            text = _ENDS
        key: tuple[object, ...] = (entry[0] if entry else text,)
        if len(steps) > 1:
            key, text = (step, *key), f"step {step}: {text}"
        variants.setdefault(key, []).append(rank)
        texts.setdefault(key, text)
    if len(steps) > 1:
        what = "the ranks' programs differ: they begin steps " + ", ".join(map(str, sorted(steps))) + " together"
    else:
        what = f"the ranks' programs differ at step {min(steps)}"
    lines = [f"{name_ranks(ranks)}: {texts[key]}" for key, ranks in variants.items()]
    if len(lines) > _MAX_VARIANTS:
        lines[_MAX_VARIANTS - 1 :] = [f"and {len(lines) - _MAX_VARIANTS + 1} other variants"]
    return what, "\n".join(lines), HINT if HINT in hints or not hints else hints[0]


def describe_ended(
    ended: Sequence[int], waiting: Mapping[int, tuple[int, int]], histories: Mapping[int, History]
) -> tuple[str, str]:
    """Describes, as (what, why), that some ranks have ended their program while others begin a step."""
    step = min(step for step, _ in waiting.values())
    verb, program = ("has", "its program") if len(ended) == 1 else ("have", "their programs")
    verb_waiting = "waits" if len(waiting) == 1 else "wait"
    what = f"{name_ranks(ended)} {verb} ended {program}, {name_ranks(waiting)} {verb_waiting} in step {step}"
    last = [history[-1][1] for _, history in sorted(histories.items()) if history]
    if last:
        what += f" at {clip_head(last[0], _MAX_DESCRIPTION)}"
    return what, f"a step needs every rank, and {name_ranks(ended)} will not begin step {step}"


def history_to_json(history: Callable[[int], Sequence[Entry]] | None, step: int) -> bytes:
    """Returns the `history` of a step as it goes to the hub: bounded in number and length."""
    found: History = []
    try:
        for entry in history(step)[:_MAX_ENTRIES] if history else ():
            digest, words = int(entry[0]), clip_head(str(entry[1]), _MAX_SENT)
            found.append((digest, words, entry[2]) if len(entry) == 3 else (digest, words))
    except Exception as error:
        _log.exception("the history of step %s cannot be shown", step)
        found = [(-1, f"(its history cannot be shown: {error!r})")]
    return json.dumps(found).encode()


_MAX_SENT, _MAX_ENTRIES = 300, 200_000
