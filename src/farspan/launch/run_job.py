"""Starts the processes of a job on this machine, shows one console, and says who failed and why.

              stdin   stdout and stderr
    rank 0    ours    ours, and LOG_DIR/rank0.log (`terminal`); or of the rank that a debugger is in
    rank 1    none    LOG_DIR/rank1.log
    ...

`attempts` are the starts of all ranks, one or several; `job` has the processes of one start together, `rank_process` is
one of them, `terminal` the console, `logs` what a log says.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
from collections.abc import Mapping, Sequence

from farspan.errors import LaunchError
from farspan.launch.attempts import Here, Restarts, attempt_repeatedly, find_command, make_log_dir, shared_variables
from farspan.launch.attempts.waiting import NotStartedError, do_unless_over, say_not_started
from farspan.launch.debugged_job import DebuggedJob
from farspan.launch.hosts import Fleet
from farspan.launch.job import Crew, Events, Job, signals_to
from farspan.launch.memory import MEMORY_VARIABLE, Memory
from farspan.launch.rank.entropy import entropy_variables
from farspan.launch.terminal import say
from farspan.settings import LONGEST_DEADLINE_S
from farspan.units import count_of

__all__ = ["run"]

_EXAMPLE = "farspan run -n 4 train.py"


def run(
    script_argv: Sequence[str],
    num_processes: int,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    files: str | None = None,
    verbose: bool = False,
    max_restarts: int = 0,
    keeps_going: bool = False,
    has_standby: bool = False,
    debugged: int | None = None,
    fleet: Fleet | None = None,
    grace_s: float = 5.0,
) -> int:
    """Runs `num_processes` processes of a script on this machine, until all have ended.

    Every process gets FARSPAN_RANK, _LOCAL_RANK, _WORLD_SIZE, _LOCAL_WORLD_SIZE, _STORE (the file by which several
    find each other), OMP_NUM_THREADS (its share of the cores, unless set), PYTHONUNBUFFERED, FARSPAN_LAUNCHER=run
    and FARSPAN_LOG_DIR, and none of another launcher's variables: a script that asks for RANK or WORLD_SIZE, to decide
    whether it is one of several processes, must find that it is not. Several processes also get
    one PYTHONHASHSEED, unless set, and one entropy (`entropy.py`). If a rank fails, the others get
    `grace_s` seconds to end before they are ended; then stderr says once which rank failed first, how, and its own
    traceback.

    Args:
        script_argv: A python file, `-m` and a module, or an executable; then its arguments.
        num_processes: Number of ranks, at least 1.
        log_dir: Folder for `rank0.log`, `rank1.log`, ...; None makes a fresh one for temporary files. That of a single
            rank is removed at its end.
        environment: Further variables for every process.
        files: "first": the files of rank 0 are the script's, those of others go to a folder that is removed at the
            end; "all": every rank writes where the script says. None: what FARSPAN_FILES says, or else "first".
        verbose: Say on stderr where the logs are, before the start.
        max_restarts: How often all ranks are started again after one has failed; the logs of the k-th new start go to
            `restart-k` in the folder of logs. An error of the program's own that comes twice in the same place, with no
            checkpoint saved in between, is not started again.
        keeps_going: If a rank is lost (killed, or its host), and every parameter has a copy in another group of
            `data_parallel`, the groups that are whole go on in their processes.
        has_standby: Once a checkpoint is saved, start the processes of the next start ahead: they load torch and wait
            for their turn, so that a restart takes no time for that.
        debugged: The rank that a debugger is in. It has the console in the place of rank 0, and Ctrl-C is for it alone;
            the others wait for it as long as it takes, and skip `breakpoint()`.
        fleet: The hosts that the ranks run on; None for this machine alone. `num_processes` is then that of all hosts,
            and after a restart that of those that are left.
        grace_s: Seconds between the first failure and SIGTERM; SIGKILL follows 3 seconds later.

    Returns:
        0, or the exit code of the rank that failed first, or 128 + the signal that ended it; after Ctrl-C
        130 unless all ranks ended well.

    Raises:
        LaunchError: Nothing was started: no such script, bad number or folder.
    """
    if num_processes < 1:
        raise LaunchError(
            f"cannot start {num_processes} processes.",
            why="the number of processes is at least 1.",
            hint=_EXAMPLE,
        )
    command = find_command(script_argv)
    if has_standby:
        _check_standby(script_argv, num_processes, max_restarts, is_here=fleet is None)
    folder = make_log_dir(log_dir)
    if verbose:
        say(f"farspan run: {count_of(num_processes, 'process')}, logs in {folder}")
    shared = shared_variables(num_processes, folder) | dict(environment or {})
    if keeps_going:
        shared["FARSPAN_KEEP_GOING"] = "1"
    if num_processes > 1:
        shared |= entropy_variables(os.environ | shared)  # one for all starts: what was drawn once is drawn again
    events: Events = queue.SimpleQueue()
    restarts, code = Restarts(max_restarts), 1
    if fleet is not None and max_restarts:
        fleet.take_in_at_saves(events, restarts.pipe)
    memory = Memory() if max_restarts and fleet is None else None
    shared[MEMORY_VARIABLE] = memory.path if memory is not None else "each host's own" if max_restarts else ""
    shared["FARSPAN_KEEPERS"] = ""
    if debugged is not None:
        shared["FARSPAN_DEADLINE"] = str(LONGEST_DEADLINE_S)

    def open_crew(variables: dict[str, str]) -> Crew:
        if fleet is not None:
            return fleet.open(events, variables, files)
        return Here(command, num_processes, variables, console=debugged or 0, is_debugged=debugged is not None)

    def count() -> int:
        if fleet is None:
            return num_processes
        do_unless_over(fleet.gather, events)
        say(f"farspan run: {fleet.describe()}; logs in {folder}")
        return fleet.num_processes

    try:
        with signals_to(events):
            code = attempt_repeatedly(
                events,
                open_crew,
                count,
                folder=folder,
                variables=shared,
                restarts=restarts,
                files=files,
                grace_s=grace_s,
                keeps_going=keeps_going,
                open_job=Job if debugged is None else DebuggedJob,
                has_standby=has_standby,
            )
            return code
    except NotStartedError as error:
        code = say_not_started(error)
        return code
    finally:
        restarts.close()
        if memory is not None:
            memory.close()
        if fleet is not None:
            fleet.close(code)
        if log_dir is None:
            with contextlib.suppress(OSError):
                if num_processes == 1:  # whose only log is what the console has shown
                    shutil.rmtree(folder)
                else:
                    folder.rmdir()  # only if nobody wrote


def _check_standby(argv: Sequence[str], num_processes: int, max_restarts: int, *, is_here: bool) -> None:
    """Refuses what cannot be started ahead: another program than Python would begin before its turn."""
    why = ""
    if not max_restarts:
        why = "without --max-restarts there is no next start."
    elif not is_here or num_processes == 1:
        why = "it is for several processes on one machine."
    elif not (argv[0] == "-m" or argv[0].endswith(".py")):
        why = f"{argv[0]} is no Python file, and would do things before its turn."
    if why:
        raise LaunchError("--standby is not possible here.", why=why, hint=f"{_EXAMPLE}     without --standby")
