"""Executes a rank's program: post receives a few tasks ahead, wait, run, send, never waiting for a send."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from farspan.errors import FarspanError
from farspan.graph import Backward, Edge, Meta, Part, Segment, Value
from farspan.lazy import Placed, apply_modes
from farspan.runtime.abort import Interruption
from farspan.runtime.abort.order import Place, place_of_call
from farspan.runtime.backward import Deferred
from farspan.runtime.program import Bundle, Program, Step
from farspan.runtime.step.channel import Channels
from farspan.runtime.step.remat import Remat
from farspan.runtime.step.segment import run_backward, run_forward
from farspan.schedule import Kind

__all__ = ["Executor", "Trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One stretch of a rank's time."""

    kind: Literal["F", "B", "W", "wait"]
    name: str
    micro_batch: int
    start_ns: int
    end_ns: int


class Executor:
    """Runs programs on one rank."""

    def __init__(
        self,
        channels: Channels,
        *,
        parameters: Mapping[str, Placed],
        device_of: Callable[[int], torch.device],
        check: Callable[[], None],
    ) -> None:
        self.channels = channels
        self.parameters = parameters
        self.device_of = device_of
        self.check = check
        """Raises if another rank has failed."""
        self.remat = Remat()
        self.gradients: dict[Edge, torch.Tensor] = {}
        self.deferred: dict[Part, Deferred] = {}
        """What backwards have left for later, in their order."""
        self.arrived: dict[Backward, list[tuple[Value, torch.Tensor]]] = {}
        """Gradients of tensors outside the model."""
        self.traces: list[Trace] = []
        self.interruption: Interruption
        """Of the step that runs; none between steps, for it knows what has run."""
        self._running: Program | None = None
        self._number = 0
        """Of the task that runs, or that is to run next."""

    def run(self, program: Program, interruption: Interruption) -> None:
        """Run all steps of `program`; where the user's code raises an exception, what comes before that in the
        program's order.
        """
        self.interruption = interruption
        with self.remat.running(program):
            self._running, self._number = program, 0
            self._run(program)
            self._running = None
            if interruption.has_ended:
                self.remat.forget()
                self.deferred.clear()
                self.gradients.clear()
        del self.interruption

    def _run(self, program: Program) -> None:
        self.traces = []
        self.gradients = {edge: item for edge, item in self.gradients.items() if edge.dst.backward.stops is not None}
        self.deferred = {}
        self.arrived = {}
        if program.gpu_channels:
            self.channels.prepare(program.gpu_channels)
        for step in program.steps:
            if isinstance(step.work, Segment):
                for value in step.work.inputs:
                    value.num_readers += 1
            for value in _values_in(step.sends):
                value.num_readers += 1
        for bundle in program.prologue_receives:
            self._post(bundle)
        for bundle in program.prologue_sends:
            self._send(bundle)
        for bundle in program.prologue_receives:
            self._wait(bundle, "before the first task")
        borrowed: list[Bundle] = []
        for number, step in enumerate(program.steps):
            self._number = number
            self.check()
            for bundle in step.posts:
                self._post(bundle)
            if step.receives:
                began = time.perf_counter_ns()
                for bundle in step.receives:
                    self._wait(bundle, f"at task {number} ({step.work.describe()})")
                    borrowed.append(bundle)
                self._trace("wait", step, began)
            self.channels.reap()
            began = time.perf_counter_ns()
            self._run_step(step)
            self._trace(step.kind.value, step, began)
            for bundle in step.sends:
                self._send(bundle)
            for value in _values_in(step.sends):
                value.num_readers -= 1
                _drop_if_over(value)
            if isinstance(step.work, Segment):
                self._drop_received(step.work)
        if program.prologue_sends:
            self.channels.drain()  # parameters and gradients, which the optimizer is about to write
        for bundle in [*borrowed, *program.prologue_receives]:
            for item in bundle.items:
                if isinstance(item, Value):
                    item.data = None

    def describe_place(self) -> str:
        """Which task of how many this rank is at; "" between steps. Another thread may ask."""
        program, number = self._running, self._number
        if program is None or number >= len(program.steps):
            return ""
        step = program.steps[number]
        return f"task {number + 1} of {len(program.steps)}: {step.kind.value} of {step.work.describe()}"

    def take(self, edge: Edge) -> torch.Tensor | None:
        """The gradient on `edge`, where a backward has stopped; None on the ranks that do not have it."""
        return self.gradients.pop(edge, None)

    def put(self, edge: Edge, gradient: torch.Tensor) -> None:
        """Let a backward that has stopped go on with `gradient`."""
        self.gradients[edge] = gradient

    def drop(self, backward: Backward) -> None:
        """A backward that has stopped does not go on any more."""
        self.gradients = {edge: item for edge, item in self.gradients.items() if edge.dst.backward is not backward}

    def _run_step(self, step: Step) -> None:
        end = self.interruption.end_before(step.work)
        try:
            if end is not None:
                if isinstance(step.work, Segment):
                    self._run_before(step.work, end)
            elif isinstance(step.work, Segment):
                self._forward(step.work)
            elif step.kind is Kind.WEIGHT:
                self._run_weights(step.work)
            else:
                self.interruption.begin_part(step.work, leaves_weights=step.leaves_weights)
                self._backward(step.work, leaves_weights=step.leaves_weights)
        except FarspanError:
            raise
        except Exception as error:
            self.interruption.note(error, step.work)

    def _forward(self, segment: Segment) -> None:
        device, interruption = self.device_of(segment.stage), self.interruption
        run_forward(segment, device, self.remat.around, before=interruption.begin_call)
        segment.executed = True

    def _run_before(self, segment: Segment, end: Place) -> None:
        """Run those calls of `segment` that come before `end`."""
        chosen = {call for call in segment.calls if place_of_call(call) < end}
        if chosen:
            device, interruption = self.device_of(segment.stage), self.interruption
            run_forward(segment, device, self.remat.around, before=interruption.begin_call, chosen=chosen)

    def _backward(self, part: Part, *, leaves_weights: bool) -> None:
        if self.remat.modules:
            for earlier in list(self.deferred):  # they hold what has been computed again: of one backward at most
                self._run_weights(earlier)
        device = self.device_of(part.stage)
        incoming = {edge: self.gradients.pop(edge).to(device) for edge in part.incoming}
        if part.brings_outside:
            arrived = self.arrived.setdefault(part.backward, [])
            arrived += [(edge.key, gradient) for edge, gradient in incoming.items() if isinstance(edge.key, Value)]
            return
        outgoing, deferred = run_backward(
            part, incoming, self.parameters, leaves_weights=leaves_weights, before=self._run_weights_before
        )
        self.gradients.update(outgoing)
        if deferred is not None:
            self.deferred[part] = deferred

    def _run_weights(self, part: Part) -> None:
        """Compute the weight gradients that `part` has left, if it has and they have not been computed since."""
        deferred = self.deferred.pop(part, None)
        if deferred is not None:
            with apply_modes(part.backward.modes):
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
            _drop_if_over(value)
            users = value.num_users
            if users > 0:
                value.num_users = users - 1
                if users == 1:
                    value.data = None

    def _post(self, bundle: Bundle) -> None:
        metas, stage = self._metas(bundle)
        self.channels.post(bundle, metas, self.device_of(stage))

    def _wait(self, bundle: Bundle, where: str) -> None:
        metas, _ = self._metas(bundle)
        self.channels.wait(bundle, metas, lambda: f"rank {self.channels.rank}, {where},")
        device = self.device_of(bundle.stage)
        for item, received in zip(bundle.items, bundle.tensors, strict=True):
            tensor = received.to(device)
            if isinstance(item, Value):
                item.data = tensor
            else:
                self.gradients[item] = tensor
        bundle.tensors.clear()

    def _send(self, bundle: Bundle) -> None:
        metas, _ = self._metas(bundle)
        self.channels.send(bundle, [self._to_send(item, bundle) for item in bundle.items], metas)

    def _to_send(self, item: Value | Edge, bundle: Bundle) -> torch.Tensor:
        tensor = item.data if isinstance(item, Value) else self.gradients.pop(item, None)
        if tensor is None:
            assert self.interruption.has_ended, f"{item.describe()} is not here"
            device = item.meta.device if bundle.is_between_gpus else "cpu"
            return torch.zeros(item.meta.shape, dtype=item.meta.dtype, device=device)  # nobody will use it
        if isinstance(item, Value):  # a parameter's gradient may be written into while it is on its way
            tensor = tensor.detach().clone() if item.gradient_of else tensor.detach()
        return tensor

    def _metas(self, bundle: Bundle) -> tuple[Sequence[Meta], int]:
        metas = [item.meta for item in bundle.items]
        return metas, bundle.stage

    def _trace(self, kind: Literal["F", "B", "W", "wait"], step: Step, began_ns: int) -> None:
        self.traces.append(
            Trace(
                kind=kind,
                name=step.work.describe(),
                micro_batch=step.micro_batch,
                start_ns=began_ns,
                end_ns=time.perf_counter_ns(),
            )
        )


def _values_in(bundles: Sequence[Bundle]) -> list[Value]:
    return [item for bundle in bundles for item in bundle.items if isinstance(item, Value)]


def _drop_if_over(value: Value) -> None:
    """Release data that nothing on this rank takes any more: no segment, no message, no backward."""
    if value.num_readers > 0 or value.is_held or value.call is None or value.data is None:
        return
    if not value.data.requires_grad:  # it never did, or a backward has gone through it
        value.data = None
