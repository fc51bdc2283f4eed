"""Broadcasts the result of a call that could not be foreseen, from the rank that has run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.call.wire.checked import damaged
from farspan.execute.abort.aborted import mark_raised_by
from farspan.execute.agreement.names import agree_on_names
from farspan.execute.step.generator_states import load_generators, save_generators
from farspan.record.across_ranks.resolved_calls import resolve_from_text, text_for_others

if TYPE_CHECKING:
    from farspan.execute.running import Running
    from farspan.graph import Call

__all__ = ["broadcast_result"]


def broadcast_result(engine: Running, call: Call, *, is_foreseen: bool) -> None:
    """Let all ranks know what `call` gives, but for the data, and where it has left the random generators.

    Args:
        engine: This rank's.
        call: Has run, at its owner.
        is_foreseen: Whether its result is known already, and only the generators are not.
    """
    owner = engine.teams[call.stage].member(call.graph.turn).rank
    place, blob = call.draws, b""
    if owner == engine.rank:
        text = b"" if is_foreseen else text_for_others(call)
        states = save_generators(place.state) if place is not None and place.has_moved else b""
        blob = len(text).to_bytes(8, "little") + text + states
    blob = engine.agreement.broadcast("what a call gives", blob, owner)
    end = 8 + int.from_bytes(blob[:8], "little")
    if end > len(blob):
        raise damaged("what a call gives, without its end")
    entry = blob[8:end].partition(b"\n")[2]
    if not is_foreseen and entry:
        agree_on_names(engine.agreement, entry, call.target)
    if owner != engine.rank and not is_foreseen:
        resolve_from_text(call, blob[8:end])
        if call.raised is not None:
            mark_raised_by(call.raised, owner)
    if len(blob) > end:
        load_generators(blob[end:], engine.recorder.draws.set_agreed)
