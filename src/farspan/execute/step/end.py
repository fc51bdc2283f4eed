"""The end of a step: all ranks have run it, or all raise the exception that the user code of one of them has raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farspan.execute.abort.aborted import end_aborted, report_of
from farspan.execute.abort.interruption import Interruption
from farspan.execute.abort.order import Place, place_of_call
from farspan.execute.exchange import Exchange, PaceNote
from farspan.execute.step.step_record import StepRecord
from farspan.graph import Graph, Value
from farspan.record.parameters.outside_tensors import go_on

if TYPE_CHECKING:
    from farspan.execute.running import Running
    from farspan.program.options import Settings
    from farspan.program.program import Program

__all__ = ["StepEnd", "changes_state"]


class StepEnd:
    """The end of one step, on one rank.

    Args:
        engine: This rank's.
        step: Its number.
        graphs: What was recorded.
        drawn_at: Before which calls of which graphs the program itself has drawn random numbers.
    """

    def __init__(
        self, engine: Running, step: int, graphs: Sequence[Graph], drawn_at: Sequence[tuple[int, int]]
    ) -> None:
        self.engine = engine
        self.step = step
        self.graphs = graphs
        self.drawn_at = drawn_at
        self.interruption = Interruption(engine.values.halts, step, graphs, engine.parameters, engine.check)
        self.exchange: Exchange
        self._has_backward = any(graph.backwards for graph in graphs)
        self._scalars: list[Value] = []

    def begin(self) -> None:
        """The step is about to run: what all learn at its end is kept until then."""
        self._scalars = _scalars_of(self.graphs)
        self.engine.executor.clock = self.engine.pace.begin_step() if self._has_backward else None
        self.exchange = self._new_exchange(f"step {self.step}")

    def contribute(self, program: Program) -> None:
        """Contributes what this rank reports of the step, which it has run as far as it goes.

        Args:
            program: Of this rank.
        """
        if self.interruption.has_ended:
            self.exchange.report(report_of(self.engine, self.interruption, self.graphs, self.drawn_at))
        elif self._has_backward:
            self._contribute(self.engine.pace.note(self.graphs, program, self.engine.executor.traces))
        else:
            self._contribute(PaceNote())

    def wait(self) -> list[bytes]:
        """Return when all ranks have run it: what they report of an exception, by rank; [] if there was none."""
        reports = self.exchange.reports()
        if not reports:
            if self._has_backward and self.engine.pace.on_steps is not None:
                self.engine.pace.add(self.exchange.paces())
            self._take_masks()
        return reports

    def record(self, program: Program, settings: Settings, began_ns: int) -> StepRecord:
        """Returns the record of the step, which has run."""
        engine = self.engine
        return StepRecord(
            number=self.step,
            rank=engine.rank,
            num_micro_batches=program.num_micro_batches,
            has_backward=self._has_backward,
            began_ns=began_ns,
            traces=tuple(engine.executor.traces),
            exchange=self.exchange,
            schedule=program.schedule,
            settings=settings,
        )

    def go_on(self) -> None:
        """Go on with the backwards in what lies outside the model."""
        for backward in [backward for graph in self.graphs for backward in graph.backwards]:
            arrived = self.engine.executor.arrived.pop(backward, ())
            if arrived or backward.stops is not None:
                go_on(backward, arrived)

    def abort(self, program: Program, reports: Sequence[bytes]) -> Exception:
        """Go back to where the exception was raised.

        Args:
            program: Of this rank.
            reports: Of all ranks.

        Returns:
            The exception, for the program.
        """
        engine = self.engine
        self.exchange.drop()
        with engine.executing():
            error, place = end_aborted(engine, self.interruption, program, self.graphs, reports)
            self._scalars = [value for value in self._scalars if _comes_before(value, place)]
            self.exchange = self._new_exchange(f"step {self.step}, up to an exception")
            self._contribute(PaceNote())
        self.exchange.resolve()
        self._take_masks()
        engine.values.halts.end(self.step)
        engine.settle(self.graphs, program)
        engine.values.advance()
        for act in tuple(engine.after_abort):
            act()
        return error

    def _new_exchange(self, key: str) -> Exchange:
        engine = self.engine
        owners = [engine.owner_of(value) for value in self._scalars]
        return Exchange(engine.side, key, scalars=self._scalars, owner_of=owners, deadline_s=engine.deadline_s)

    def _contribute(self, pace: PaceNote) -> None:
        """Give all ranks this rank's scalars, which of its parameters have a gradient, and how long it has worked."""
        engine = self.engine
        tasks = [trace for trace in engine.executor.traces if trace.kind != "wait"]
        busy_s = sum([task.end_ns - task.start_ns - task.waited_ns for task in tasks]) / 1e9
        self.exchange.contribute(
            [value for value in self._scalars if engine.is_mine(value)],
            mask=engine.masks.own() if self._has_backward else b"",
            busy_s=busy_s,
            pace=pace,
        )

    def _take_masks(self) -> None:
        if self._has_backward:
            self.engine.masks.begin(self.exchange)
            self.engine.recorder.gradients.forget()


def _comes_before(value: Value, place: Place) -> bool:
    return value.call is not None and place_of_call(value.call) < place


def _scalars_of(graphs: Sequence[Graph]) -> list[Value]:
    """Results of one element that are not merely a step towards something larger: losses, norms, counts."""
    found: dict[Value, None] = {}
    inner: set[Value] = set()
    for graph in graphs:
        for segment in graph.segments:
            for call in segment.calls:
                outputs = call.outputs
                if len(outputs) == 1 and outputs[0].meta.numel == 1:
                    found[outputs[0]] = None
                elif all(value.meta.numel == 1 for value in outputs):
                    found.update(dict.fromkeys(outputs))
                elif call.arguments is not None:
                    inner.update([item for item in call.arguments if type(item) is Value and item.meta.numel == 1])
    return [value for value in found if value not in inner]


def changes_state(graphs: Sequence[Graph]) -> bool:
    """Returns whether running the graphs writes into what other ranks can read: gradients, parameters, running
    statistics."""
    return any(
        call.entry.mutated or getattr(call.target, "has_buffers", False) for graph in graphs for call in graph.calls
    )
