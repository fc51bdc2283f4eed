"""One start of all ranks, from the folder by which they find each other to what is said about their end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farspan.launch.attempts.outcome import Outcome, conclude
from farspan.launch.attempts.variables import make_run_folder
from farspan.launch.job import Crew, Events, Job
from farspan.launch.rank.notes import heard_ranks, trains_copies
from farspan.launch.sweep import Sweeper

__all__ = ["Attempt"]

_ALONE = """\
farspan run: nothing called farspan.distribute(model): {n} copies of the model were trained, each by itself.
  try  model = farspan.distribute(model)"""


class Attempt:
    """One start of all ranks, which may be prepared before it is its turn.

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
        open_job: Has the ranks together.
    """

    def __init__(
        self,
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
        open_job: Callable[..., Job] = Job,
    ) -> None:
        self._events = events
        self._comes_again = comes_again
        self._log_dir = log_dir
        shared = dict(variables)
        self._run_folder = make_run_folder(shared, num_processes, files)
        self._sweeper = None if self._run_folder is None else Sweeper(self._run_folder)
        self._job: Job | None = None
        self._arguments: dict[str, Any] = {
            "log_dir": log_dir,
            "run_folder": self._run_folder,
            "grace_s": grace_s,
            "comes_again": comes_again,
            "keeps_going": keeps_going,
        }
        self._open_job = lambda: open_job(events, open_crew(shared), **self._arguments)

    def start(self) -> None:
        """Starts the ranks."""
        self._job = self._open_job()
        self._job.start()

    def run(self, says: Callable[[str], None]) -> Outcome:
        """Returns what has become of the ranks, which it starts if they are not started, when all have ended.

        Args:
            says: Shows a text on the console.
        """
        run_folder = self._run_folder
        try:
            try:
                if self._job is None:
                    self.start()
                assert self._job is not None
                self._job.wait()
            finally:
                if self._job is not None:
                    self._job.close(kills=self._comes_again)
                    for event in self._job.strays:
                        self._events.put(event)
        finally:
            are_copies = run_folder is not None and trains_copies(run_folder)
            heard = set[int]() if run_folder is None else heard_ranks(run_folder)
            self._remove_folder()
        job = self._job
        assert job is not None
        outcome = conclude(job, heard)
        if outcome.text:
            says(outcome.text)
        elif are_copies and job.trains_one_model:
            says(_ALONE.format(n=job.num_processes))
        return outcome

    def discard(self) -> None:
        """Ends ranks whose turn has not come, and leaves nothing of them."""
        if self._job is not None:
            self._job.close(kills=True)
        self._remove_folder()
        with contextlib.suppress(OSError):  # only where none has written
            for log in self._log_dir.iterdir():
                if log.stat().st_size == 0:
                    log.unlink()
            self._log_dir.rmdir()

    def _remove_folder(self) -> None:
        if self._run_folder is not None and not self._comes_again:  # else the sweeper waits for those who still use it
            shutil.rmtree(self._run_folder, ignore_errors=True)
        if self._sweeper is not None:
            self._sweeper.close()
