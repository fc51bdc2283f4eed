"""Lets the ranks go on, in their processes, where one is lost whose parameters another one has copies of.

    step, barrier    an operation of all ranks with a number
    complete         a rank has run its part of it, and has brought what it keeps copies of
    commit           all ranks know that all have
    a loss           those that are left say how many operations they know to be committed; the largest number counts.
                     A step that none of them knows to be committed is run again, from what each of them found

Ranks that are left get new numbers, without gaps; stages keep theirs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from farspan.comm.transport import TransferError
from farspan.errors import FarspanError, RecordError, RemoteError
from farspan.execute.copies.before import StepBefore, why_not_again
from farspan.execute.copies.heirs import heirs_of
from farspan.execute.copies.kept import KeptCopies
from farspan.execute.copies.losses import Losses, Ran
from farspan.execute.copies.renumber import leave, renumber
from farspan.execute.data_axis.recovery.forming import error_of_loss
from farspan.execute.teams import settle_values
from farspan.launch.membership import CAUSE_S, ProgramsOverError

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from farspan.call.leaf import Placed
    from farspan.control.channel import SideChannel
    from farspan.execute.copies.worlds import Worlds
    from farspan.execute.engine import Engine
    from farspan.graph import Graph
    from farspan.launch.membership import Membership

__all__ = ["Keeper"]

_T = TypeVar("_T")


class Keeper(Losses):
    """The part of one rank in going on after losses.

    Args:
        engine: This rank's.
        join: Connects this rank with the launcher, given why nothing can go on without it ("" if something can).
    """

    def __init__(self, engine: Engine, join: Callable[[str], tuple[Membership, Worlds]]) -> None:
        super().__init__(engine)
        self._join = join
        self._membership: Membership | None = None
        self._worlds: Worlds
        self._ranks: Sequence[int] = range(engine.num_ranks)
        """Those of the world, by their number there, as the launcher counts them."""
        self._copies = KeptCopies(engine)
        self._num_committed = 0
        self._first_graph = 0
        """The first graph that has run since a rank was lost."""
        self._why_not_again = ""
        self._is_lost: RemoteError | None = None
        self._is_leaving = self._is_running = self._is_outlived = False
        engine.side.on_failure = functools.partial(self._hear, engine.side)

    @property
    def may_be_outlived(self) -> bool:
        """Returns whether the ranks that are left may go on without one."""
        return self._membership is not None

    # Operations of all ranks, in one order on all of them.

    def outlived(self, graphs: Sequence[Graph], run: Callable[[], Ran], *, is_resolving: bool) -> Ran:
        """Returns what `run` returns, on all ranks that are left: the graphs have run.

        Args:
            graphs: What has been recorded.
            run: Runs this rank's part, and returns when all ranks have run theirs.
            is_resolving: Whether the result of a call in it cannot be foreseen.
        """
        engine = self._engine
        if self._membership is None and not self._heirs():
            return run()
        self._check_graphs(graphs)
        self._copies.begin(graphs)
        number, before = self._num_committed, StepBefore(engine, graphs)
        self._why_not_again = why_not_again(engine, graphs, is_resolving=is_resolving)
        ran: Ran | None = None
        with self._outliving():
            while True:
                try:
                    self._is_running, ran = True, None
                    engine.lost = self._is_lost
                    ran = run()
                    self._commit(has_run=True)
                    break
                except Exception as error:
                    self._is_running, engine.lost = False, None
                    if not self.has_interrupted(error):
                        self._why_not_again = ""
                        raise

                    def settle(*, is_committed: bool, before: StepBefore = before) -> None:
                        if is_committed:
                            settle_values(graphs, engine.teams)
                        else:
                            before.restore()

                    if self._recover(settle, graphs) > number:
                        assert ran is not None, "what is committed has run on every rank"
                        ran[1].replicas = frozenset()
                        break
                    before = StepBefore(engine, graphs)
        self._why_not_again, self._is_running, engine.lost = "", False, None
        return ran

    def agree(self, step: int, digest: int) -> None:
        """Returns when all ranks that are left have come to this barrier."""
        engine, number = self._engine, self._num_committed
        with self._outliving():
            while True:
                try:
                    engine.side.start(step, digest)
                    engine.side.wait_agreed(step, engine.deadline_s)
                    if self._membership is not None or self._heirs():
                        self._commit(has_run=False)
                    return
                except Exception as error:
                    if not self.has_interrupted(error):
                        raise
                    if self._recover() > number:
                        return

    def asking(self, ask: Callable[[], _T]) -> _T:
        """Returns what `ask` finds out from other ranks; it may be called again, after a loss."""
        if self._membership is None or self._engine.recorder.is_in_optimizer:
            return ask()
        with self._outliving():
            while True:
                self.settle()
                try:
                    return ask()
                except Exception as error:
                    if not self.has_interrupted(error):
                        raise
                    self._recover()

    def finish(self, finish: Callable[[], None]) -> None:
        """The program is over: returns when those of all ranks that are left are."""
        with self._outliving():
            while True:
                try:
                    finish()
                    return
                except FarspanError as error:
                    if not self.has_interrupted(error):
                        raise
                    try:
                        self._recover()
                    except ProgramsOverError:
                        return

    @contextlib.contextmanager
    def _outliving(self) -> Iterator[None]:
        """What the body does begins again after a loss; not if the program has got an error of that loss before."""
        outer = self._is_outlived
        self._is_outlived = outer or not self._engine.side.has_told
        try:
            yield
        finally:
            self._is_outlived = outer

    def _commit(self, *, has_run: bool) -> None:
        """Returns when all ranks know that all have completed the operation."""
        engine, heirs, number = self._engine, self._heirs(), self._num_committed
        with engine.executing():
            self._copies.bring([rank for rank, heir in heirs.items() if heir == engine.rank], has_run=has_run)
            key = f"operation {number}"
            engine.side.contribute(key, b"")
            engine.side.gathered(key, engine.deadline_s)
            engine.side.forget(key)
            self._num_committed = number + 1
            self._copies.brought()
            if self._membership is None:
                self._membership, self._worlds = self._join(self._needed_for())
                self._membership.on_lost = self._hear_lost
                self._membership.on_over = self._end

    def _heirs(self) -> dict[int, int]:
        teams = self._engine.teams
        if any(team.is_part for team in teams) or any(each.device != "cpu" for team in teams for each in team.members):
            return {}
        return heirs_of(teams)

    def _needed_for(self) -> str:
        """Returns why nothing can go on without this rank."""
        return "" if self._engine.rank in self._heirs() else "no other rank has copies of what it had"

    # What the engine tells.

    def settle(self) -> None:
        """Goes on after a loss that came while the program was elsewhere."""
        with self._outliving():
            while self._is_lost is not None and self.has_interrupted(self._is_lost):
                self._recover()

    def has_raised(self) -> None:
        """The step ends with an exception of the program's, on all ranks."""
        self._why_not_again = "an exception of the program was on its way to all ranks"
        self._copies.change()  # and gradients, which become nan

    def clear_gradients(self, items: Sequence[Placed]) -> None:
        self._copies.clear_gradients(items)

    def change_gradients(self) -> None:
        self._copies.change_gradients()

    def change(self) -> None:
        self._copies.change()

    def change_state(self, optimizer: Optimizer) -> None:
        self._copies.change_state(optimizer)

    def step(self, optimizer: Optimizer, placed: Sequence[Placed], *, has_closure: bool) -> None:
        self._copies.step(optimizer, placed, has_closure=has_closure)

    # Losses.

    def has_interrupted(self, error: Exception) -> bool:
        """Returns whether an error comes of a loss that this rank goes on after."""
        membership, heard = self._membership, self._engine.side.failure
        if membership is None or not self._is_outlived or not self._engine.is_healthy:
            return False
        is_heard = self._is_lost is not None or (isinstance(heard, RemoteError) and heard.is_loss)
        may_be_loss = isinstance(error, TransferError) or is_heard
        try:
            return membership.wait_broken(CAUSE_S if may_be_loss else 0.0)
        except RemoteError:
            return False

    def _hear(self, side: SideChannel, error: FarspanError) -> None:
        """A rank has failed, says a channel, in its listener thread."""
        engine, membership = self._engine, self._membership
        if side is not engine.side:
            return  # of a world before
        if membership is None or not (isinstance(error, RemoteError) and error.is_loss):
            engine.hear_failure(error)
            return
        if not self._is_leaving and not membership.is_broken() and 0 <= error.rank < len(self._ranks):
            membership.suspect(self._ranks[error.rank])
        self._is_lost = error
        if self._is_running:
            engine.lost = error
        engine.interrupt()

    def _hear_lost(self, lost: Sequence[int]) -> None:
        """Ranks are lost, says the launcher, in its listener thread."""
        self._worlds.hear(lost)
        error = error_of_loss(lost, self._ranks)
        if error is not None:
            self._engine.side.take_failure(error)

    def _end(self, error: RemoteError) -> None:
        """Nothing goes on, says the launcher, in its listener thread."""
        self._engine.hear_failure(error)

    def _recover(self, settle: Callable[..., None] | None = None, graphs: Sequence[Graph] = ()) -> int:
        """Forms the world of those that are left, and takes over what this rank has copies of.

        Args:
            settle: Called with whether the operation is committed, before anything changes here.
            graphs: What runs, or was to run.

        Returns:
            How many operations one of those that are left knows to be committed.

        Raises:
            RemoteError: Nothing goes on.
        """
        membership, engine = self._membership, self._engine
        assert membership is not None
        while True:
            self._is_leaving = True  # who closes its end of this world's channel is not lost
            if self._is_lost is None:  # what failed was a transfer: threads that wait in the channel are to hear why
                self._hear_lost([rank for rank in self._ranks if membership.is_lost(rank)])
            world = membership.form(self._num_committed, engine.deadline_s)
            leave(engine)
            try:
                side, router = self._worlds.form(world)
                lost = [number for number, rank in enumerate(self._ranks) if rank not in world.ranks]
                num_committed = max(map(int, world.states))
                why_not = self._agree_to_go_on(side, lost, num_committed)
                break
            except (FarspanError, RuntimeError):
                if not membership.wait_broken(CAUSE_S):
                    raise
        if why_not:
            self._end_all(side, lost, why_not)
        left = [number for number, rank in enumerate(self._ranks) if rank in world.ranks]
        heirs = self._heirs()
        is_committed = num_committed > self._num_committed
        if settle is not None:
            settle(is_committed=is_committed)
        again = () if is_committed else graphs
        pending = [*again, *engine.recorder.pending, engine.recorder.current]
        renumber(engine, side, router, left, heirs, lambda: self._take(lost, heirs, pending))
        self._num_committed = num_committed
        self._first_graph = min(graph.index for graph in pending)
        self._ranks, self._is_lost, self._is_leaving = world.ranks, None, False
        engine.lost = None
        side.on_failure = functools.partial(self._hear, side)
        if side.failure is not None:
            self._hear(side, side.failure)
        membership.say_needed(self._needed_for())
        self._say()
        return num_committed

    def _agree_to_go_on(self, side: SideChannel, lost: Sequence[int], num_committed: int) -> str:
        """Returns, on all ranks that are left, why one of them cannot go on; "" if all can."""
        heirs, rank = self._heirs(), self._engine.rank
        reasons = ["" if num_committed > self._num_committed else self._why_not_again]
        if self._engine.values.optimizers.depth:
            reasons.append("an optimizer's step was running")
        if num_committed > self._num_committed:
            self._copies.brought()  # all had brought them
        for each in lost:
            heir = heirs.get(each)
            if heir is None or heir in lost:
                reasons.append(f"no rank that is left has copies of what rank {self._ranks[each]} had")
            elif heir == rank:
                reasons.append(self._copies.missing(each))
        why = next(filter(None, reasons), "")
        side.contribute("can go on", why.encode())
        found = [part.decode() for part in side.gathered("can go on", self._engine.deadline_s)]
        return next(filter(None, found), "")

    def _end_all(self, side: SideChannel, lost: Sequence[int], why_not: str) -> NoReturn:
        """Ends this rank, as all others that are left do."""
        side.close(linger_s=0.0)
        names = ", ".join(str(self._ranks[each]) for each in lost)
        error = RemoteError(
            f"the run cannot go on without rank {names}.",
            why=f"{why_not}.",
            hint="farspan run --keep-going --max-restarts 3: all ranks start again, from what farspan.save wrote",
        )
        error.is_loss = True
        self._engine.hear_failure(error)
        raise error

    def _take(self, lost: Sequence[int], heirs: dict[int, int], graphs: Sequence[Graph]) -> None:
        for rank in lost:
            if heirs[rank] == self._engine.rank:
                self._copies.take(rank, graphs)
        self._copies.forget()

    def _check_graphs(self, graphs: Sequence[Graph]) -> None:
        """Raises if something goes back through what ran before a rank was lost."""
        if not self._first_graph:
            return
        roots = [root for graph in graphs for backward in graph.backwards for root in backward.roots]
        given = [value for graph in graphs for value in graph.sources if value.meta.requires_grad]
        for value in [*roots, *given]:
            if value.call is not None and value.call.graph.index < self._first_graph:
                raise RecordError(
                    f"a backward goes through {value.describe()}, which ran before a rank was lost.",
                    why="what the lost rank kept for it is gone.",
                    hint="loss.backward() before its value is read",
                )

    def _say(self) -> None:
        membership, engine = self._membership, self._engine
        assert membership is not None
        others = f"{engine.num_ranks} rank{'s' * (engine.num_ranks > 1)} go{'es' * (engine.num_ranks == 1)} on"
        engine.console.warn(f"farspan: {membership.reasons[-1]}; {others} with copies of what it had.")
