"""Who is late, where it is, and whether it waits for yet another rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farspan.runtime.side.text import deadline_error, place_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.errors import DeadlineError
    from farspan.runtime.side.wire import Header

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
        """Where the program of another rank is now: the stack of its thread, for people."""
        return _place_in(rank, self._ask({"t": "stack", "to": rank}, _STACK_S))

    def behind(self, rank: int) -> tuple[list[int], str]:
        """Follow who waits for whom, from a late rank on.

        Returns:
            The ranks, that one first, each waiting for the next; and where the last of them is, for people.
        """
        ranks, place = list[int](), ""
        after: int | None = rank
        while after is not None and after not in ranks:
            ranks.append(after)
            answer = self._ask({"t": "stack", "to": after}, _STACK_S)
            place = _place_in(after, answer)
            after = self._waits_for(answer)
        return ranks, place

    def _waits_for(self, answer: Header | None) -> int | None:
        """The rank for which one waits that has answered where it is; None if for none but this one."""
        about: Header | None = answer["about"] if answer else None
        if about is None:
            return None
        waited_for: Any = about.get("rank")
        if waited_for is None:
            missing = (self._ask({"t": "status", **about}, _STATUS_S) or {"missing": []})["missing"]
            waited_for = missing[0] if missing else None
        is_rank = type(waited_for) is int and 0 <= waited_for < self._world_size and waited_for != self._rank
        return waited_for if is_rank else None

    def describe(self, deadline_s: float, to_do: str, about: Header) -> DeadlineError:
        """The error of this rank, which has waited too long.

        Args:
            deadline_s: How long.
            to_do: What the others have not done: "to begin step 3".
            about: What the hub is asked of them: whose step, whose part of a gather.
        """
        status = self._ask({"t": "status", **about}, _STATUS_S)
        late: list[int] = status["here"][:_MAX_STACKS] if status else []
        places = [self.place_of(rank) for rank in late if rank != self._rank]
        return deadline_error(self._rank, deadline_s, to_do, status, places)


def _place_in(rank: int, answer: Header | None) -> str:
    return place_of(rank, str(answer["stack"]) if answer else "")
