"""Reads a rank's log: the exception it ended with, and whether that is about itself or another rank."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = [
    "TAIL_BYTES",
    "find_cause",
    "find_exception",
    "find_last_words",
    "find_place",
    "find_word_of",
    "has_missed",
    "is_of_the_program",
    "only_heard_of_it",
]

TAIL_BYTES = 1 << 20
"""Bytes at the end of a log that are kept and read."""
_TAIL_LINES = 20
_MESSAGE_LINES = 40

_REMOTE = re.compile(r"(?:farspan\.errors\.)?RemoteError(?::|$)")
_OWN = re.compile(r"(?:Deadline|Divergence|Launch|Plan|Record|Remote)Error: ")
"""The beginning of a line with which farspan reports an error without a traceback."""
_CLASSES = "farspan.errors."
_NOT_OF_THE_PROGRAM = ("RemoteError", "DeadlineError", "ServiceError")
"""What a rank raises because of another one, or of the way to it."""
_FRAME = re.compile(r' +(?:\| *)*File ".*", line \d+')
_TRACEBACK = "Traceback (most recent call last):"
_HEADER = re.compile(r"(?:Traceback|  \+ Exception Group Traceback) \(most recent call last\):")
_CHAIN = re.compile(r"(?:The above exception was the direct|During handling of the above exception)")
_IGNORED = "Exception ignored in"
"""Python puts it before the traceback of what goes wrong in its own end."""
_PREFIX = re.compile(r"^(?:\[rank\d+\]: ?)+")  # torch.distributed puts it before every line of a traceback

_OF_WORKERS = re.compile(r"(DataLoader worker) \(pid.*")
"""What torch says of a worker's end: killed, or, a moment later, exited unexpectedly."""


def only_heard_of_it(log: str) -> bool:
    """Returns whether the last exception in a log is a RemoteError: this rank ended because another one failed."""
    lines = _split_lines(log)
    headers = _headers(lines)
    remotes = [i for i, line in enumerate(lines) if _REMOTE.match(line)]
    if not headers:
        return bool(remotes)
    return bool(remotes) and remotes[-1] >= _exception_line(lines, headers[-1])


def find_exception(log: str) -> str:
    """Returns the first line of the last exception in a log, "" where there is none: its class and what it says."""
    lines = _split_lines(log)
    headers = _headers(lines)
    if headers:
        found = lines[_exception_line(lines, headers[-1])]
    else:
        found = next((line for line in reversed(lines) if _OWN.match(line)), "")
    return "" if found.startswith(" ") else found.removeprefix(_CLASSES)


def find_last_words(log: str) -> str:
    """Returns the last exception in a log, or else its last line: equal for two ranks that have ended for one reason,
    each with workers of its own.

    >>> find_last_words("Traceback (most recent call last):\\nRuntimeError: DataLoader worker (pid 7) is killed")
    'RuntimeError: DataLoader worker'
    """
    return _OF_WORKERS.sub(r"\1", find_exception(log) or next(reversed(_split_lines(log)), ""))


def is_of_the_program(log: str) -> bool:
    """Returns whether a log ends with a traceback in which no class of farspan's is: neither an error of farspan's, nor
    what the program has raised because of one."""
    lines = find_cause(log, killed=False).splitlines()
    return bool(_headers(lines)) and not any(line.startswith(_CLASSES) or _OWN.match(line) for line in lines)


def find_place(log: str) -> str:
    """Returns where in the program the last exception in a log was raised, and its class: equal for an error that comes
    again, whatever numbers it names. Returns "" where there is none, or where it is about another rank.
    """
    found = find_exception(log)
    kind = found.partition(":")[0]
    if not found or kind in _NOT_OF_THE_PROGRAM:
        return ""
    lines = _split_lines(log)
    start = next(reversed(_headers(lines)), None)
    if start is None:
        return found
    frames = [line.strip() for line in lines[start : _exception_line(lines, start)] if _FRAME.match(line)]
    return "\n".join([*frames, kind])


def find_word_of(rank: int, log: str) -> str:
    """Returns what another rank's log says about the failure of `rank`; "" if it says nothing."""
    begin = f"RemoteError: rank {rank} failed: "
    found = next((line for line in reversed(_split_lines(log)) if begin in line), "")
    return found.partition(begin)[2]


def has_missed(rank: int, log: str) -> bool:
    """Returns whether another rank's log says that the connection to `rank` has ended."""
    return any(f"RemoteError: rank {rank} died " in line for line in _split_lines(log))


def find_cause(log: str, *, killed: bool, shown: str = "") -> str:
    """Returns the last traceback of a log with the exceptions chained to it, or else the last lines.

    Args:
        log: The end of what a rank wrote.
        killed: Whether a signal has ended it.
        shown: What is on the console. Ranks print the same: the last lines of a loop say nothing new.
    """
    lines = _split_lines(log)
    if killed:  # a traceback before a signal was an earlier one that was caught
        fault = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")), None)
        if fault is not None:
            return "\n".join(lines[fault:][:_MESSAGE_LINES])
        return _last_lines(lines, shown)
    start = next(reversed(_headers(lines)), None)
    if start is None:
        return _last_lines(lines, shown)
    first = _exception_line(lines, start)
    end = next((i for i in range(first, len(lines)) if lines[i].startswith(_IGNORED)), first + _MESSAGE_LINES)
    end = min(end, first + _MESSAGE_LINES)
    while start >= 3 and _CHAIN.match(lines[start - 2]):
        earlier = next((i for i in reversed(range(start - 2)) if _HEADER.match(lines[i])), None)
        if earlier is None:
            break
        start = earlier
    more = ["..."] if end < len(lines) else []
    return "\n".join(lines[start:end] + more)


def _last_lines(lines: Sequence[str], shown: str) -> str:
    """Returns those of the last lines that are not on the console."""
    known = {line.strip() for line in _split_lines(shown)}
    return "\n".join(line for line in lines[-_TAIL_LINES:] if not shown or line.strip() not in {"", *known})


def _split_lines(log: str) -> list[str]:
    lines: list[str] = []
    for line in log.splitlines():
        before = line.removesuffix(_TRACEBACK)
        # A progress bar leaves its line open, and the traceback is glued to it.
        is_glued = before != line and before.strip(" \t|+") and not before.endswith("Exception Group ")
        lines += [_PREFIX.sub("", part) for part in ([before, _TRACEBACK] if is_glued else [line])]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _headers(lines: Sequence[str]) -> list[int]:
    """Returns where tracebacks begin, without those of exceptions that Python ignores (in what runs at its end)."""
    found: list[int] = []
    is_ignored = False
    for i in [i for i, line in enumerate(lines) if _HEADER.match(line)]:
        is_chained = i >= 2 and _CHAIN.match(lines[i - 2]) is not None
        is_ignored = is_ignored if is_chained else i > 0 and lines[i - 1].startswith(_IGNORED)
        if not is_ignored:
            found.append(i)
    return found


def _exception_line(lines: Sequence[str], header: int) -> int:
    """Returns where the frames below a traceback's header end and the exception itself stands."""
    below = range(header + 1, len(lines))
    return next((i for i in below if lines[i] and not lines[i].startswith(" ")), len(lines) - 1)
