"""Texts of the side channel: names of ranks, shortened texts, and the errors that come from other ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from farspan.control.tree.numbers import ancestors
from farspan.control.wire import LINK_DEAD_S
from farspan.errors import DeadlineError, DivergenceError, FarspanError, RemoteError
from farspan.launch.raised.tracebacks import format_error, format_stack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farspan.control.wire import Header

__all__ = [
    "EACH_OTHER",
    "answer_error",
    "as_error",
    "clip_head",
    "clip_tail",
    "deadline_error",
    "describe_death",
    "describe_failure",
    "describe_large_gather",
    "describe_left_behind",
    "describe_lost_link",
    "describe_silent_hub",
    "described",
    "ended_error",
    "first_line",
    "fresh",
    "name_ranks",
    "place_of",
    "stack_of",
]

MAX_TEXT = 4_000
MAX_TRACEBACK = 40_000
_MAX_FRAMES = 16
EACH_OTHER = (
    "every rank makes the calls that all ranks make together, also the one that has nothing to give: "
    "farspan.from_rank(0, None)"
)
"""What to try where two ranks wait for each other."""


def is_answering(failure: BaseException) -> bool:
    """Returns whether the rank whose failure it is has raised and told it itself: it stays until rank 0 has ended."""
    return isinstance(failure, RemoteError) and bool(failure.remote_traceback)


def name_ranks(ranks: Iterable[int]) -> str:
    """Returns names ranks; runs of three and more become a range.

    >>> name_ranks([1])
    'rank 1'
    >>> name_ranks([3, 0, 2, 7, 1, 9])
    'ranks 0-3, 7, 9'
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names: list[str] = []
    for first, last in runs:
        names += [str(rank) for rank in range(first, last + 1)] if last - first < 2 else [f"{first}-{last}"]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(names)


def clip_head(text: str, limit: int) -> str:
    """Keeps the beginning."""
    return text if len(text) <= limit else text[:limit] + " [...]"


def clip_tail(text: str, limit: int) -> str:
    """Keeps the end, which is where a traceback says what happened."""
    return text if len(text) <= limit else "[...] " + text[-limit:]


def describe_death(rank: int) -> Header:
    """Returns the failure that a lost connection means."""
    return {
        "kind": "RemoteError",
        "is_loss": True,
        "rank": rank,
        "what": f"rank {rank} died (its connection closed without a goodbye)",
        "why": "its process was killed or crashed in native code; a Python exception would have been reported",
        "hint": f"look at the end of rank {rank}'s log; if it says nothing: `dmesg | grep -i kill` on its host\n"
        "(the out-of-memory killer and a scheduler's time limit both send SIGKILL)",
    }


def describe_lost_link(rank: int) -> Header:
    """Returns the failure that a rank's silence means."""
    return {
        "kind": "RemoteError",
        "is_loss": True,
        "rank": rank,
        "what": f"the link to rank {rank} is lost (nothing has got through for {LINK_DEAD_S:g} s and more)",
        "why": "the network between the hosts is cut, or that host is down; a process that had ended would be reported",
        "hint": f"can this host and rank {rank}'s reach each other (ping, firewall, cable)?",
    }


def describe_left_behind(rank: int) -> Header:
    """Returns the failure that the end of the rank means by which others are connected."""
    is_hub = rank == 0
    what = f"rank {rank} has ended its program while {'this rank still runs' if is_hub else 'others still run'}"
    node = "hub" if is_hub else "relay"
    why = f"the side channel's {node} lives in rank {rank}'s process and has waited for its linger time"
    hint = "make every rank run the same number of steps"
    return {"kind": "RemoteError", "rank": rank, "what": what, "why": why, "hint": hint}


def describe_large_gather(key: str, size_bytes: int) -> Header:
    """Returns the failure that parts of a gather mean which are too large together."""
    return {
        "kind": "RemoteError",
        "rank": 0,
        "what": f"the ranks' parts of {clip_head(key, 80)!r} have {size_bytes} bytes together",
        "why": "at most 63 MiB fit into one message, and they are to come together",
        "hint": "",
    }


def described(error: BaseException) -> Header:
    """Returns what another rank gets to know of an error: its texts and its traceback, each of bounded length."""
    first = error.what if isinstance(error, FarspanError) else first_line(error)
    why, hint = (error.why, error.hint) if isinstance(error, FarspanError) else ("", "")
    notes = getattr(error, "__notes__", [])
    return {
        "what": clip_head(f"{type(error).__name__}: {first}", MAX_TEXT),
        "why": clip_head("\n".join(filter(None, [why, *notes])), MAX_TEXT),
        "hint": clip_head(hint, MAX_TEXT),
        "traceback": clip_tail(format_error(error), MAX_TRACEBACK),
    }


