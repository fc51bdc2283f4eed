"""Executes a rank's program: posts receives a few tasks ahead, waits, runs, sends, and never waits for a send."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from farspan.call.leaf import Leaf, Placed
from farspan.call.modes import apply_modes
from farspan.comm.channels import Channels
from farspan.errors import FarspanError, RecordError
from farspan.execute.abort.interruption import Interruption
from farspan.execute.abort.order import Place, place_of_call
from farspan.execute.agreement.step_start import StepStart
from farspan.execute.backward.split import Deferred
from farspan.execute.backward.unsaved import release_inputs, release_unsaved
from farspan.execute.step.device_copies import DeviceCopies
from farspan.execute.step.pace import DeviceClock
from farspan.execute.step.rematerialized import Remat
from farspan.execute.step.segment import StageDevice, run_backward, run_forward
from farspan.execute.step.step_record import Trace
from farspan.execute.step.turns import in_turn
from farspan.execute.teams import device_of, on_device
from farspan.execute.weights.reductions import Reductions, add_gradients, as_absent, is_absent
from farspan.execute.weights.replicas import Replicas
from farspan.graph import Backward, BackwardSegment, Call, Edge, Segment, SliceName, Value
from farspan.program.program import Action, Message, Program
from farspan.schedule import Kind

__all__ = ["Executor"]


class Executor:
    """Runs programs on one rank."""

    measures = False
    """True of an executor that measures the units of a step: its steps take longer than later ones."""
    waited_ns = 0
    """How long this rank has waited in all for parameters that other groups hold, while tasks ran and between them."""

    def __init__(
        self,
        channels: Channels,
        *,
        parameters: Mapping[str, Placed],
        device_of: Callable[[Segment | BackwardSegment], torch.device],
        check: Callable[[], None],
        takes_cpu: Callable[[], bool] = lambda: False,
    ) -> None:
        self.channels = channels
        self.parameters = parameters
        self.device_of = device_of
        self.takes_cpu = takes_cpu
        """Returns whether stages have what the program has on the CPU, wherever they are: it has its model there."""
        self.check = check
        """Raises if another rank has failed."""
        self.remat = Remat()
        self.copies = DeviceCopies()
        self._has_several = False
        self.replicas = Replicas(parameters)
        self.gradients: dict[Edge, torch.Tensor | None] = {}
        self.deferred: dict[BackwardSegment, Deferred] = {}
        """Weight work that backwards have deferred, in their order."""
        self.arrived: dict[Backward, list[tuple[Any, torch.Tensor]]] = {}
        """Gradients of tensors outside the model."""
        self.passed_on: list[str] = []
        """The parameters of other ranks of which the program that ran last has made gradients, in that order."""
        self.traces: list[Trace] = []
        self.after_action: Callable[[int], None] | None = None
        """Called with the number of each action that has run; for one step, of one worker."""
        self.clock: DeviceClock | None = None
        """Notes how long devices take; for the step that runs."""
        self.interruption: Interruption
        """The interruption of the step that runs; none between steps, for it knows what has run."""
        self._start: StepStart | None = None
        """Of the step that runs, until it is announced."""
        self._before_gradients: Callable[[], None] = _nothing
        self._reductions: Reductions | None = None
        self._running: Program | None = None
        self._waited_before_ns = 0
        """`waited_ns` when the task that runs began."""
        self._has_slices = False
        self._number = 0
        """Number of the task that runs, or that is to run next."""

    def run(self, program: Program, interruption: Interruption, start: StepStart | None = None) -> None:
        """Run all steps of `program`; where the user's code raises an exception, what comes before that in the
        program's order.

        Args:
            program: Of this rank.
            interruption: Of the step.
            start: Announced when the first action has run and nothing waits for this rank, or when it would wait before
                that; and however the run ends.
        """
        self.interruption = interruption
        self._start = start
        self._before_gradients = _nothing if start is None else start.before_gradients
        try:
            self._run_all(program, interruption)
        finally:
            self._be_at_leisure()
        del self.interruption

    def _be_at_leisure(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            start.announce()

    def _run_all(self, program: Program, interruption: Interruption) -> None:
        with self.remat.running(program):
            self._running, self._number = program, 0
            self._run(program)
            self._running = None
            if interruption.has_ended:
                self.remat.forget()
                self.deferred.clear()
                self.gradients.clear()

    def _run(self, program: Program) -> None:
        self.traces, self.passed_on, self.deferred, self.arrived = [], [], {}, {}
        self.gradients = {edge: item for edge, item in self.gradients.items() if edge.dst.backward.stops is not None}
        for call in program.released:
            call.is_closing = True
        if program.gpu_channels:
            self.channels.open(program.gpu_channels)
        for action in program.actions:
            inputs = action.work.inputs if isinstance(action.work, Segment) else ()
            for value in [*inputs, *(value for message in action.sends for value in message.values)]:
                value.num_readers += 1
        self._has_slices = self.replicas.are_brief(program)
        if self._has_slices and self._start is not None:
            self._start.wait()  # so that replaced gradients go before slices come
        for message in program.prologue_receives:
            self._post(message)
        for message in program.prologue_sends:
            self._send(message)
        for message in program.prologue_receives:
            self._wait(message, "before the first task")
        self._reductions = None
        if program.reductions or program.carried:
            self._reductions = Reductions(
                program,
                self.gradients,
                post=self._post,
                take=lambda message: self._wait(message, "at the gradients of its parameters"),
                has_arrived=self.channels.has_arrived,
                add=self._reduce,
            )
        self._has_several = program.has_several_workers
        if self._has_several:
            self.copies.forget()
            self._run_in_turn(program.actions)
        elif program.actions:
            with on_device(self.device_of(program.actions[0].work)):
                for number, action in enumerate(program.actions):
                    self._number = number
                    self.check()
                    for message in action.posts:
                        self._post(message)
                    self._run_with_messages(action)
                    if self.after_action is not None:
                        self.after_action(number)
        self.after_action = None
        if self._reductions is not None:
            self._reductions.finish()
            self._reductions = None  # it knows what has run
        if program.prologue_sends:
            self.channels.drain()  # parameters and gradients, which the optimizer is about to write
        received = [message for action in program.actions for message in action.receives]
        for item in [item for message in [*received, *program.prologue_receives] for item in message.items]:
            if isinstance(item, Value):
                item.data = None

    def describe_place(self) -> str:
        """Returns which task of how many this rank is at; "" between steps. Another thread may ask."""
        program, number = self._running, self._number
        if program is None or number >= len(program.actions):
            return ""
        action = program.actions[number]
        return f"task {number + 1} of {len(program.actions)}: {action.kind.value} of {action.work.describe()}"

    def is_gradient_early(self, name: str) -> bool:
        """Returns whether a forward runs, and a backward that comes before it in the program and adds to the gradient
        of a parameter has not run yet."""
        program, number = self._running, self._number
        if program is None or program.has_several_workers or number >= len(program.actions):
            return False
        running = program.actions[number].work
        if not isinstance(running, Segment):
            return False
        later = [action.work for action in program.actions[number + 1 :]]
        parts = [work for work in later if isinstance(work, BackwardSegment)]
        earlier = [part for part in parts if part.backward.graph.index < running.graph.index]
        items = [item for part in earlier for item in part.accumulates_into]
        return any(name == item or (isinstance(item, Leaf) and name in item.parameter_names) for item in items)

    def take(self, edge: Edge) -> torch.Tensor | None:
        """Returns the gradient on `edge`, where a backward has stopped; None on the ranks that do not have it."""
        return self.gradients.pop(edge, None)

    def put(self, edge: Edge, gradient: torch.Tensor) -> None:
        """Let a backward that has stopped go on with `gradient`."""
        self.gradients[edge] = gradient

    def drop(self, backward: Backward) -> None:
        """A backward that has stopped does not go on any more."""
        self.gradients = {edge: item for edge, item in self.gradients.items() if edge.dst.backward is not backward}

    def _run_in_turn(self, actions: Sequence[Action]) -> None:
        """Run the actions of this rank's several workers."""
        has_arrived = self.channels.has_arrived
        for number, action in in_turn(actions, begin=self._begin, has_arrived=has_arrived, wait_any=self._wait_any):
            self._number = number
            self.check()
            with on_device(self.device_of(action.work)):
                self._run_with_messages(action)
                self.copies.note(action.work, self.device_of(action.work))

    def _begin(self, action: Action) -> None:
        """Post receives: this action is its worker's next one."""
        with on_device(self.device_of(action.work)):
            for message in action.posts:
                self._post(message)

    def _wait_any(self, actions: Sequence[Action]) -> None:
        """Return when all messages of one of `actions` are here."""
        self.check()
        self._be_at_leisure()
        began = time.perf_counter_ns()
        first = actions[0]
        where = f"rank {self.channels.rank}, before {first.kind.value} of {first.work.describe()},"
        self.channels.wait_any([action.receives for action in actions], lambda: where)
        self._trace("wait", first, began)

    def _run_with_messages(self, action: Action) -> None:
        if self._reductions is not None:
            self._reductions.advance()
        if action.receives:
            began = time.perf_counter_ns()
            for message in action.receives:
                self._wait(message, f"at task {self._number} ({action.work.describe()})")
            self._trace("wait", action, began)
        self.channels.reap()
        self._waited_before_ns, began = self.waited_ns, time.perf_counter_ns()
        if self.clock is not None:
            self.clock.begin(self.device_of(action.work))
        self._run_action(action)
        if self.clock is not None:
            self.clock.end()
        self._trace(action.kind.value, action, began)
        if action.sends:
            for message in action.sends:
                self._send(message)
            for value in [value for message in action.sends for value in message.values]:
                value.num_readers -= 1
                self._drop_if_over(value)
        if isinstance(action.work, Segment):
            self._drop_received(action.work)
        if self._start is not None:
            self._be_at_leisure()
        if self._reductions is not None:
            self._reductions.advance()

    def _run_action(self, action: Action) -> None:
        end = self.interruption.end_before(action.work)
        try:
            if end is not None:
                if isinstance(action.work, Segment):
                    self._run_before(action.work, end)
            elif isinstance(action.work, Segment):
                self._forward(action.work)
            elif action.kind is Kind.WEIGHT:
                self._run_weights(action.work)
            else:
                self._before_gradients()
                self._before_gradients = _nothing
                self.interruption.begin_part(action.work, leaves_weights=action.leaves_weights)
                self._backward(action.work, leaves_weights=action.leaves_weights)
        except FarspanError:
            raise
        except Exception as error:
            self._be_at_leisure()  # other ranks may wait for it, and this one is about to wait for them
            self.interruption.note(error, action.work)

    def _forward(self, segment: Segment) -> None:
        on, around, before = self._on(segment), None, self.interruption.begin_call
        if self.remat.is_used:
            around, before = self.remat.around, self.remat.followed(before)
        if self.replicas.tensors:
            self.replicas.bring(segment, on.device)
        run_forward(segment, on, around, before=before)
        if self._followed is not None:
            release_inputs(segment, self._followed)
        segment.executed = True

    def _run_before(self, segment: Segment, end: Place) -> None:
        """Run those calls of `segment` that come before `end`."""
        chosen = {call for call in segment.calls if place_of_call(call) < end}
        if chosen:
            on, interruption = self._on(segment), self.interruption
            if self.replicas.tensors:
                self.replicas.bring(segment, on.device)
            run_forward(segment, on, before=interruption.begin_call, chosen=chosen)

    @property
    def _followed(self) -> Callable[[Call], bool] | None:
        is_known = self.remat.has_operations and not self.interruption.has_ended
        return self.remat.is_followed if is_known else None

    def _reduce(self, parts: Sequence[BackwardSegment]) -> None:
        """Add gradients that have arrived at their owner, all of one backward."""
        parts = [part for part in parts if self.interruption.end_before(part) is None]
        found = [(part.incoming[0], self._on(part)) for part in parts]
        arrived = [(edge, on, self.gradients.pop(edge)) for edge, on in found]
        gradients = [
            None if item is None else on.brought(item, edge.meta.device, edge.src) for edge, on, item in arrived
        ]
        for part in parts:
            self.interruption.begin_part(part, leaves_weights=False)
        try:
            if parts:
                add_gradients(parts, gradients, self.parameters)
        except FarspanError:
            raise
        except Exception as error:
            self.interruption.note(error, parts[0])

    def _backward(self, part: BackwardSegment, *, leaves_weights: bool) -> None:
        for earlier in list(self.deferred) if self.remat.is_used else ():  # what they hold has been computed again:
            self._run_weights(earlier)  # of one backward at most
        on = self._on(part)
        if part.segment is not None and self.replicas.tensors:
            self.replicas.bring(part.segment, on.device)
        found = [(edge, self.gradients.pop(edge)) for edge in part.incoming]
        incoming = {
            edge: None if item is None else on.brought(item, edge.meta.device, edge.src) for edge, item in found
        }
        if part.brings_outside:
            arrived = self.arrived.setdefault(part.backward, [])
            arrived += [(edge.key, item) for edge, item in incoming.items() if item is not None]  # all are of values
            return
        outgoing, deferred = run_backward(
            part, incoming, self.parameters, on, leaves_weights=leaves_weights, before=self._run_weights_before
        )
        self.gradients.update(outgoing)
        self.passed_on += [edge.key for edge in outgoing if isinstance(edge.key, str)]
        if self._reductions is not None:
            self._reductions.carry(outgoing)
        if deferred is not None:
            self.deferred[part] = deferred

    def _run_weights(self, part: BackwardSegment) -> None:
        """Compute the weight gradients that `part` has left, if it has and they have not been computed since."""
        deferred = self.deferred.pop(part, None)
        if deferred is not None:
            with apply_modes(self._on(part).modes(part.backward.modes)):
                deferred.run()

    def _run_weights_before(self, accumulators: Collection[Any]) -> None:
        """These parameters get a gradient now: what earlier micro-batches left for them has to come first."""
        parts = list(self.deferred)
        late = [
            number for number, part in enumerate(parts) if not self.deferred[part].accumulators.isdisjoint(accumulators)
        ]
        for part in parts[: late[-1] + 1] if late else []:
            self._run_weights(part)

    def _drop_received(self, work: object) -> None:
        """The autograd graph holds what it needs; what no later segment of this rank wants can go."""
        assert isinstance(work, Segment)
        for value in work.inputs:
            value.num_readers -= 1
            self._drop_if_over(value)
            if self._has_slices:
                self.replicas.release_used(value)
            users = value.num_users
            if users > 0:
                value.num_users = users - 1
                if users == 1:
                    value.data = None

    def _drop_if_over(self, value: Value) -> None:
        if not value.drop_if_over() and (is_followed := self._followed) is not None:
            release_unsaved(value, is_followed)

    def _post(self, message: Message) -> None:
        self.channels.post(message, message.metas, device_of(message.channel.target))

    def _wait(self, message: Message, where: str) -> None:
        self._be_at_leisure()
        self.channels.wait(message, message.metas, lambda: f"rank {self.channels.rank}, {where},")
        on = StageDevice(device_of(message.channel.target), self.takes_cpu())
        for item, received in zip(message.items, message.tensors, strict=True):
            if isinstance(item, Value):
                item.data = received.to(on.of(item.meta.device))
                if message.channel.is_of_parameters:
                    self.replicas.put(item, message.channel.target.device)
            else:  # looked at in the host's memory, before it goes to its device
                may_be_absent = not message.is_between_gpus and received.reshape(-1)[:1].isnan().any()
                is_there = not (may_be_absent and is_absent(received))
                self.gradients[item] = received.to(on.of(item.meta.device)) if is_there else None
        message.tensors.clear()

    def _send(self, message: Message) -> None:
        self.channels.send(message, [self._to_send(item, message) for item in message.items], message.metas)

    def _to_send(self, item: Value | Edge, message: Message) -> torch.Tensor:
        if isinstance(item, Edge) and self.gradients.get(item, ...) is None:
            return as_absent(item, message)
        tensor = item.data if isinstance(item, Value) else self.gradients.pop(item, None)
        if tensor is None:
            assert self.interruption.has_ended, f"{item.describe()} is not here"
            device = device_of(message.channel.source) if message.is_between_gpus else "cpu"
            return torch.zeros(item.meta.shape, dtype=item.meta.dtype, device=device)  # nobody will use it
        if tensor.layout is not torch.strided:
            raise RecordError(
                f"the {item.describe()} is sparse.",
                why="the parameter belongs to another rank, to which sparse gradients are not sent.",
                hint="nn.Embedding(sparse=True), placed as a module, or a dense gradient",
            )
        if isinstance(item, Value):  # a parameter's gradient may be written into while it is on its way
            tensor = tensor.detach().clone() if item.gradient_of else tensor.detach()
        if message.is_between_gpus:
            tensor = tensor.to(device_of(message.channel.source))  # what the program has on the CPU
        is_slice = isinstance(item, Value) and type(item.name) is SliceName
        return tensor.contiguous() if is_slice else tensor  # else it would take memory for all between its columns

    def _on(self, work: Segment | BackwardSegment) -> StageDevice:
        return StageDevice(self.device_of(work), self.takes_cpu(), self.copies if self._has_several else None)

    def _trace(self, kind: Literal["F", "B", "W", "wait"], action: Action, began_ns: int) -> None:
        name, ended_ns = action.work.title, time.perf_counter_ns()
        waited_ns = 0 if kind == "wait" else self.waited_ns - self._waited_before_ns
        self.traces.append(Trace(kind, name, action.micro_batch, action.queue, began_ns, ended_ns, waited_ns))


def _nothing() -> None:
    """Does nothing: no released gradients are here that have to go before new ones are made."""
