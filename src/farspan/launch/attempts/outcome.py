"""What has become of one start of all ranks: who failed first, how, and what is said about it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from farspan.launch.job import Job
from farspan.launch.logs import (
    find_cause,
    find_exception,
    find_last_words,
    find_place,
    find_word_of,
    has_missed,
    is_of_the_program,
    only_heard_of_it,
)
from farspan.launch.rank_process import Started, signal_name

__all__ = ["Outcome", "conclude"]

_CODE_OF_EXCEPTION = 1
_REASON_CHARACTERS = 400
_VARIABLES = "RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
_DIFFERENCE = "DivergenceError: "
_OF_SEVERAL_PROCESSES = re.compile(
    rf"KeyError: '({_VARIABLES})'$|environment variable ({_VARIABLES}) expected|Default process group has not been init"
)
"""What a script says that asks for its place among several processes; the second and third words are torch's."""
_TRY_ONE_PROCESS = [
    "  try   to the script there is one process: leave out init_process_group, DistributedDataParallel,",
    "        DistributedSampler and what reads RANK; farspan.rank() and farspan.data_rank() say which rank this is",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one start of all ranks.

    Attributes:
        code: Exit code of the whole.
        text: What is said about a failure; "" where there is none.
        was_interrupted: Whether a signal to the launcher has ended it.
        place: Where in the program its own error was raised, and of which kind it is; "" where the end was none, as
            that of a killed rank.
        was_cut: Whether it was ended so that a further host takes part from what was saved on.
    """

    code: int
    text: str = ""
    was_interrupted: bool = False
    place: str = ""
    was_cut: bool = False


def conclude(job: Job, heard: Collection[int]) -> Outcome:
    """Returns what has become of a job that is over.

    Args:
        job: All of whose ranks have ended.
        heard: Ranks that say that they ended because another one failed.
    """

    def only_heard(rank: Started) -> bool:
        return rank.number in heard or only_heard_of_it(rank.read_tail())

    gone = set[int]() if job.members is None else job.members.gone
    failed = [rank for rank in job.ended if rank.returncode != 0 and rank.number not in gone]
    own = [rank for rank in failed if not rank.was_stopped]
    if failed and job.is_cut:
        return Outcome(code=1, was_interrupted=job.interrupted_by is not None, was_cut=True)
    if not failed or job.is_over:
        return Outcome(code=0, was_interrupted=job.interrupted_by is not None)
    if job.interrupted_by is not None and not job.failed_before_interrupt:
        text = f"farspan run: ended by {job.interrupted_by.name}; logs in {job.log_dir}"
        return Outcome(code=128 + job.interrupted_by, text=text, was_interrupted=True)
    was_interrupted = job.interrupted_by is not None
    # A rank that only noticed the failure of another may well have ended before it.
    by_themselves = [rank for rank in own if not only_heard(rank)]
    culprit = next(iter(by_themselves), [*own, *failed][0])
    if _has_raised(culprit) and not is_of_the_program(culprit.read_tail()):  # farspan's may be a consequence
        of_program = (rank for rank in by_themselves if _has_raised(rank) and is_of_the_program(rank.read_tail()))
        culprit = next(of_program, culprit)
    if culprit.returncode == _CODE_OF_EXCEPTION and find_exception(culprit.read_tail()).startswith("DivergenceError"):
        culprit = next((rank for rank in by_themselves if rank.returncode > _CODE_OF_EXCEPTION), culprit)  # has left it
    culprit = _shown_already(culprit, by_themselves)
    stopped = [rank for rank in job.ended if rank.was_stopped]
    if job.never_joined and (culprit.was_stopped or only_heard(culprit)):
        text = _describe_absence(job, job.never_joined[0])
        return Outcome(code=1, text=text, was_interrupted=was_interrupted, place="before farspan.distribute")
    left = next((rank for rank in job.ended if rank.returncode == 0 and _is_missed(rank, failed)), None)
    if left is not None and only_heard(culprit):
        return Outcome(code=1, text=_describe_leaving(job, left), was_interrupted=was_interrupted)
    code = culprit.returncode
    is_own = code > 0 and not culprit.lost and not only_heard(culprit)
    return Outcome(
        code=code if code > 0 else 128 - code,
        text=_describe_failure(job, culprit, stopped),
        was_interrupted=was_interrupted,
        place=(find_place(culprit.read_tail()) or f"exit code {code}") if is_own else "",
    )


def _is_missed(rank: Started, failed: Sequence[Started]) -> bool:
    """Returns whether others say that a rank, which has ended without an error, did so in the middle of its program."""
    return any(has_missed(rank.number, other.read_tail()) for other in failed)


def _has_raised(rank: Started) -> bool:
    return rank.returncode == _CODE_OF_EXCEPTION and not rank.lost and find_exception(rank.read_tail()) != ""


def _shown_already(culprit: Started, failed: Sequence[Started]) -> Started:
    """Returns the rank with the console, if it has ended with the same exception, or with the same code and last line:
    that is to be seen there."""
    if not culprit.has_console and culprit.returncode > 0 and not culprit.lost:
        said = find_last_words(culprit.read_tail())
        for rank in failed:
            if rank.has_console and rank.returncode == culprit.returncode and said:
                return rank if find_last_words(rank.read_tail()) == said else culprit
    return culprit


def _describe_failure(job: Job, culprit: Started, stopped: Sequence[Started]) -> str:
    code = culprit.returncode
    how = culprit.lost or f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
    lines = [f"farspan run: rank {culprit.number} of {job.num_processes} failed: {how}."]
    reason = _find_reason(job, culprit) if code == _CODE_OF_EXCEPTION else ""
    said = "" if culprit.has_console else _find_said(job, culprit)
    if reason and reason not in said:
        lines += [f"  why   {reason}"]
    if culprit.has_console:
        lines += ["  Its own output is above."]
    else:
        has_written = culprit.read_tail().strip() != ""
        nothing = "  What it wrote does not say why." if has_written else "  It wrote nothing."
        lines += ["", said, ""] if said else [nothing]
    if code == -signal.SIGKILL:
        lines += ["  why   often the kernel, for want of memory: see dmesg"]
    if stopped:
        names = ", ".join(str(rank.number) for rank in sorted(stopped, key=lambda rank: rank.number))
        lines += [f"  then  ended, still running {job.given_s:g} s after it: rank {names}"]
    if job.num_processes > 1 and _OF_SEVERAL_PROCESSES.search(reason):
        lines += _TRY_ONE_PROCESS
    if job.num_processes > 1:
        lines += [f"  logs  {culprit.log}"]
        lines += [f"        {rank.log}" for rank in sorted(stopped, key=lambda rank: rank.number)[:1]]
    return "\n".join(lines)


def _find_said(job: Job, culprit: Started) -> str:
    """Returns what a rank has written about its end, as far as the console does not show it: nothing, where the signal
    leaves no time to say anything, and a terminal shows what no log has."""
    if culprit.returncode == -signal.SIGKILL and os.isatty(1):
        return ""
    was_killed = culprit.returncode < 0 and culprit.returncode != -signal.SIGABRT
    console = "".join(rank.read_tail() for rank in job.ranks if rank.has_console)
    said = find_cause(culprit.read_tail(), killed=was_killed, shown=console)
    return _without_difference(said, console)


def _without_difference(said: str, shown: str) -> str:
    """Returns what a rank has said without the DivergenceError at its end that another rank has shown whole.

    >>> _without_difference("0 1.7\\nDivergenceError: a\\n  why  b", "farspan.errors.DivergenceError: a\\n  why  b")
    '0 1.7'
    """
    before, name, after = said.rpartition(_DIFFERENCE)
    is_line = before == "" or before.endswith("\n")
    return before.rstrip() if name and is_line and f"{name}{after.strip()}" in shown else said


def _find_reason(job: Job, culprit: Started) -> str:
    """Returns the exception that a rank ended with: its log says it, or, where the disk is full, what others heard of
    it."""
    own = find_exception(culprit.read_tail())
    heard = (find_word_of(culprit.number, rank.read_tail()) for rank in job.ranks if rank is not culprit)
    return (own or next(filter(None, heard), ""))[:_REASON_CHARACTERS]


def _describe_leaving(job: Job, left: Started) -> str:
    lines = [
        f"farspan run: rank {left.number} of {job.num_processes} ended in the middle of its program (exit code 0).",
        "  why   it has left Python without an exception, as by os._exit(0), while others waited for it.",
        "  try   end it by sys.exit, or let it raise",
        f"  logs  {left.log}",
    ]
    return "\n".join(lines)


def _describe_absence(job: Job, absent: Started) -> str:
    waited = sorted(rank.number for rank in job.ended if rank.returncode != 0)
    names = ", ".join(map(str, waited))
    lines = [
        f"farspan run: rank {absent.number} of {job.num_processes} ended before it called farspan.distribute.",
        f"  why   its program was over (exit code 0), while rank {names} waited for it.",
        "  try   let every rank call farspan.distribute, or none",
        f"  logs  {absent.log}",
    ]
    return "\n".join(lines)
