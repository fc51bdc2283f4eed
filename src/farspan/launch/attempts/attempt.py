"""One start of all ranks, from the folder by which they find each other to what is said about their end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from farspan.launch.attempts.outcome import Outcome, conclude
from farspan.launch.attempts.variables import make_run_folder
from farspan.launch.job import Crew, Events, Job
from farspan.launch.rank.notes import heard_ranks, trains_copies
from farspan.launch.sweep import Sweeper
from farspan.launch.terminal import say

__all__ = ["attempt"]

_ALONE = """\
farspan run: nothing called farspan.distribute(model): {n} copies of the model were trained, each by itself.
  try  model = farspan.distribute(model)"""


def attempt(
    events: Events,
    open_crew: Callable[[dict[str, str]], Crew],
    num_processes: int,
    *,
    log_dir: Path,
    variables: Mapping[str, str],
    files: str | None,
    grace_s: float,
    comes_again: bool,
    keeps_going: bool = False,
    says: Callable[[str], None] = say,
    open_job: Callable[..., Job] = Job,
) -> Outcome:
    """Starts all ranks, and returns what has become of them when all have ended and nothing of theirs is left.

    Args:
        events: By which signals to the launcher come.
        open_crew: Gives where the ranks run, from the variables that all of them get.
        num_processes: Number of ranks.
        log_dir: Folder of their logs.
        variables: That all ranks get.
        files: As in `run`.
        grace_s: Seconds between the first failure and SIGTERM.
        comes_again: Whether another start may follow, before which all that a rank has left running must be gone.
        keeps_going: Whether the others go on where a rank is lost, if they can.
        says: Shows a text on the console.
        open_job: Has the ranks together.
    """
    shared = dict(variables)
    run_folder = make_run_folder(shared, num_processes, files)
    sweeper = None if run_folder is None else Sweeper(run_folder)
    try:
        job = open_job(
            events,
            open_crew(shared),
            log_dir=log_dir,
            run_folder=run_folder,
            grace_s=grace_s,
            comes_again=comes_again,
            keeps_going=keeps_going,
        )
        try:
            job.start()
            job.wait()
        finally:
            job.close(kills=comes_again)
    finally:
        are_copies = run_folder is not None and trains_copies(run_folder)
        heard = set[int]() if run_folder is None else heard_ranks(run_folder)
        if run_folder is not None and not comes_again:  # else the sweeper waits for those who still use it
            shutil.rmtree(run_folder, ignore_errors=True)
        if sweeper is not None:
            sweeper.close()
    outcome = conclude(job, heard)
    if outcome.text:
        says(outcome.text)
    elif are_copies and job.trains_one_model:
        says(_ALONE.format(n=num_processes))
    return outcome
