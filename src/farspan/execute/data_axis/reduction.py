"""Averages gradients over the groups: once for all backwards between two reads of a gradient or steps of an optimizer.

    backward, backward, loss.item()     each group by itself: gradients are those of its own batches
    parameter.grad, optimizer.step()    a window ends: all groups come here, and have the mean of what they have added

    everybody    window n begins, after so many steps           channel of all ranks; a difference is an error there
    a position   which gradients have been added to             maximum of a mask        \\  among the ranks that own
    a position   these, in buckets                              sum of shares            /   the same parameters
    a group      which gradients there are now                  channel of the group

A gradient that one group lacks counts as zeros there. What was averaged before and is added to is averaged as a whole:
it is the same in all groups, and the mean of equal numbers is that number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from farspan.call.draws.frame import key_of
from farspan.call.naming import find_where, format_where
from farspan.errors import DeadlineError
from farspan.execute.agreement.events import settings_in_words
from farspan.execute.data_axis.batches import Batches
from farspan.execute.data_axis.first_group import (
    COMPARED_EVERY,
    data_of_first,
    find_different,
    groups_differ,
    sample_of,
    take_from_first,
    write,
)
from farspan.execute.data_axis.gradient_buckets import Bucket, Trained, bucket_layout
from farspan.execute.data_axis.one_group import Groups
from farspan.execute.data_axis.outside import TrainedOutside
from farspan.execute.data_axis.window import Additions, Watcher, Window, additions_of
from farspan.execute.exchange import Exchange
from farspan.execute.weights.replicas import writes_parameters

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.comm.collectives import Collectives, Pending
    from farspan.control.groups.group_channel import GroupChannel
    from farspan.control.hub.divergence import Entry
    from farspan.execute.agreement.agreement import Agreement
    from farspan.execute.data_axis.recovery.operations import Operations
    from farspan.execute.running import Running
    from farspan.graph import Graph
    from farspan.program.program import Program

__all__ = ["Reduction"]

_T = TypeVar("_T")
_SAME_WINDOWS = (
    "let every group step as often as the others, each time after a backward and with the same hyperparameters: drop\n"
    "what is left over of the data (drop_last=True), and let schedules follow what is the same in all groups"
)


class Reduction(Groups):
    """The part of one rank in averaging over groups.

    Args:
        engine: This rank's.
        channel: Of its group.
        peers: The ranks at this one's position in all groups, by group.
        agreement: Of all ranks of all groups.
    """

    def __init__(self, engine: Running, channel: GroupChannel, peers: Collectives, agreement: Agreement) -> None:
        self.engine = engine
        self.channel = channel
        self.peers = peers
        self.everybody = channel.everybody
        self.agreement = agreement
        self.number = channel.number
        self.num_groups = self.first_num_groups = channel.num_groups
        self.recovery: Operations | None = None
        """Lets the groups that are whole go on when one is lost; None where all end then."""
        self._is_due = False
        """True if a backward of this group has run, or a gradient has been set, since the last window ended."""
        self._outside = TrainedOutside(self)
        self._settings = ""
        """Those of the optimizer that has stepped last, or is about to."""
        self.num_steps = 0
        self.num_windows = 0
        self.is_averaging = False
        """True while a window ends."""
        self._num_agreed = 0
        self._agreed_of_window = 0
        self._words = ""
        """What this rank has agreed on last, or is about to."""
        self._touched: dict[str, None] = {}
        """Own parameters to whose gradients something has been added since then."""
        self._layout: tuple[bytes, list[Bucket]] | None = None
        """The latest one, and of which parameters it is."""
        self._window: Window | None = None
        """The window, while gradients are on their way and a step runs."""
        self._watcher = Watcher(lambda: self._window)
        self.watch = self._watcher.watch
        self._where = ""
        self._batches = Batches(channel, agreement, engine.console)
        self.everybody.history = self._history
        engine.after_step.append(self._stepped)

    @property
    def outside(self) -> TrainedOutside:
        return self._outside

    @property
    def is_due(self) -> bool:
        """Returns whether there is something to average."""
        return self._is_due or self.outside.is_due

    @property
    def outlives_losses(self) -> bool:
        """Returns whether a collective that fails may be one with a group that is lost."""
        return self.recovery is not None

    def take_agreement(self, agreement: Agreement) -> None:
        """Agree by this one from here on."""
        self.agreement = agreement
        self._batches = Batches(self.channel, agreement, self.engine.console)

    def regroup(self, peers: Collectives) -> None:
        """Go on with the groups that are left, of which the channel knows.

        Args:
            peers: The ranks at this one's position in them.
        """
        self.peers, self.everybody = peers, self.channel.everybody
        self.number, self.num_groups = self.channel.number, self.channel.num_groups
        self.engine.console.is_mute = self.number > 0
        self.everybody.history = self._history
        self._layout = None  # gloo may still hold its memory
        self._batches.end()

    def share_weights(self, items: Sequence[Placed]) -> None:
        """Let what this rank has been given to hold be what the first group's rank has been given."""
        if self.shards is not None:
            self.shards.add(items)
        own = [item for item in items if item.is_owned]
        with self.engine.executing():
            different = find_different(own, self.peers, self.wait)
            take_from_first(different, self.peers, self.wait)
            parts = self.agreement.gather_at(0, "weights that differ", "\n".join([i.name for i in different]).encode())
            names = [name for part in parts for name in part.decode().splitlines()]
            if names:
                first = f"{names[0]}{', ...' if len(set(names)) > 1 else ''}"
                self.engine.console.warn(
                    f"farspan: the groups have built {len(set(names))} parameters and buffers differently ({first}); "
                    "all train on from rank 0's."
                )

    # What happens before a window ends.

    def note(
        self, graphs: Sequence[Graph], program: Program, data: Callable[[], tuple[int, ...]], *, ends_window: bool
    ) -> None:
        """A step is about to run.

        Args:
            graphs: Which.
            program: What this rank runs of them.
            data: Finds checksums of the data that it is given.
            ends_window: Whether `end_window` is called next: what has been averaged by then need not be waited for.
        """
        engine, recorder = self.engine, self.engine.recorder
        if self.shards is not None and writes_parameters(graphs):
            self.begin_write("the program writes into parameters")
            engine.executor.replicas.on_end = self.end_write
        has_backward = any(backward.requested is None for graph in graphs for backward in graph.backwards)
        self._is_due |= has_backward
        additions = additions_of(program, engine.parameters)
        self._touched.update(dict.fromkeys(additions.last))
        self._batches.note(graphs, data())
        is_whole = not (recorder.hooks.are_there or recorder.runs_each_backward or program.has_several_workers)
        writes_gradients = any(value.gradient_of for graph in graphs for value in graph.sources)
        if ends_window and has_backward and is_whole and not writes_gradients:
            self._window = self._begin(additions)
            engine.executor.after_action = self._window.go_on

    def begin_write(self, what: str, names: Sequence[str] | None = None) -> None:
        """All groups are about to write into parameters, other than by a step: those of these names, or any."""
        if self.shards is not None:
            self.shards.begin_write(what, names)

    def end_write(self) -> None:
        """All groups have."""
        if self.shards is not None:
            self.shards.end_write()

    def touch(self, placed: Placed) -> None:
        """Something has been added to a gradient, or the program has set it."""
        self._is_due = True
        if placed.is_parameter and placed.is_owned:
            self._touched[placed.name] = None

    def note_step(self, optimizer: Optimizer, digest: int) -> None:
        """An optimizer is about to step, with settings of this digest: all groups have the same ones."""
        self._settings = f" ({settings_in_words(optimizer, digest)})"

    def _stepped(self) -> None:
        self.num_steps += 1

    # The end of a window.

    @property
    def has_begun(self) -> bool:
        """Returns whether gradients are on their way while a step runs: it must not end with an exception."""
        return self._window is not None

    def end_window(self, *, has_passed_barrier: bool) -> None:
        """Average what has been added, if anything has; all ranks of all groups call it.

        Args:
            has_passed_barrier: Whether the ranks of this group have just agreed that they come here.
        """
        if not self.is_due:
            return
        engine = self.engine
        engine.check()
        if not has_passed_barrier:
            engine.barrier("gradients are averaged over the groups")
        with engine.executing():
            window = self._window or self._begin(Additions())
            self._window = None
            written = [item for item in engine.parameters.values() if item.is_written and item.is_owned]
            buffers = [item for item in written if not item.is_parameter]
            if self.recovery is None:
                self.everybody.wait_agreed(self._agreed_of_window, engine.deadline_s)
                window.end()
                self.outside.window(window.number).end()
                take_from_first(buffers, self.peers, self.wait)
            else:
                self._average_or_recover(window, buffers, self.recovery)
            self._compare_weights(window.number)
            self._batches.end_window(window.number)
            self._tell_group()

    def _begin(self, additions: Additions) -> Window:
        """Begins a window in all groups; a rank of one that does not begin it gets to know of it.

        Args:
            additions: Of the step that is about to run.
        """
        number, self.num_windows = self.num_windows, self.num_windows + 1
        words = f"gradients are averaged over the groups, after {self.num_steps} steps of optimizers{self._settings}"
        if self.recovery is None:
            self._agreed_of_window = self._start(words)
        else:
            self._where, self._words = format_where(find_where()), words
            self.recovery.begin(key_of(words))
        return self._window_of(number, additions)

    def _window_of(self, number: int, additions: Additions) -> Window:
        own = [item for item in self.engine.parameters.values() if item.is_parameter and item.is_owned]
        return Window(number, own, self._touched, additions, self)

    def _average_or_recover(self, window: Window, buffers: Sequence[Placed], recovery: Operations) -> None:
        """Average on all groups that are left, or on none: until all know that all sums are there, nothing changes."""
        received: list[tuple[Placed, torch.Tensor]] = []
        outside: Window | None = None

        def complete() -> None:
            nonlocal outside
            window.complete()
            outside = self.outside.window(window.number)
            outside.complete()
            received[:] = data_of_first(buffers, self.peers, self.wait)

        def again() -> None:
            nonlocal window
            window = self._window_of(window.number, Additions())

        self.is_averaging = True
        recovery.commit(complete, again)
        self.is_averaging = False
        assert outside is not None
        window.spread()
        outside.spread()
        write(received)

    def _compare_weights(self, number: int) -> None:
        """The groups began with the same weights, and have stepped with the same gradients.

        Args:
            number: Of the window that ends: not in all of them everything is compared.
        """
        own: list[Placed] = []
        is_compared = number & (number - 1) == 0 or number % COMPARED_EVERY == 0
        if is_compared:
            own = [item for item in self.engine.parameters.values() if item.is_trained and item.is_owned]
        if self.shards is not None:
            own = [item for item in own if not self.shards.is_divided_parameter(item)]
        items: list[Trained] = [*own, *self.outside.to_compare(compares_all=is_compared)]
        different = self._together(lambda: find_different(items, self.peers, self.wait, sample_of))
        if different:
            raise groups_differ("weights", different, f"{self.num_steps} steps, at {self._where}")

    def _start(self, words: str) -> int:
        """Says to all ranks of all groups what this one begins; returns the number by which to wait for them."""
        number, self._num_agreed = self._num_agreed, self._num_agreed + 1
        self._where, self._words = format_where(find_where()), words
        self.everybody.start(number, key_of(words))
        return number

    def agree(self, what: str) -> None:
        """Returns when all ranks of all groups are about to do the same, for which they need each other."""
        number = self._start(f"{what}, after {self.num_steps} steps of optimizers{self._settings}")
        with self.engine.executing():
            self.everybody.wait_agreed(number, self.engine.deadline_s)

    def mean(self, result: Any) -> Any:
        """Returns what a closure has returned, a number or a tensor of one element, averaged over the groups."""
        if result is None:
            return None

        def average() -> torch.Tensor:
            total = torch.tensor([float(result)], dtype=torch.float64)
            self.wait(self.peers.sum(total))
            return total[0] / self.num_groups

        with self.engine.executing():
            mean = self._together(average)
        return mean.to(result.dtype) if isinstance(result, torch.Tensor) else mean.item()

    def _together(self, act: Callable[[], _T]) -> _T:
        """Returns what all groups do together, those that are left if one is lost."""
        return act() if self.recovery is None else self.recovery.together(act)

    def _tell_group(self) -> None:
        """Shares in the group which gradients there are, which may have changed."""
        engine = self.engine
        self._is_due = False
        self._touched.clear()
        self.outside.end()
        engine.recorder.gradients.forget()
        if self.channel.world_size > 1:
            key = f"gradients after window {self.num_windows}"
            exchange = Exchange(engine.side, key, scalars=(), owner_of=(), deadline_s=engine.deadline_s)
            exchange.contribute((), mask=engine.masks.own(), busy_s=0.0)
            engine.masks.begin(exchange)
        engine.values.advance()  # who asks for a gradient now gets the averaged one

    @property
    def buckets(self) -> list[Bucket]:
        """Returns the buckets of the latest window."""
        return [] if self._layout is None else self._layout[1]

    def buckets_of(self, own: Sequence[Trained], mask: bytes) -> list[Bucket]:
        """Returns how the gradients of parameters are laid out.

        Args:
            own: This rank's parameters.
            mask: For each of them whether it takes part.
        """
        if self._layout is None or self._layout[0] != mask:
            self._layout = (mask, bucket_layout([placed for placed, is_in in zip(own, mask, strict=True) if is_in]))
        return self._layout[1]

    def wait(self, work: Pending) -> None:
        """Return when a collective is over.

        Raises:
            DeadlineError: Another group has not come in time.
        """
        with self.everybody.waits.until(lambda: "to average gradients", {"step": self.num_windows - 1}):
            try:
                work.wait(self.engine.deadline_s)
            except TimeoutError as error:
                raise DeadlineError(
                    f"group {self.number} waited {self.engine.deadline_s:g} s for another one to average "
                    f"gradients, at {self._where}.",
                    why="a rank at the same position of another group is stopped, or cannot be reached.",
                    hint="look at the logs of the other ranks; FARSPAN_DEADLINE=seconds allows longer waits",
                ) from error

    def _history(self, step: int) -> list[Entry]:
        return [(key_of(self._words), f"{self._words}, at {self._where}", _SAME_WINDOWS)]

    def abort(self) -> None:
        """Ends all averaging: this rank or another has failed."""
        self.peers.abort()
        if self.shards is not None:
            self.shards.abort()

    def close(self) -> None:
        """The program is over."""
        self._watcher.close()
        self.peers.close()
