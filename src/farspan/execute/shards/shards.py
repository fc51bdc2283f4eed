"""What is sharded over the groups of a program, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from farspan.errors import PlanError, quoted
from farspan.execute.data_axis.reduction import Reduction
from farspan.execute.shards.divided_steps import DividedSteps
from farspan.execute.shards.homes import ShardHomes
from farspan.execute.shards.optimizer_states import DividedStates
from farspan.execute.shards.parameters import AwayParameters
from farspan.execute.shards.peer_pulls import PeerPulls

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.execute.engine import Engine

__all__ = ["Shards", "begin_sharding", "check_shard"]

_KINDS = ("optimizer", "parameters")
_CHOICES = " or ".join(f'shard="{kind}"' for kind in _KINDS)


class Shards:
    """The shards of one rank.

    Args:
        engine: This rank's.
        groups: Its data axis.
        kind: What is sharded, as the program has said.
    """

    def __init__(self, engine: Engine, groups: Reduction, kind: str) -> None:
        self.kind = kind
        self._homes = ShardHomes(groups.number, groups.num_groups, engine.num_ranks, engine.teams)
        self._peers = PeerPulls(groups.everybody, engine.deadline_s)
        self._states = DividedStates(engine, self._homes, self._peers)
        self._parameters = AwayParameters(groups, self._homes, self._peers) if kind == "parameters" else None
        self._steps = DividedSteps(engine, groups, self._homes, self._states, self._peers, self._parameters)
        self.take, self.end = self._steps.take, self._steps.end
        self.begin_load, self.has_loaded = self._steps.begin_load, self._steps.has_loaded
        self.is_divided, self.is_held = self._states.is_divided, self._states.is_held
        self.is_saved_here = self._states.is_saved_here
        self.gather, self.whole_state = self._states.gather, self._states.whole

    @property
    def is_stepping(self) -> bool:
        return self._steps.is_running

    def add(self, items: Sequence[Placed]) -> None:
        """Divide the parameters of another model, which has been placed."""
        self._homes.add(items)

    def release(self, items: Sequence[Placed]) -> None:
        """Let the data of those parameters go that other groups hold, if they are sharded."""
        if self._parameters is not None:
            self._parameters.release(items)

    def is_divided_parameter(self, item: Placed) -> bool:
        """Returns whether one group alone holds the data of a parameter."""
        return self._parameters is not None and self._parameters.is_divided(item)

    def is_away(self, item: Placed) -> bool:
        """Returns whether another group holds the data of a parameter."""
        return self._parameters is not None and self._parameters.is_away(item)

    def begin_write(self, what: str, names: Sequence[str] | None = None) -> None:
        """All groups are about to write into parameters: those of these names, or any."""
        if self._parameters is not None:
            self._parameters.begin_write(what, names)

    def end_write(self) -> None:
        """All groups have written into parameters."""
        if self._parameters is not None:
            self._parameters.end_write()

    def abort(self) -> None:
        """Ends all that is asked for: this rank or another has failed."""
        self._peers.abort()


def check_shard(shard: Any, data_parallel: Any) -> None:
    """Raise if a program cannot be sharded so.

    Raises:
        PlanError: It is no choice, or there are no groups.
    """
    if shard is None:
        return
    if shard not in _KINDS:
        raise PlanError("shard says what the groups divide.", why=f"{quoted(repr(shard))} was given.", hint=_CHOICES)
    if data_parallel is None:
        raise PlanError(
            f'shard="{shard}" divides what groups of ranks would each hold, and there are no groups.',
            why="data_parallel= says how many there are; it was not given.",
            hint=f'data_parallel=2, shard="{shard}"',
        )


def begin_sharding(engine: Engine, shard: str | None) -> None:
    """Shard what `distribute` places from now on; all ranks of all groups call it.

    Raises:
        PlanError: An earlier model was sharded otherwise.
        DivergenceError: The ranks give different choices.
    """
    groups = engine.groups
    if not isinstance(groups, Reduction):
        return  # one group: it has all there is
    engine.agreement_of_all.agree_on("shard argument", f"shard={shard}")
    if engine.recorder.roots:
        known = groups.shards.kind if isinstance(groups.shards, Shards) else None
        if shard is not None and shard != known:
            raise PlanError(
                f'shard="{shard}" comes too late: the first model was distributed with shard={known!r}.',
                why="what groups divide is said once, for all models of a program.",
                hint=f'shard="{shard}" in the first farspan.distribute',
            )
    elif shard is not None:
        if groups.recovery is not None:
            raise PlanError(
                f'shard="{shard}" keeps what no other group has; --keep-going goes on without a lost group.',
                why="what the lost group has held would be lost.",
                hint="farspan run --max-restarts N, and farspan.save",
            )
        groups.shards = Shards(engine, groups, shard)