def describe_failure(rank: int, header: Header, *reasons: str) -> Header:
    """Returns what the others get to know of an exception in a rank's program (`described`), and why more is known of
    it."""
    return {
        "kind": "RemoteError",
        "rank": rank,
        "what": f"rank {rank} failed: {header['what']}",
        "why": "\n".join(filter(None, [header.get("why", ""), *reasons])),
        "hint": "\n".join(filter(None, [header.get("hint", ""), f"rank {rank}'s log has its full traceback"])),
        "traceback": header.get("traceback", ""),
    }


def as_error(header: Header) -> FarspanError:
    """Returns the error that a failure message stands for."""
    texts = {"why": header["why"], "hint": header["hint"]}
    if header["kind"] == "DivergenceError":
        return DivergenceError(header["what"], **texts)
    error = RemoteError(header["what"], **texts)
    error.rank, error.remote_traceback = header["rank"], header.get("traceback", "")
    error.is_loss = header.get("is_loss") is True
    return error


def fresh(error: FarspanError) -> FarspanError:
    """Returns a copy to raise: several threads raising one object would mix their tracebacks."""
    copy = type(error)(error.what, why=error.why, hint=error.hint)
    if isinstance(copy, RemoteError) and isinstance(error, RemoteError):
        copy.rank, copy.remote_traceback, copy.is_loss = error.rank, error.remote_traceback, error.is_loss
    return copy


def describe_silent_hub(rank: int) -> str:
    """Returns what it means that `rank` hears nothing from the hub.

    >>> describe_silent_hub(2)
    'rank 0, where the hub is, does not answer: it is stopped or unreachable'
    >>> describe_silent_hub(40)
    'rank 0, where the hub is, does not answer: it, or rank 1, which passes its answers on, is stopped or unreachable'
    """
    between = ancestors(rank)
    others = f", or {name_ranks(between)}, which {'pass' if len(between) > 1 else 'passes'} its answers on,"
    return f"rank 0, where the hub is, does not answer: it{others if between else ''} is stopped or unreachable"


def deadline_error(
    rank: int,
    deadline_s: float,
    to_do: str,
    status: Header | None,
    places: Sequence[str],
    waiting_for_this: Sequence[int] = (),
) -> DeadlineError:
    """Returns the error of a rank that has waited too long for the others.

    Args:
        rank: That waits.
        deadline_s: How long it has.
        to_do: What the others have not done: "to begin step 3".
        status: What the hub says of them; None where it does not answer.
        places: Where late ranks are, as `place_of` says it.
        waiting_for_this: Late ranks that wait for this one.
    """
    what = f"rank {rank} waited {deadline_s:g} s for "
    hint = "look where those ranks are (`py-spy dump --pid PID` on their hosts); if only slow: a longer deadline"
    if status is None:
        return DeadlineError(
            f"{what}the others {to_do}, and rank 0 does not answer", why=describe_silent_hub(rank), hint=hint
        )
    who = name_ranks(status["missing"]) if status["missing"] else "the others"
    why = [*status["notes"], *places]
    if waiting_for_this:
        verb = "waits" if len(waiting_for_this) == 1 else "wait"
        why.append(f"{name_ranks(waiting_for_this)} in turn {verb} for rank {rank}")
        hint = EACH_OTHER
    return DeadlineError(f"{what}{who} {to_do}", why="\n".join(why), hint=hint)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, "" if it says nothing."""
    lines = str(error).splitlines()
    return lines[0] if lines else ""


def place_of(rank: int, stack: str) -> str:
    """Returns where a late rank is, from what it answered; "" stands for no answer."""
    return f"rank {rank} is at\n{stack}" if stack else f"rank {rank} does not say where it is: its process is stopped"


def stack_of(thread: int) -> str:
    """Returns where a thread of this process is, outermost call first; its innermost calls where there are many."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "(the end of its program)"
    return clip_tail(format_stack(frame, _MAX_FRAMES).rstrip(), MAX_TEXT)


def answer_error(rank: int, text: Header) -> RemoteError:
    """Returns, for the rank that asked, the error that another rank has raised while it answered."""
    error = RemoteError(
        f"rank {rank} could not answer: {text['what']}",
        why=text["why"],
        hint=text["hint"] or f"`remote_traceback` of this error is rank {rank}'s traceback",
    )
    error.rank, error.remote_traceback = rank, text["traceback"]
    return error


def ended_error(rank: int) -> RemoteError:
    """Returns the error of who asks a rank that has said goodbye."""
    error = RemoteError(
        f"rank {rank} has ended its program and cannot answer any more",
        why="this rank reads a value that lives there",
        hint="read it before that rank ends, or keep that rank until all have finished",
    )
    error.rank = rank
    return error
