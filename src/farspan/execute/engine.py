"""The engine behind a recorder: runs what was recorded, and answers what the program asks of values."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from farspan import settings
from farspan.call.draws.frame import Frame, key_of
from farspan.call.infer.entry import Raised
from farspan.call.leaf import Placed
from farspan.call.naming import find_where, format_where
from farspan.comm.channels import Channels
from farspan.comm.router import Carrier
from farspan.comm.transport import TransferError
from farspan.control.channel import SideChannel
from farspan.control.hub.divergence import ProgramEnd
from farspan.control.text import first_line, is_answering
from farspan.errors import FarspanError, RemoteError
from farspan.execute.abort.aborted import check_computed
from farspan.execute.abort.raised_alone import raised_alone
from farspan.execute.agreement.agreement import Agreement
from farspan.execute.agreement.history import History
from farspan.execute.agreement.resolved import broadcast_result
from farspan.execute.agreement.step_start import StepStart
from farspan.execute.copies.losses import Losses, Ran
from farspan.execute.data_axis.one_group import Groups
from farspan.execute.gradient_masks import GradientMasks, accumulate, clear_gradients, set_gradient
from farspan.execute.process.console import Console
from farspan.execute.process.exit_code import exit_words
from farspan.execute.slices.in_place import SlicesInPlace
from farspan.execute.step.end import StepEnd, changes_state
from farspan.execute.step.executor import Executor
from farspan.execute.step.inputs import Inputs
from farspan.execute.step.pace import Pace
from farspan.execute.step.segment import StageDevice
from farspan.execute.step.step_record import StepRecord
from farspan.execute.teams import device_of, settings_of, settle_values, stage_number, stages_at
from farspan.execute.values import SharedValues, ValueSlice
from farspan.graph import Call, Graph, Meta, Value, release
from farspan.plan import RankDevices, Team
from farspan.program.cache import Programs
from farspan.program.program import Program
from farspan.record.recorder import Recorder
from farspan.record.runtime import VALUE_IS_READ
from farspan.record.saving.reserved import fill_reserved, reserved_memory
from farspan.schedule import LEAST_WEIGHT_WORK_S, LOOKAHEAD
from farspan.torch_private import move_data, raw_grad, without_modes_of
from farspan.torch_private.flags import without_hooks_on_what_is_saved

__all__ = ["Engine"]

_CAUSE_S = 5.0
"""How long a broken transfer waits for the news of why it broke."""


def _sanitizer_for(engine: Engine) -> Any:
    """Returns what checks all that the engine relies on; None if nobody has asked for it."""
    seed = settings.seed("SANITIZE")
    if seed is None:
        return None
    from farspan.execute.sanitize import Sanitizer  # only where it is asked for

    return Sanitizer(seed, engine.rank)


class Engine:
    """The runtime of one rank."""

    def __init__(
        self, recorder: Recorder, side: SideChannel, transport: Carrier | None, *, seed: int | None, deadline_s: float
    ) -> None:
        self.recorder = recorder
        self.side = side
        self.rank = side.rank
        self.num_ranks = side.world_size
        self.deadline_s = deadline_s
        self.lookahead, self.schedule, self.gradient_reduction = LOOKAHEAD, "auto", "exact"
        self.least_weight_work_s = LEAST_WEIGHT_WORK_S["auto"]
        """A backward is split if its weight gradients are likely to take so long; never, if infinite."""
        self.programs = Programs()
        self.teams: list[Team] = []  # who runs each stage
        self.devices: list[RankDevices] = []  # as each rank has told them
        self.takes_cpu = True  # whether the program has no parameter or buffer on a device: stages take it for theirs
        self.parameters: dict[str, Placed] = {}
        self.sanitizer = _sanitizer_for(self)
        self.channels = self.new_channels(transport, side)
        self.executor = self.plain_executor()
        self.after_step: list[Callable[[], None]] = []  # called when an optimizer has stepped
        self.before_end: list[Callable[[], None]] = []  # called when the program is over
        self.after_abort: list[Callable[[], None]] = []  # when a step has ended with an exception, on all ranks
        self.console = Console(side, deadline_s)
        recorder.cache.trying.say = self.console.warn
        self.pace = Pace()
        self.num_flushes = 0
        self.last_step: StepRecord | None = None
        self.last_training_step: StepRecord | None = None
        self.transport = transport
        self.losses = Losses(self)
        self.lost: FarspanError | None = None  # a loss that interrupts the step that runs
        self._failure: FarspanError | None = None
        self._failed = threading.Event()
        self.masks = GradientMasks(self.rank, self.teams, self.parameters)
        self._steps = itertools.count()  # what all ranks do together: flushes and barriers
        self._history = History(lambda: recorder.position)
        self.events = self._history.events
        self.agreement = self.agreement_of_all = Agreement(side, deadline_s)
        self.groups = Groups()  # into which all ranks are divided
        self.values = SharedValues(side, self.parameters, deadline_s)
        self.is_present_gradient, self.show_gradient = self.values.gradients.is_present, self.values.gradients.show
        self.has_sparse_gradient = self.masks.is_sparse
        self.slices = SlicesInPlace(self)
        self.inputs = Inputs(recorder, self.agreement, self.values, self.teams)
        side.history = self._history.entries
        side.on_failure = self.hear_failure
        side.place = lambda: self.executor.describe_place()
        recorder.engine = self
        self.seed_draws(seed)
        if self.sanitizer is not None:
            self.sanitizer.watch_engine(self)

    def plain_executor(self) -> Executor:
        """Returns an executor that has run nothing yet."""
        executor = Executor(
            self.channels,
            parameters=self.parameters,
            device_of=lambda work: device_of(self.teams[work.stage].member(work.turn)),
            check=self.check,
            takes_cpu=lambda: self.takes_cpu,
        )
        if self.sanitizer is not None:
            self.sanitizer.watch_executor(executor)
        return executor

    def new_channels(self, transport: Carrier | None, side: SideChannel) -> Channels:
        """Returns the way to and from the ranks that `side` knows."""
        channels = Channels(transport, side.rank, self.deadline_s, side)
        if self.sanitizer is not None:
            self.sanitizer.watch_channels(channels)
        return channels

    def stage_number(self, team: Team, occurrence: int) -> int:
        """Returns the number of the `occurrence`-th stage that `team` runs, in all models."""
        return stage_number(self.teams, team, occurrence)

    def stages_at(self, place: str) -> tuple[int, ...]:
        """Returns the stages at a place that the program names ("rank:1", "rank:1/cuda:0"), the best first."""
        return stages_at(self.teams, place, self.devices, self.num_ranks)

    def seed_draws(self, seed: int | None) -> None:
        """Let all that the model draws follow from `seed`, or be what the plain program draws."""
        self.recorder.draws.seed = seed
        self.recorder.root = self.recorder.frame = Frame(key_of(self.recorder.draws.name))

    def compare_generators(self) -> None:
        """Let the states of the generators belong to each agreement: this rank has a process of its own."""
        self._history.compares_generators = True

    def finish(self) -> None:
        """The program is over: wait until that of every rank is, and answer what they ask until then.

        Raises:
            DivergenceError: Another rank goes on, or has done something else since the last step.
        """
        for act in self.before_end:
            act()
        digest = self._history.begin_end()
        end = ProgramEnd(exit_words(), self._history.last_reasons())
        self.losses.finish(lambda: self.side.finish(self.deadline_s, digest, end))

    @property
    def is_healthy(self) -> bool:
        return self._failure is None

    # Running what was recorded.

    def flush(
        self, reason: str, *, resolving: tuple[Call, Callable[[], None]] | None = None, ends_window: bool = False
    ) -> None:
        """Run all that has been recorded.

        Args:
            reason: Why now, for people.
            resolving: A call whose result, or whose use of the random generators, can only be known by running it; and
                what is to happen when it is known.
            ends_window: Whether `average_gradients` is called next.
        """
        self.losses.settle()
        self.check()
        if reserved_memory:
            fill_reserved()
        graphs = self.recorder.take_pending()
        if not graphs:
            return
        if self.recorder.splitting.stages:
            self.slices.before_run(graphs)
        for value in [value for graph in graphs for value in graph.sources]:
            check_computed(value)
        step = next(self._steps)
        self.num_flushes += 1
        began_ns = time.perf_counter_ns()
        draws = self.recorder.noted_draws.take()
        where = find_where()
        self._history.begin_flush(graphs, f"{reason}, at {format_where(where)}" if where else reason, draws)
        drawn_at, is_resolving = [position for _, _, position in draws], resolving is not None
        is_foreseen = resolving is None or resolving[0].entry.is_foreseen
        end, program, settings = self.losses.outlived(
            graphs,
            lambda: self._run(step, graphs, drawn_at, is_resolving=is_resolving, ends_window=ends_window),
            is_resolving=is_resolving,
        )
        with self.executing():
            end.go_on()
            if resolving is not None:
                broadcast_result(self, resolving[0], is_foreseen=is_foreseen)
            self.recorder.draws.end_flush()
            if resolving is not None:
                resolving[1]()
        self.executor.replicas.end_step(graphs, program.replicas)
        self.settle(graphs, program)
        self.last_step = end.record(program, settings, began_ns)
        if self.last_step.has_backward:
            self.last_training_step = self.last_step
        self.values.advance()
        self.recorder.cache.flushed()
        is_read = reason == VALUE_IS_READ and not self.values.optimizers.depth  # not in a closure, which ends anyway
        self.console.step_ended(self.last_step, where if is_read else None)

    def _run(self, step: int, graphs: list[Graph], drawn_at: Any, *, is_resolving: bool, ends_window: bool) -> Ran:
        """Runs this rank's part of a step, until all ranks have run theirs."""
        start = StepStart(self.side, self._history, step, self.deadline_s, self.values.gradients)
        has_backward = any(graph.backwards for graph in graphs)
        changes = changes_state(graphs) or (has_backward and self.values.gradients.may_be_read())
        if changes or is_resolving or self.recorder.runs_each_backward:
            start.wait()  # a slower rank may still read what the step will change
        elif not self.channels.checks_sizes(self.num_ranks):
            start.announce()
        self.channels.agree = start.wait
        end = StepEnd(self, step, graphs, drawn_at)
        with self.executing():
            self.inputs.check(graphs)
            self.executor.replicas.begin_step(ends_window=ends_window and has_backward)
            program = self.programs.program_of(graphs, settings := settings_of(self))
            end.begin()
            self.groups.note(graphs, program, start.data, ends_window=ends_window)
            self.executor.run(program, end.interruption, start)
            end.contribute(program)
        if self.side.failure is None or self.lost is not None:  # another rank's is raised by the waits, if they need it
            self.check()  # a device may have waited too long for what has just been read from it
        start.wait()
        if reports := end.wait():
            self.losses.has_raised()
            error = end.abort(program, reports)
            if self.groups.has_begun:
                self._fail(error)  # gradients of a step that has not run to its end are on their way
            raise error
        return end, program, settings

    @contextlib.contextmanager
    def executing(self) -> Iterator[None]:
        """User code is not recorded; what goes wrong is reported to all ranks. What runs here may have been recorded
        somewhere else: what autograd saves goes through no hooks that are around now."""
        was_recording, self.recorder.is_recording = self.recorder.is_recording, False
        try:
            with (
                without_modes_of(self.recorder),
                without_hooks_on_what_is_saved(),
                self.recorder.held_objects.as_recorded(),
            ):
                yield
        except Exception as error:
            if self.losses.has_interrupted(error):
                raise  # and goes on
            if isinstance(error, FarspanError):
                self._fail(error)
            if self.num_ranks == self.groups.num_groups == 1:
                raise  # nobody waits for this rank
            if isinstance(error, TransferError):
                self._failed.wait(_CAUSE_S)
            if isinstance(error, RuntimeError) and self._failure is not None:
                raise self._failure from None  # which broke this
            self._fail(error)
        finally:
            self.recorder.is_recording = was_recording

    def broadcasting(self, raised: Raised | None) -> contextlib.AbstractContextManager[None]:
        return raised_alone(self.side, raised)

    def _fail(self, error: Exception) -> NoReturn:
        if self._failure is None:
            if not isinstance(error, RemoteError):
                self.side.fail(error)
            what = f"this rank failed earlier: {type(error).__name__}: {first_line(error)}"
            again = FarspanError(what, hint="start the program again")
            self._failure = error if isinstance(error, FarspanError) else again
            self._failed.set()
            self.interrupt()
        raise error

    def interrupt(self, *, may_ask: bool = False) -> None:
        """Ends all transfers: nothing goes from rank to rank any more, but for questions and answers, if they `may`."""
        if not may_ask:
            self.values.pulls.abort()
        self.groups.abort()
        if self.transport is not None:
            self.transport.abort()

    def hear_failure(self, failure: FarspanError) -> None:
        """Another rank failed (called in the listener thread): end this rank's transfers, so that it wakes."""
        if self._failure is None:
            self._failure = failure
        self._failed.set()
        self.values.halts.wake()
        self.interrupt(may_ask=is_answering(failure))

    def check(self) -> None:
        """Raise if this or another rank has failed."""
        if self._failure is not None:
            raise self._failure
        if self.lost is not None:
            raise self.lost

    def settle(self, graphs: Sequence[Graph], program: Program) -> None:
        """Releases what has run, but for what the program can still read or differentiate."""
        settle_values(graphs, self.teams)
        self.recorder.forget_parameter_values()
        self.values.keep(
            value for graph in graphs for call in graph.calls for value in call.outputs if self.is_mine(value)
        )
        release(graphs, program.released, program.parts)
        self._history.end()

    def settle_devices(self) -> None:
        """The program has moved parameters or buffers: bring them to where their stages have them now."""
        placed = self.recorder.placed.values()
        self.takes_cpu = all(item.meta.device.type == "cpu" for item in placed)
        with without_modes_of(self.recorder):
            for item in [item for item in placed if item.is_owned and type(item.tensor) is item.kind]:
                on = StageDevice(device_of(self.teams[item.stage].leader), self.takes_cpu)
                move_data(item.tensor, on.of(item.meta.device))

    # Values that every rank will want.

    def add_parameters(self, placed: Sequence[Placed]) -> None:
        """Another model is distributed."""
        self.masks.resolve()  # which are about the parameters known so far
        self.parameters.update({item.name: item for item in placed})

    def average_gradients(self, *, has_passed_barrier: bool) -> None:
        began_ns = time.perf_counter_ns()
        self.groups.end_window(has_passed_barrier=has_passed_barrier)
        if self.recorder.splitting.stages:
            self.slices.bring_late()
        self.console.add_averaging(time.perf_counter_ns() - began_ns)

    def has_gradient(self, placed: Placed) -> bool:
        return raw_grad(placed.tensor) is not None if self.num_ranks == 1 else self.masks.has_gradient(placed)

    def is_gradient_early(self, name: str) -> bool:
        """Returns whether a forward runs before a backward that adds to this gradient and was recorded before it."""
        return self.executor.is_gradient_early(name)

    def sparse_gradient(self, placed: Placed) -> torch.Tensor:
        """Returns a sparse gradient that is there: the own one itself, or a copy of another rank's."""
        return self.values.sparse_gradient(placed, self.teams[placed.stage].leader.rank)

    def set_gradient(self, placed: Placed, gradient: Value | torch.Tensor | None, *, is_owners: bool = False) -> None:
        self.events.set_gradient(placed.name, gradient, is_owners=is_owners)
        self.losses.change_gradients()
        set_gradient(self.masks, self.values.gradients, placed, gradient)

    def clear_gradients(self, items: Sequence[Placed]) -> None:
        self.losses.clear_gradients(items)
        self.events.clear_gradients(
            clear_gradients(self.masks, self.values.gradients, [item for item in items if self.has_gradient(item)])
        )

    def accumulate(self, placed: Placed, gradient: torch.Tensor | None) -> None:
        self.groups.touch(placed)
        self.losses.change_gradients()
        accumulate(self.masks, self.recorder, placed, gradient)

    def gather(self, what: str, blob: bytes) -> list[bytes]:
        return self.agreement.gather(what, blob)

    def loaded(self, name: str, source: Any) -> None:
        """The program loads `source` into a parameter or buffer."""
        self.events.load(name, source)

    def new_sources(self, items: Sequence[tuple[Meta, int, torch.Tensor | None]]) -> list[Value]:
        """Returns values that no call has made, from their metadata, their stages, and at their owners the data."""
        values = [self.inputs.add(*item) for item in items]
        self.values.advance()
        return values

    # Reading.

    def read(self, value: Value, part: ValueSlice | None = None) -> torch.Tensor:
        """Returns the data of a value, or `part` of another rank's; runs what is recorded if it is not yet known."""
        return self.losses.asking(lambda: self._read(value, part))

    def _read(self, value: Value, part: ValueSlice | None) -> torch.Tensor:
        if self.recorder.deferred.can_read(value):
            return self.recorder.deferred.read(value).detach()
        if value.pending:
            self.flush(VALUE_IS_READ)
        if value.call is not None and value.data is None:
            check_computed(value)
        if value.data is None and value.ticket is not None:
            value.ticket.resolve()
        if value.data is not None:
            return value.data.detach()
        if value.name:
            return self.read_parameter(self.parameters[value.name])
        return self.values.pull_value(self.owner_of(value), value, part)

    def fetch(self, values: Sequence[Value]) -> dict[Value, torch.Tensor]:
        """Returns the data of values that have been computed and that other ranks have: one request to each."""
        return self.losses.asking(lambda: self.values.fetch([(value, self.owner_of(value)) for value in values]))

    def read_parameter(self, placed: Placed, memory: torch.Tensor | None = None) -> torch.Tensor:
        return self.losses.asking(lambda: self.values.read_parameter(placed, self.teams, memory))

    def parameters_changed(self, items: Iterable[Placed] | None = None, *, in_step: bool = False) -> None:
        """An optimizer step, a load or a write (in a step that has run) is over: `items`, or all, have new values."""
        for item in self.parameters.values() if items is None else items:
            item.changed_at = self.recorder.num_graphs - 1
        if not in_step:
            self.losses.change()
        self.executor.replicas.forget()
        self.recorder.forget_parameter_values()
        self.values.advance()

    def barrier(self, what: str) -> None:
        """Wait until all ranks have come here.

        Raises:
            DivergenceError: Some of them are elsewhere.
        """
        self.losses.settle()
        self.check()
        fill_reserved()
        words, draws = f"{what}, at {format_where(find_where())}", self.recorder.noted_draws.take()
        self.losses.agree(next(self._steps), self._history.begin_barrier(words, key_of(what), draws))
        self._history.end()

    def owner_of(self, value: Value) -> int:
        """Returns the rank that has, or will have, the data of a value."""
        return self.teams[value.stage].member(value.turn).rank

    def is_mine(self, value: Value) -> bool:
        return self.owner_of(value) == self.rank
