"""Finds the first recorded call at which the ranks' programs differ, and says it.

rank 0   embed   blocks.0   blocks.1   blocks.2
rank 1   embed   blocks.0   flush                   -> rank 0 blocks.1 / ranks 1, 2 flush
rank 2   embed   blocks.0   flush
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, NamedTuple

from farspan.control.text import clip_head, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = [
    "END_OF_STEP",
    "HINT",
    "NO_END",
    "Entry",
    "History",
    "ProgramEnd",
    "describe_difference",
    "describe_ended",
    "first_difference",
    "history_to_json",
]

_log = logging.getLogger(__name__)
Entry = tuple[int, str] | tuple[int, str, str] | tuple[int, str, str, str]
History = list[Entry]
"""The actions of a rank in one step, in order: (digest, description), and perhaps what to try where it differs, and the
line of the program's loop."""

HINT = (
    "make every rank run the same Python: same branches, same batches, same order;\n"
    "rank-dependent code may only read values after optimizer.step()"
)
ONE_RANK = (
    "is it under `if farspan.rank() == 0`, or another condition that is not the same on all ranks? Take it\n"
    "out from under it: all ranks run the model together, and printing and saving are rank 0's anyway"
)
MORE_OFTEN = (
    "are there as many batches on every rank? Let all go through the loop as often: the same loader on all ranks,\n"
    "or farspan.from_rank(0, batch)"
)
LEFT_THE_LOOP = (
    "does a rank leave the loop sooner: a break, return or sys.exit under a condition that is not the same on\n"
    "all ranks? Let all go through it as often: the same loader on all ranks, or farspan.from_rank(0, batch)"
)
AFTER_THE_END = (
    "is that line under `if farspan.rank() == 0`? Take it out from under it: all ranks run the model together, and\n"
    "printing and saving are rank 0's anyway. Is it in the loop? Let all go through it as often: the same loader\n"
    "on all ranks, or farspan.from_rank(0, batch)"
)
ALL_CALL = (
    "is that line under `if farspan.rank() == 0`, or another condition that is not the same on all ranks? Take it\n"
    "out from under it: every rank calls {call}; {writes}"
)
OTHER_THINGS = (
    "is one of these lines under `if farspan.rank() == 0`, or another condition that is not the same on all ranks?\n"
    "Take it out from under it: all ranks save, load a state and draw random numbers alike;\n"
    "only rank 0 writes what print and torch.save are given"
)
ORDER = (
    "the ranks do the same in another order: sort what the program goes through, for a set of strings (and what\n"
    "os.listdir gives) has another order in each process"
)
END_OF_STEP = "end of the step: "
_OF_THE_LOOP = (END_OF_STEP.rstrip(": "), "step()", "step(), with hooks,", "zero_grad()", "backward() at")
"""The beginnings of what a loop does besides calling its model."""
_ENDS = "ends here (step begins)"
_IS_OVER = f"{END_OF_STEP}the program is over"
_ALL_CALL = {
    "farspan.save": "each writes its own part",
    "farspan.load": "each reads its own part",
    "copy.deepcopy": "each copies its own part",
    "optimizer.zero_grad()": "each clears its own part of the gradients",
}
"""Calls that all ranks make together, and why."""
_CLEARED = ".grad = None, at "
"""In what `optimizer.zero_grad()` is noted as."""
_MAX_ENDS = 2
_MAX_VARIANTS = 4
_MAX_DESCRIPTION = 240


class ProgramEnd(NamedTuple):
    """Where the program of a rank has ended.

    Attributes:
        words: The call that has ended it, and its line; "" where it has come past its last line.
        last: Why the last steps ended and at which lines, the last one first.
    """

    words: str
    last: Sequence[str]

    def to_header(self) -> list[str]:
        """Returns it as it goes to the hub, of bounded length."""
        return [clip_head(text, _MAX_SENT) for text in (self.words, *self.last)]

    @classmethod
    def of(cls, sent: Sequence[str] | None) -> ProgramEnd:
        """Returns what a rank has sent, if it has."""
        return cls(sent[0], sent[1:]) if sent else NO_END


NO_END = ProgramEnd("", ())
"""Of a rank that has not said how its program has ended."""


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
    lines_of: dict[int, str] = {}
    is_without_hint: set[int] = set()
    is_at_end: set[int] = set()
    for rank in sorted(starts):
        step, digest = starts[rank]
        entry: Entry | None = None
        if index is None:
            text = f"digest {digest:#x}, but its recorded calls read the same"
        elif index < len(full[rank]):
            entry = full[rank][index]
            text = clip_head(entry[1], _MAX_DESCRIPTION)
            hints += entry[2:3] if len(entry) > 2 and entry[2] else ()
            if len(entry) > 3 and entry[3]:
                lines_of[rank] = entry[3]
            elif text.startswith(_OF_THE_LOOP):
                is_at_end.add(rank)
            elif not (len(entry) > 2 and entry[2]):
                is_without_hint.add(rank)
        else:
            text = _ENDS
            is_at_end.add(rank)
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
    if index is not None and _are_permutations(list(full.values())):
        return what, "\n".join(lines), ORDER
    if len(set(lines_of.values())) > 1 and len(lines_of) == len(starts):
        return what, "\n".join([*lines, f"{_name_lines(lines_of)}."]), ONE_RANK
    if index is not None and is_at_end.isdisjoint(starts):
        next_lines = {rank: _next_line(history, index) for rank, history in full.items()}
        if len(set(next_lines.values())) > 1 and all(next_lines.values()):
            return what, "\n".join([*lines, f"{_name_lines(next_lines)}."]), ONE_RANK
    if lines_of and is_at_end and is_at_end == starts.keys() - lines_of.keys():
        before = {entry[3] for rank in is_at_end for entry in full[rank] if len(entry) > 3}
        if before.isdisjoint(lines_of.values()):
            return what, "\n".join([*lines, f"only {_name_lines(lines_of)}."]), ONE_RANK
        return what, "\n".join([*lines, f"{_name_lines(lines_of)} more often than the others."]), MORE_OFTEN
    if len(texts) > 1 and any(_IS_OVER in text for text in texts.values()):
        return what, "\n".join(lines), LEFT_THE_LOOP
    if is_without_hint and hints:  # what one does, and no other, is not what the hints are about
        return what, "\n".join(lines), OTHER_THINGS
    hint = HINT if HINT in hints or not hints else hints[0]
    return what, "\n".join(lines), hint if hints else _hint_of_some(texts.values()) or hint


