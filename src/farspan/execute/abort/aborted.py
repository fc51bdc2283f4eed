"""The end of a step in which the user's code has raised an exception: the same one on all ranks, and the same state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from farspan.call.wire.checked import damaged
from farspan.call.wire.exceptions import exception_from_json, exception_to_json, sendable
from farspan.errors import RecordError
from farspan.execute.abort.interruption import Interruption, Raised
from farspan.execute.abort.order import Place, place_of_backward, place_of_call, place_of_part
from farspan.graph import Call, Graph, Value, whole_name
from farspan.record.parameters.outside_tensors import go_on

if TYPE_CHECKING:
    from farspan.execute.running import Running
    from farspan.program.program import Program

__all__ = ["check_computed", "end_aborted", "mark_raised_by", "rank_that_raised", "report_of"]

_RAISED_BY = "_farspan_rank"
"""The attribute of an exception that says on which other rank it was raised."""

_Position = tuple[int, int]


def report_of(
    engine: Running, interruption: Interruption, graphs: Sequence[Graph], drawn_at: Sequence[_Position]
) -> bytes:
    """Returns this rank's report to all others of an exception that it has raised; b"" if it has raised none.

    Args:
        engine: This rank's.
        interruption: Of the step.
        graphs: What was recorded.
        drawn_at: Before which calls of which graphs the program itself has drawn random numbers.
    """
    raised = interruption.raised
    if raised is None:
        return b""
    error = sendable(raised.error, _calls_at(raised.place, graphs))
    state = _generator_state(engine, raised, graphs, drawn_at)
    head = json.dumps([raised.place, exception_to_json(error).decode(), raised.call.describe()]).encode()
    return len(head).to_bytes(8, "little") + head + (b"" if state is None else state.numpy().tobytes())


def end_aborted(
    engine: Running,
    interruption: Interruption,
    program: Program,
    graphs: Sequence[Graph],
    reports: Sequence[bytes],
) -> tuple[Exception, Place]:
    """Bring this rank to where the plain program is when the exception has been raised; which that is, and its place.

    Args:
        engine: This rank's.
        interruption: Of the step, which all ranks have run as far as it goes.
        program: Of this rank.
        graphs: What was recorded.
        reports: Of all ranks.
    """
    found: list[tuple[Place, int, str, str, bytes]] = []
    for rank, report in enumerate(reports):
        if report:
            found.append(_read_report(report, rank, graphs))
    place, rank, text, words, state = min(found)
    raised = interruption.raised
    if rank == engine.rank and raised is not None:
        error = sendable(raised.error, _calls_at(place, graphs))
        failed = raised.part if raised.is_in_pieces else None
    else:
        error, failed = exception_from_json(text.encode(errors="replace"), _calls_at(place, graphs)), None
        mark_raised_by(error, rank)
    interruption.undo.check(place, f"{type(error).__name__} in {words}")
    interruption.undo.undo(place, failed=failed, incomplete=_incomplete(program, place))
    for backward in [backward for graph in graphs for backward in graph.backwards]:
        arrived = engine.executor.arrived.pop(backward, ())
        if place_of_backward(backward) < place[:2]:
            go_on(backward, arrived)
    engine.recorder.draws.end_interrupted(torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else None)
    program.released = [call for call in program.released if _is_over(call, place)]
    _drop(graphs, place, f"{type(error).__name__} in {words}")
    return error, place


def _read_report(report: bytes, rank: int, graphs: Sequence[Graph]) -> tuple[Place, int, str, str, bytes]:
    end = 8 + int.from_bytes(report[:8], "little")
    try:
        place, text, words = json.loads(report[8:end])
    except (ValueError, TypeError, RecursionError):
        raise damaged("an exception of a step that is no JSON") from None
    graph = next((graph for graph in graphs if isinstance(place, list) and place and graph.index == place[0]), None)
    is_place = graph is not None and len(place) >= 2 and all(type(number) is int for number in place)
    if graph is None or not is_place or not (place[1] or (len(place) == 3 and 0 <= place[2] < len(graph.calls))):
        raise damaged("an exception of a step, at no place of it")
    if not isinstance(text, str) or not isinstance(words, str):
        raise damaged("an exception of a step, without its text")
    return tuple(place), rank, text, words, report[end:]


def mark_raised_by(error: BaseException, rank: int) -> None:
    """Let an exception be known as that of another rank, which shows its traceback itself."""
    vars(error)[_RAISED_BY] = rank


def rank_that_raised(error: BaseException) -> int | None:
    """Returns the other rank that has raised what `error` is, or is raised from; None if there is none."""
    cause: BaseException | None = error
    while cause is not None and _RAISED_BY not in vars(cause):
        cause = cause.__cause__
    return None if cause is None else vars(cause)[_RAISED_BY]


def check_computed(value: Value) -> None:
    """Raise if `value` comes from behind an exception.

    Raises:
        RecordError: It says which.
    """
    if value.call is not None and type(value.call.raised) is str:
        raise RecordError(
            f"{value.describe()} has not been computed.",
            why=f"the step that it belongs to has ended with {value.call.raised}.",
            hint="compute it again after the exception",
        )


def _drop(graphs: Sequence[Graph], end: Place, why: str) -> None:
    """Drops what comes at `end` and behind it: nothing of it can be read or differentiated."""
    for call in [call for graph in graphs for call in graph.calls]:
        if place_of_call(call) >= end:
            call.raised = why
            call.arguments = None
            for value in call.outputs:
                value.data = value.ticket = None


def _incomplete(program: Program, end: Place) -> set[str]:
    """Returns the parameters of this rank of which gradients were made on other ranks, or were to be, and will not
    come."""
    return {
        whole_name(part.brought)
        for part, _ in program.reductions
        if program.is_summed or place_of_part(part.incoming[0].src) == end
    }


def _is_over(call: Call, end: Place) -> bool:
    """Returns whether a backward before `end` has gone through `call`, which keeps nothing for another one."""
    return call.graph.index < end[0] or (call.graph.index == end[0] and end[1] > 0)


def _calls_at(place: Place, graphs: Sequence[Graph]) -> list[Call]:
    """Returns what may have raised an exception at `place`: a call, or all those whose backward it was."""
    graph = next(graph for graph in graphs if graph.index == place[0])
    return graph.calls if place[1] else [graph.calls[place[2]]]


def _generator_state(
    engine: Running, raised: Raised, graphs: Sequence[Graph], drawn_at: Sequence[_Position]
) -> torch.Tensor | None:
    """Returns the state of torch's generator, in the plain program, when the exception was raised; None for that before
    the step.
    """
    draws = engine.recorder.draws
    if not draws.is_plain:
        return None
    own = raised.call.draws
    if raised.part is None and own is not None and own.state is not None:
        return own.state
    calls = [call for graph in graphs for call in graph.calls if call.draws is not None and call.draws.end is not None]
    before = [call for call in calls if place_of_call(call) < raised.place]
    after = calls[len(before) :]
    end: _Position = (raised.place[0], raised.place[2] if not raised.place[1] else 1 << 62)
    seen = max([position for position in drawn_at if position <= end], default=None)
    if before and (seen is None or seen <= (before[-1].graph.index, before[-1].index)):
        return before[-1].draws.stretch.state_at(before[-1].draws.end)
    if after:
        return after[0].draws.stretch.state_at(after[0].draws.start)
    return draws.state() if before else None
