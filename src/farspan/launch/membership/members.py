"""Decides, as a pure state machine, which ranks go on after a loss: a message or an end comes in, messages go out.

    a rank says        member   group, num_groups, needed_for    it has joined a group; why it cannot be done without
                       ready    state                 it has stopped at a place from which a new world can go on
                       store    where                 as the first of a new world: its store is there
    the ranks hear     lost     ranks, why            these will not come back
                       world    generation, ranks, states    all that are left are ready
                       store    where
                       over     why                   nothing can go on

A group of which a rank is lost is lost as a whole. The run goes on as long as one group is whole, if every rank has
said to which group it belongs. Where others have copies of what a rank has, it is a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Members", "Outgoing"]

Message = dict[str, Any]


class Outgoing(NamedTuple):
    """A message to some ranks."""

    ranks: Sequence[int]
    message: Message


class Members:
    """The ranks of one start, as far as the launcher knows them.

    Args:
        num_ranks: Number of ranks at the start.

    Attributes:
        gone: Ranks without which the run goes on: those of groups that are lost.
        over: Why nothing can go on any more; "" as long as something can.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.gone: set[int] = set()
        self.over = ""
        self._group_of: dict[int, int] = {}
        self._num_groups = 0
        self._needed_for: dict[int, str] = {}
        """Why nothing can go on without a rank."""
        self._left: set[int] = set()
        """Ranks whose program has ended well."""
        self._ready: dict[int, Any] = {}
        self._generation = 0

    @property
    def staying(self) -> list[int]:
        """Returns the ranks that are not lost and have not ended."""
        return [rank for rank in range(self.num_ranks) if rank not in self.gone | self._left]

    def hear(self, rank: int, message: Message) -> list[Outgoing]:
        """Takes what a rank says.

        Raises:
            KeyError, TypeError, ValueError: It is no message.
        """
        kind = message["is"]
        if kind == "member":
            self._group_of[rank], self._num_groups = int(message["group"]), int(message["num_groups"])
            self._needed_for[rank] = str(message.get("needed_for", ""))
        elif kind == "ready":
            if self.over:
                return [Outgoing([rank], {"is": "over", "why": self.over})]
            self._ready[rank] = message["state"]
            return self._form_world()
        elif kind == "store":
            return [Outgoing(self.staying, {"is": "store", "where": message["where"]})]
        return []

    def lose(self, rank: int, how: str) -> tuple[bool, list[Outgoing]]:
        """Takes the loss of a rank; returns whether the run goes on without it.

        Args:
            rank: Which.
            how: What has become of it, for people.
        """
        if rank in self.gone:
            return True, []
        reason = self._reason_against(rank)
        if reason:
            return False, self.end(f"rank {rank} {how}, and {reason}")
        mates = [other for other in range(self.num_ranks) if self._group_of[other] == self._group_of[rank]]
        self.gone.update(mates)
        for mate in mates:
            self._ready.pop(mate, None)
        why = f"rank {rank} {how}"
        over = Outgoing(mates, {"is": "over", "why": f"{why}, and the ranks of its group are lost with it"})
        lost = Outgoing(self.staying, {"is": "lost", "ranks": mates, "why": why})
        return True, [over, lost, *self._form_world()]

    def leave(self, rank: int) -> list[Outgoing]:
        """Takes the good end of a rank: all programs are over then, for ranks end together."""
        if rank in self.gone:
            return []
        self._left.add(rank)
        return self._form_world()

    def end(self, why: str) -> list[Outgoing]:
        """Nothing goes on; those that wait for a new world hear of it."""
        if self.over:
            return []
        self.over = why
        return [Outgoing(self.staying, {"is": "over", "why": why})]

    def _reason_against(self, rank: int) -> str:
        """Returns why the run cannot go on without this rank; "" if it can."""
        if self.over:
            return self.over
        if self._left:
            return "the programs of others are over"
        if len(self._group_of) < self.num_ranks:
            return "the ranks are not divided into groups (data_parallel), and have no copies of what others have"
        if self._needed_for[rank]:
            return self._needed_for[rank]
        lost_group = self._group_of[rank]
        if all(self._group_of[other] == lost_group for other in self.staying):
            return "no other group is left"
        return ""

    def _form_world(self) -> list[Outgoing]:
        """Returns the message that lets all go on, if all that are left are ready."""
        needed = [*self._ready] if self._left else self.staying
        if not needed or not self._ready.keys() >= set(needed):
            return []
        self._generation += 1
        states = [self._ready[rank] for rank in needed]
        self._ready.clear()
        ranks = [] if self._left else needed  # nobody is left to go on with: the programs are over
        return [Outgoing(needed, {"is": "world", "generation": self._generation, "ranks": ranks, "states": states})]
