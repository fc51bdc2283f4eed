"""Starts the processes of a job on this machine, shows one console, and says who failed and why.

              stdin   stdout            stderr
    rank 0    ours    ours              ours, by a pipe (a terminal, if ours is one) that keeps its end
    rank 1    none    LOG_DIR/rank1.log (both)
    ...

`job` has the processes of a job together, `process` one of them, `console` our stderr, `logs` what a log says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from farspan.errors import LaunchError
from farspan.launch.files import keeps_apart
from farspan.launch.job import Job, signals_to
from farspan.launch.logs import find_cause, find_exception, find_word_of, only_heard_of_it
from farspan.launch.rank.entropy import entropy_variables
from farspan.launch.rank.notes import heard_ranks, trains_copies
from farspan.launch.rank_process import Rank
from farspan.launch.sweep import Sweeper
from farspan.launch.terminal import say
from farspan.settings import PREFIX

__all__ = ["run"]

_EXAMPLE = "farspan run -n 4 train.py"
_CODE_OF_EXCEPTION = 1
_REASON_CHARACTERS = 400
_ALONE = """\
farspan run: nothing called farspan.distribute(model): {n} copies of the model were trained, each by itself.
  try  model = farspan.distribute(model)"""


def run(
    script_argv: Sequence[str],
    num_processes: int,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    files: str | None = None,
    verbose: bool = False,
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
        log_dir: Folder for `rank1.log`, `rank2.log`, ...; None makes a fresh one for temporary files.
        environment: Further variables for every process.
        files: "first": the files of rank 0 are the script's, those of others go to a folder that is removed at the
            end; "all": every rank writes where the script says. None: what FARSPAN_FILES says, or else "first".
        verbose: Say on stderr where the logs are, before the start.
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
    command = _find_command(script_argv)
    folder = _make_log_dir(log_dir)
    if verbose:
        say(f"farspan run: {num_processes} processes, logs in {folder}")
    shared = _shared_variables(num_processes, folder) | dict(environment or {})
    run_folder = _make_run_folder(shared, num_processes, files)
    sweeper = None if run_folder is None else Sweeper(run_folder)
    if num_processes > 1:
        shared |= entropy_variables(os.environ | shared)
    job = Job(num_processes=num_processes, log_dir=folder, run_folder=run_folder, grace_s=grace_s)
    try:
        with signals_to(job.events):
            job.start(command, shared)
            job.wait()
    finally:
        job.close()
        are_copies = run_folder is not None and trains_copies(run_folder)
        heard = set[int]() if run_folder is None else heard_ranks(run_folder)
        if run_folder is not None:
            shutil.rmtree(run_folder, ignore_errors=True)
        if sweeper is not None:
            sweeper.close()
        if log_dir is None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if nobody wrote: one rank has no log
    code = _conclude(job, heard)
    if code == 0 and are_copies:
        say(_ALONE.format(n=num_processes))
    return code


def _conclude(job: Job, heard: Collection[int]) -> int:
    """Says what went wrong, if anything did, and returns the exit code.

    Args:
        job: That is over.
        heard: Ranks that say that they ended because another one failed.
    """

    def only_heard(rank: Rank) -> bool:
        return rank.number in heard or only_heard_of_it(rank.read_tail())

    failed = [rank for rank in job.ended if rank.returncode != 0]
    own = [rank for rank in failed if not rank.was_stopped]
    if not failed:
        return 0
    if job.interrupted_by is not None and not job.failed_before_interrupt:
        say(f"farspan run: ended by {job.interrupted_by.name}; logs in {job.log_dir}")
        return 128 + job.interrupted_by
    # A rank that only noticed the failure of another may well have ended before it.
    culprit = next((rank for rank in own if not only_heard(rank)), [*own, *failed][0])
    stopped = [rank for rank in job.ended if rank.was_stopped]
    if job.never_joined and (culprit.was_stopped or only_heard(culprit)):
        say(_describe_absence(job, job.never_joined[0]))
        return 1
    say(_describe_failure(job, culprit, stopped))
    return culprit.returncode if culprit.returncode > 0 else 128 - culprit.returncode


def _describe_failure(job: Job, culprit: Rank, stopped: Sequence[Rank]) -> str:
    code = culprit.returncode
    how = f"exit code {code}" if code > 0 else f"killed by {_signal_name(-code)}"
    lines = [f"farspan run: rank {culprit.number} of {job.num_processes} failed: {how}."]
    reason = _find_reason(job, culprit) if code == _CODE_OF_EXCEPTION else ""
    if reason:
        lines += [f"  why   {reason}"]
    if culprit.log is None:
        lines += ["  Its own output is above."]
    else:
        said = find_cause(culprit.read_tail(), killed=code < 0 and code != -signal.SIGABRT)
        lines += ["", said, ""] if said else ["  It wrote nothing."]
    if code == -signal.SIGKILL:
        lines += ["  why   often the kernel, for want of memory: see dmesg"]
    if stopped:
        names = ", ".join(str(rank.number) for rank in sorted(stopped, key=lambda rank: rank.number))
        lines += [f"  then  ended after {job.grace_s:g} s, still running: rank {names}"]
    if job.num_processes > 1:
        lines += [f"  logs  {culprit.log or job.log_dir / 'rank*.log'}"]
    return "\n".join(lines)


def _find_reason(job: Job, culprit: Rank) -> str:
    """Returns the exception that a rank ended with: its log says it, or, where the disk is full, what others heard of
    it."""
    own = find_exception(culprit.read_tail())
    heard = (find_word_of(culprit.number, rank.read_tail()) for rank in job.ranks if rank is not culprit)
    return (own or next(filter(None, heard), ""))[:_REASON_CHARACTERS]


def _describe_absence(job: Job, absent: Rank) -> str:
    waited = sorted(rank.number for rank in job.ended if rank.returncode != 0)
    names = ", ".join(map(str, waited))
    lines = [
        f"farspan run: rank {absent.number} of {job.num_processes} ended before it called farspan.distribute.",
        f"  why   its program was over (exit code 0), while rank {names} waited for it.",
        "  try   let every rank call farspan.distribute, or none",
        f"  logs  {absent.log or job.log_dir / 'rank*.log'}",
    ]
    return "\n".join(lines)


# ---- what it takes to start


def _find_command(script_argv: Sequence[str]) -> list[str]:
    """Returns the command line that runs a python file, a module or an executable, tied to our life on Linux."""
    argv = list(script_argv)
    if not argv or argv == ["-m"]:
        raise LaunchError(
            "no script to run.",
            why="the command line ends before it." if not argv else "-m needs the name of a module.",
            hint=f"{_EXAMPLE}\nfarspan run -n 4 -m package.module",
        )
    script = Path(argv[0])
    if argv[0] == "-m" or (argv[0].endswith(".py") and script.is_file()):
        command = [sys.executable, *argv]
    elif script.is_file() and os.access(script, os.X_OK):
        command = [str(script.absolute()), *argv[1:]]
    elif (found := shutil.which(argv[0])) is not None and not script.is_file():
        command = [found, *argv[1:]]
    else:
        raise _explain_missing(script)
    if sys.platform == "linux":
        shim = Path(__file__).with_name("child.py")
        command = [sys.executable, "-I", "-S", str(shim), str(os.getpid()), *command]
    return command


def _explain_missing(script: Path) -> LaunchError:
    if script.is_file():
        return LaunchError(
            f"{script} is neither a python file nor executable.",
            why="its name does not end in .py and its x permission is not set.",
            hint=f"chmod +x {script}     or farspan run -n 4 python {script}",
        )
    if script.is_dir():
        return LaunchError(
            f"{script} is a folder, not a script.",
            why="farspan run starts a .py file, -m and a module, or an executable.",
            hint=f"farspan run -n 4 -m {'.'.join(script.parts)}",
        )
    near = sorted(p.name for p in Path(".").glob("*.py"))[:5]
    return LaunchError(
        f"there is no script {script}.",
        why=f"looked in {Path.cwd()}" + (f", which has {', '.join(near)}." if near else "."),
        hint=f"{_EXAMPLE}     (options of farspan run come before the script)",
    )


def _make_log_dir(log_dir: str | os.PathLike[str] | None) -> Path:
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="farspan-"))
    folder = Path(log_dir).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the folder for logs, {folder}, cannot be made.",
            why=f"{error.strerror}.",
            hint="another --log-dir, or none: a fresh folder is made",
        ) from None
    return folder


def _make_run_folder(shared: dict[str, str], num_processes: int, files: str | None) -> str | None:
    """Make the folder, which is this user's alone, where the ranks find each other, and for the files of other ranks
    than 0; every Python that starts learns of it by `shared`.
    """
    shared["FARSPAN_FILES"] = files or shared.get("FARSPAN_FILES") or os.environ.get("FARSPAN_FILES") or "first"
    keeps_apart(shared["FARSPAN_FILES"])  # raises if it is no choice
    if num_processes == 1:
        shared["FARSPAN_RUN_FOLDER"] = ""
        return None
    folder = shared["FARSPAN_RUN_FOLDER"] = tempfile.mkdtemp(prefix="farspan-run-")
    shared[f"{PREFIX}STORE"] = str(Path(folder) / "store")
    site = str(Path(__file__).with_name("files") / "site")
    known = shared.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    shared["PYTHONPATH"] = os.pathsep.join([each for each in (site, known) if each])
    return folder


def _shared_variables(num_processes: int, log_dir: Path) -> dict[str, str]:
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return {
        f"{PREFIX}WORLD_SIZE": str(num_processes),
        f"{PREFIX}LOCAL_WORLD_SIZE": str(num_processes),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores // num_processes)),
        "PYTHONUNBUFFERED": "1",
        "FARSPAN_LAUNCHER": "run",
        "FARSPAN_LOG_DIR": str(log_dir),
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
