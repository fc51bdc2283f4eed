"""Ends a rank's program so that the other ranks get to know of it.

    its last line        what is recorded runs; then the rank waits until every program is over, and answers what the
                         others ask until then
    an exception         it reaches the others first, and only then is it printed: a full disk must not hide the cause
    a forked child       is no rank: it ends as if farspan were not there

Then what farspan has opened is closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from farspan.comm.rendezvous.network import Network
from farspan.comm.router import Router
from farspan.control.text import as_error, describe_failure, described
from farspan.errors import DivergenceError, FarspanError, PlanError, RemoteError
from farspan.execute.abort.aborted import rank_that_raised
from farspan.execute.agreement.history import PROGRAM_IS_OVER
from farspan.execute.engine import Engine
from farspan.execute.process.exit_code import exit_code, watch_exit
from farspan.execute.process.output import return_to_console
from farspan.launch.raised.tracebacks import cut_frames
from farspan.launch.rank.error_file import is_of_another_rank, leave_error
from farspan.launch.rank.notes import note_hearing
from farspan.launch.rank.process_end import at_process_end, write_open_files
from farspan.outputs import write_line

__all__ = ["fail_at_end", "watch_end"]

_LINGER_S = 10.0
_LINGER_AFTER_FAILURE_S = 4.0
"""Until the others know of the failure, which takes them no time; one that is stopped would keep all of them."""
_ENDING_S = 5.0
"""How long the end of a process that has failed may take."""
_SEEING_S = 1.0
"""How long torchrun may take to see that end, and to end this process."""
_exit_codes: list[int] = []


def watch_end(engine: Engine, network: Network, router: Router | None, remove_files: Callable[[], None]) -> None:
    """Lets the other ranks know from now on how this process ends.

    Args:
        engine: This rank's.
        network: All ranks, of whatever groups.
        router: What carries tensors between the ranks of its group; None where it is the only one.
        remove_files: Ends the view of files that the rank has.
    """
    watch_exit()
    process, previous = os.getpid(), sys.excepthook
    has_raised = has_left = False

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal has_raised
        if os.getpid() != process:
            previous(kind, error, trace)
            return
        has_raised = True
        raised_by = error.rank if isinstance(error, RemoteError) else rank_that_raised(error)
        leave_error(error, is_heard=raised_by is not None)
        if raised_by is not None:  # and shows its traceback itself
            with contextlib.suppress(OSError):  # the disk is full
                note_hearing(network.rank)
            write_line(_describe_remote(error, raised_by))
            _let_torchrun_see(raised_by, router)
            return
        if not isinstance(error, (PlanError, DivergenceError)):  # every rank finds these by itself
            engine.side.fail(error)
        cut_frames(error)
        previous(kind, error, error.__traceback__)

    def leave() -> None:
        nonlocal has_left
        if os.getpid() != process or has_left:
            return
        has_left = True
        try:
            if not has_raised and engine.is_healthy:
                engine.flush(PROGRAM_IS_OVER)
                engine.finish()
                if exit_code() == 0:
                    _summarize(engine)
        except FarspanError as error:
            fail_at_end(error)  # the program has ended well by itself, but the ranks did not do the same
        except Exception as error:  # what the model or its loss raises in the last part, which nothing has read
            sys.excepthook(type(error), error, error.__traceback__)
            _exit_codes.append(exit_code() or 1)
        is_over_well = not has_raised and engine.is_healthy
        if engine.rank and not is_over_well:
            _answer_rank_0(engine)
        engine.groups.close()
        if isinstance(engine.transport, Router):
            engine.transport.close()
        remove_files()
        engine.values.close()
        engine.side.close(linger_s=_LINGER_S if is_over_well else _LINGER_AFTER_FAILURE_S)
        network.close(is_over_well=is_over_well, has_raised=has_raised)

    sys.excepthook = report
    network.at_end(leave)


def _answer_rank_0(engine: Engine) -> None:
    """Stays until rank 0 has ended, or asks nothing for some seconds: it may not have come as far as this rank, and
    what it is printing, or writing into a file, is to be whole.
    """
    pulls, num_answered = engine.values.pulls, -1
    while engine.side.may_ask and pulls.num_answered != num_answered:
        num_answered = pulls.num_answered
        if engine.side.wait_ended(0, _LINGER_AFTER_FAILURE_S):
            return


def _summarize(engine: Engine) -> None:
    device_types = {member.device_type for team in engine.teams for member in team.members}
    with contextlib.suppress(Exception):  # the program has done all that it is for
        engine.console.summarize(engine.groups.num_groups, device_types)


def fail_at_end(error: FarspanError) -> None:
    """The program is over, and this has gone wrong all the same: the process ends as one that has failed."""
    _exit_codes.append(exit_code() or 1)
    leave_error(error, is_heard=isinstance(error, RemoteError))
    if not isinstance(error, RemoteError):  # whose cause another rank shows
        return_to_console()
    write_line(_describe(error))


def _describe_remote(error: BaseException, rank: int) -> str:
    if not isinstance(error, RemoteError):  # the same exception was raised here, or is the cause of this one
        error = as_error(describe_failure(rank, described(error)))
    return _describe(error)


def _describe(error: BaseException) -> str:
    """Returns an error in its three parts; in one line where `farspan run` shows below what the rank that has raised it
    says itself. Other launchers show no other rank's traceback, and a rank that died has none."""
    is_shown = os.environ.get("FARSPAN_LAUNCHER") == "run" and is_of_another_rank(error)
    text = f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if is_shown else text


def _let_torchrun_see(rank: int, router: Router | None) -> None:
    """Waits for torchrun to see the end of the rank that failed: it takes the first end that it sees for the cause."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if router is not None:
            router.wait_ended(rank, _ENDING_S)
        threading.Event().wait(_SEEING_S)


def _exit_as_failed() -> None:
    """Runs after everything that ends engines, for it is registered before."""
    if _exit_codes:
        write_open_files()
        os._exit(_exit_codes[0])


at_process_end(_exit_as_failed)
