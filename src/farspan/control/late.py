"""Finds who is late, where it is, and whether it waits for yet another rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farspan.control.text import deadline_error, describe_silent_hub, place_of
from farspan.control.tree.numbers import ancestors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farspan.control.wire import Header
    from farspan.errors import DeadlineError

__all__ = ["LateRanks"]

_STATUS_S = 5.0
"""How long a late wait may take to ask the hub whom it waits for."""
_STACK_S = 2.0
"""How long a late rank may take to say where it is: its listener is at hand unless the process is stopped."""
_MAX_STACKS = 4


class LateRanks:
    """Asks the hub and other ranks about those that are late.

    Args:
        rank: This one.
        world_size: Of how many.
        ask: What the hub, or another rank's listener, answers at once (question, patience in s); None if it does not.
    """

    def __init__(self, rank: int, world_size: int, ask: Callable[[Header, float], Header | None]) -> None:
        self._rank, self._world_size, self._ask = rank, world_size, ask

    def place_of(self, rank: int) -> str:
        """Returns where the program of another rank is now: the stack of its thread, for people."""
        return self._place_in(rank, self._stack_of(rank))[1]

    def behind(self, rank: int) -> tuple[str, str]:
        """Follow who waits for whom, from a late rank on.

        Returns:
            For people: more words for a line that names that rank, "" if it waits for none; and who does not go on, and
            where that one is.
        """
        ranks, chain = [rank], ""
        while True:
            answer = self._stack_of(ranks[-1])
            if answer is None and not self._does_hub_answer():
                return f"{chain}{', and rank 0 does not answer' if ranks[-1] else ''}", describe_silent_hub(self._rank)
            after = self._waits_for(answer, ranks)
            if after is None:
                break
            ranks.append(after)
            chain += f", which waits for rank {after}"
        who, place = self._place_in(ranks[-1], answer)
        return chain, f"rank {who} does not go on: it is stopped, very slow, or cannot be reached.\n{place}"

    def _stack_of(self, rank: int) -> Header | None:
        return self._ask({"t": "stack", "to": rank}, _STACK_S)

    def _does_hub_answer(self) -> bool:
        return self._ask({"t": "status"}, _STACK_S) is not None

    def _place_in(self, rank: int, answer: Header | None) -> tuple[int, str]:
        """Returns who does not go on, a rank or one that passes on what is said to it; and where that one is, for
        people."""
        if answer is not None:
            return rank, place_of(rank, str(answer["stack"]))
        if not self._does_hub_answer():
            return 0, describe_silent_hub(self._rank)
        between = [each for each in ancestors(rank) if each not in {self._rank, *ancestors(self._rank)}]
        silent = next((each for each in between if self._stack_of(each) is None), rank)
        return silent, place_of(silent, "")

    def _waits_for(self, answer: Header | None, known: Sequence[int]) -> int | None:
        """Returns a rank for which one waits that has answered where it is; None if for none but this one and those
        known."""
        others = (each for each in self._waited_for(answer) if type(each) is int and 0 <= each < self._world_size)
        return next((each for each in others if each != self._rank and each not in known), None)

    def _waited_for(self, answer: Header | None) -> list[Any]:
        """Returns for whom one waits that has answered where it is."""
        about: Header | None = answer.get("about") if answer else None
        if about is None:
            return []
        if "rank" in about:
            return [about["rank"]]
        return (self._ask({"t": "status", **about}, _STATUS_S) or {"missing": []})["missing"]

    def describe(self, deadline_s: float, to_do: str, about: Header) -> DeadlineError:
        """Returns the error of this rank, which has waited too long.

        Args:
            deadline_s: How long.
            to_do: What the others have not done: "to begin step 3".
            about: What the hub is asked of them: whose step, whose part of a gather.
        """
        status = self._ask({"t": "status", **about}, _STATUS_S)
        late: list[int] = status["here"][:_MAX_STACKS] if status else []
        answers = {rank: self._stack_of(rank) for rank in late if rank != self._rank}
        places = dict.fromkeys(self._place_in(rank, answer)[1] for rank, answer in answers.items())
        waiting = [rank for rank, answer in answers.items() if self._rank in self._waited_for(answer)]
        return deadline_error(self._rank, deadline_s, to_do, status, [*places], waiting)