def _next_line(history: History, index: int) -> str:
    """Returns the line of the loop that calls the model next, from an action on: one that draws, or clears a gradient,
    stands before it."""
    return next((entry[3] for entry in history[index:] if len(entry) > 3 and entry[3]), "")


def _name_lines(lines_of: Mapping[int, str]) -> str:
    """Returns which ranks have called the model at which lines of the loop."""
    ranks_at: dict[str, list[int]] = {}
    for rank, line in sorted(lines_of.items()):
        ranks_at.setdefault(line, []).append(rank)
    parts = [f"{name_ranks(ranks)} {{}}{line}" for line, ranks in ranks_at.items()]
    words = ["called the model at ", *["at "] * (len(parts) - 1)]
    return ", ".join([part.format(word) for part, word in zip(parts, words, strict=True)][:_MAX_VARIANTS])


def _are_permutations(histories: Sequence[History]) -> bool:
    """Returns whether all have done the same, in another order."""
    found = [sorted(entry[0] for entry in history) for history in histories]
    return bool(found[0]) and all(each == found[0] for each in found)


def describe_ended(
    ended: Mapping[int, ProgramEnd], waiting: Mapping[int, tuple[int, int]], histories: Mapping[int, History]
) -> tuple[str, str, str]:
    """Describes, as (what, why, hint), that some ranks have ended their program while others begin a step."""
    ranks = sorted(ended)
    step = min(step for step, _ in waiting.values())
    verb, program = ("has", "its program") if len(ranks) == 1 else ("have", "their programs")
    verb_waiting = "waits" if len(waiting) == 1 else "wait"
    what = f"{name_ranks(ranks)} {verb} ended {program}, {name_ranks(waiting)} {verb_waiting} in step {step}"
    last = [history[-1][1] for _, history in sorted(histories.items()) if history]
    if last:
        what += f" at {clip_head(last[0], _MAX_DESCRIPTION)}"
    why = f"a step needs every rank, and {name_ranks(ranks)} will not begin step {step}"
    known = [rank for rank in ranks if ended[rank] != NO_END]
    why += "".join(f".\n{_describe_end(rank, ended[rank])}" for rank in known[:_MAX_ENDS])
    lines_of = {rank: line for rank, history in histories.items() if (line := _first_line(history))}
    waits_at = {history[-1][1].removeprefix(END_OF_STEP) for history in histories.values() if history}
    if not waits_at.isdisjoint(place for rank in ranks for place in ended[rank].last):  # in the loop of the others
        return what, f"{why}.", LEFT_THE_LOOP
    if lines_of:
        return what, f"{why}.\n{_name_lines(lines_of)}.", AFTER_THE_END
    calls = {place.partition(",")[0] for place in waits_at}
    if any(call.endswith("step()") for call in calls):
        return what, why, LEFT_THE_LOOP
    return what, why, _hint_of_call(calls.pop()) if len(calls) == 1 else ""


def _hint_of_some(texts: Collection[str]) -> str:
    """Returns what to try where one of `texts`, but not each, is a call that all ranks make together."""
    for call in _ALL_CALL:
        is_call = [text.startswith(call) or (call == "optimizer.zero_grad()" and _CLEARED in text) for text in texts]
        if any(is_call) and not all(is_call):
            return _hint_of_call(call)
    return ""


def _hint_of_call(call: str) -> str:
    """Returns what to try where some ranks alone have made a call that all make together."""
    name = next((each for each in _ALL_CALL if call.startswith(each)), "")
    return ALL_CALL.format(call=name, writes=_ALL_CALL[name]) if name else ""


def _describe_end(rank: int, end: ProgramEnd) -> str:
    """Returns where a rank's program has ended, as far as that is known."""
    how = f"rank {rank} has called {end.words}" if end.words else f"rank {rank} has come past its program's last line"
    return f"{how},\nafter {end.last[0]}" if end.last else how


def _first_line(history: History) -> str:
    """Returns the line of the loop at which a rank has called the model first; "" if it has not."""
    return next((entry[3] for entry in history if len(entry) > 3 and entry[3]), "")


def history_to_json(history: Callable[[int], Sequence[Entry]] | None, step: int) -> bytes:
    """Returns the `history` of a step as it goes to the hub: bounded in number and length."""
    found: History = []
    try:
        for entry in history(step)[:_MAX_ENTRIES] if history else ():
            digest, words = int(entry[0]), clip_head(str(entry[1]), _MAX_SENT)
            more = [clip_head(str(each), _MAX_HINT) for each in entry[2:]]
            found.append((digest, words, *more))  # type: ignore[arg-type]
    except Exception as error:
        _log.exception("the history of step %s cannot be shown", step)
        found = [(-1, f"(its history cannot be shown: {error!r})")]
    return json.dumps(found).encode()


_MAX_SENT, _MAX_HINT, _MAX_ENTRIES = 300, 600, 200_000
