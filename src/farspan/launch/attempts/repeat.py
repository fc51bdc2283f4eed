"""Starts all ranks until they have ended well, or are not started again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from farspan.errors import LaunchError
from farspan.launch.attempts.again import Restarts
from farspan.launch.attempts.attempt import Attempt
from farspan.launch.attempts.standby import Standby
from farspan.launch.attempts.waiting import HostLostError
from farspan.launch.job import Crew, Events, Job
from farspan.launch.terminal import say

__all__ = ["attempt_repeatedly", "make_log_dir"]


def attempt_repeatedly(
    events: Events,
    open_crew: Callable[[dict[str, str]], Crew],
    count: Callable[[], int],
    *,
    folder: Path,
    variables: Mapping[str, str],
    restarts: Restarts,
    files: str | None,
    grace_s: float,
    keeps_going: bool = False,
    says: Callable[[str], None] = say,
    open_job: Callable[..., Job] = Job,
    has_standby: bool = False,
) -> int:
    """Returns the exit code of the last start.

    Args:
        events: By which signals to the launcher come.
        open_crew: Gives where the ranks run, from the variables that all of them get.
        count: Called before each start; gives its number of ranks.
        folder: Of the logs; those of the k-th restart go to `restart-k` in it.
        variables: That all ranks get.
        restarts: Decides whether there is another start.
        files: As in `run`.
        grace_s: Seconds between the first failure and SIGTERM.
        keeps_going: Whether the others go on where a rank is lost, if they can.
        says: Shows a text on the console.
        open_job: Has the ranks of one start together.
        has_standby: Whether the processes of the next start are begun ahead (`standby`).
    """

    def prepare(number: int, num_processes: int, more: Mapping[str, str]) -> Attempt:
        logs = folder / f"restart-{number}" if number else folder
        return Attempt(
            events,
            open_crew,
            num_processes,
            log_dir=make_log_dir(logs),
            variables={**variables, "FARSPAN_LOG_DIR": str(logs), **restarts.variables(number), **more},
            files=files,
            grace_s=grace_s,
            comes_again=restarts.most > 0,
            keeps_going=keeps_going,
            open_job=open_job,
        )

    def prepare_next(more: dict[str, str]) -> Attempt | None:
        if standby is None or restarts.num_done == restarts.most:
            return None
        return prepare(restarts.num_starts + 1, count(), standby.variables() | more)

    standby = Standby(events, prepare_next) if has_standby else None
    try:
        while True:
            start = standby.take() if standby is not None else None
            start = start or prepare(restarts.num_starts, count(), standby.variables() if standby is not None else {})
            try:
                outcome = start.run(says)
            except HostLostError as error:
                if not restarts.count_one():
                    raise
                says(f"farspan run: {error.what} {error.why} restart {restarts.num_done} of {restarts.most}")
                continue
            goes_on, text = restarts.starts_again(outcome)
            if text:
                says(text)
            if not goes_on:
                return outcome.code
    finally:
        if standby is not None:
            standby.close()


def make_log_dir(log_dir: str | os.PathLike[str] | None) -> Path:
    """Returns the folder, made if it is not there; None makes a fresh one for temporary files.

    Raises:
        LaunchError: It cannot be made.
    """
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
