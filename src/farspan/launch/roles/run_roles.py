"""Starts the processes of several roles, each role with ranks, logs and restarts of its own.

                  ranks   console         random numbers, files      its end
    the last role 0..n-1  rank 0 has it   one program, as ever       ends the run, with its exit code
    other roles   0..n-1  logs            each process for itself    the run goes on

The ranks of a role find each other, and nobody else, by a store of their own: `farspan.distribute` knows nothing of
roles.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from farspan import settings
from farspan.errors import LaunchError
from farspan.launch.attempts import (
    Restarts,
    attempt_repeatedly,
    find_command,
    make_log_dir,
    own_threads,
    shared_variables,
)
from farspan.launch.attempts.waiting import NotStartedError, say_not_started
from farspan.launch.hosts import Fleet
from farspan.launch.job import Crew, Events, Job, Over, signals_to
from farspan.launch.rank.entropy import entropy_variables
from farspan.launch.roles.loose_job import LooseJob
from farspan.launch.roles.places import OneMachine, SeveralHosts
from farspan.launch.roles.role import Role
from farspan.launch.sweep import Sweeper
from farspan.launch.terminal import say

__all__ = ["run_roles"]


def run_roles(
    script_argv: Sequence[str],
    roles: Sequence[Role],
    *,
    log_dir: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    files: str | None = None,
    max_restarts: int = 0,
    keeps_going: bool = False,
    fleet: Fleet | None = None,
    grace_s: float = 5.0,
) -> int:
    """Runs the processes of all roles, until those of the last role have ended; ends the others then.

    The last role runs as `farspan run -n` does. Of the others a process that fails or is killed is started again, or
    left out, and the rest goes on; but where a role has called `farspan.distribute`, its ranks fail together. Every
    process gets FARSPAN_ROLE, and its rank and world size are those within its role.

    Args:
        script_argv: As in `run`; all roles run it.
        roles: At least one; no name twice.
        log_dir: Folder for `ROLE/rank0.log`, ...; None makes a fresh one for temporary files.
        environment: Further variables for the last role.
        files: As in `run`, for the last role; processes of the others write where the script says.
        max_restarts: How often the last role, and any process of another one, may be started again.
        keeps_going: As in `run`, for the last role.
        fleet: The hosts over whose slots the roles are laid (`lay`); None for this machine alone.
        grace_s: Seconds between the first failure in a role and SIGTERM.

    Returns:
        The exit code of the last role, as in `run`.

    Raises:
        LaunchError: Nothing was started: no such script, bad folder, a role twice, too few slots.
    """
    _check(roles)
    command = find_command(script_argv)
    folder = make_log_dir(log_dir)
    services = tempfile.mkdtemp(prefix="farspan-run-")
    code = 1
    with contextlib.ExitStack() as stack:
        stack.callback(Sweeper(services).close)
        if fleet is not None:
            stack.callback(lambda: fleet.close(code))
        places = OneMachine(command, services) if fleet is None else SeveralHosts(fleet, roles, services)
        stack.callback(places.directory.close)
        everybody = {"FARSPAN_SERVICES": services} | _shared(roles, fleet)
        *others, main = [
            _Running(places, role, folder / role.name, everybody, max_restarts=max_restarts, grace_s=grace_s)
            for role in roles
        ]
        stack.enter_context(signals_to(main.events, *[other.events for other in others]))
        try:
            if max_restarts:
                places.take_in_when_back()
            places.gather(main.events)
            say(f"farspan run: {_describe(roles)}; logs in {folder}{places.describe()}")
            with _beside(main, others):
                code = main.run_as_program(environment or {}, files, keeps_going=keeps_going)
        except NotStartedError as error:
            code = say_not_started(error)
    return code


@contextlib.contextmanager
def _beside(main: _Running, others: Sequence[_Running]) -> Generator[None]:
    """Runs the other roles beside the body, and ends them after it.

    Raises:
        LaunchError: A role could not be started.
    """
    threads = [threading.Thread(target=other.run_beside, args=(main,), daemon=True) for other in others]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        for other in others:
            other.events.put(Over())
        for thread in threads:
            thread.join()
    for other in others:
        if other.error is not None:
            raise other.error


class _Running:
    """The starts of one role."""

    def __init__(
        self,
        places: OneMachine | SeveralHosts,
        role: Role,
        folder: Path,
        variables: Mapping[str, str],
        *,
        max_restarts: int,
        grace_s: float,
    ) -> None:
        self.role = role
        self.events: Events = queue.SimpleQueue()
        self.error: LaunchError | None = None
        """Why no process of the role could be started."""
        self._places = places
        self._num_starts = 0
        self._folder = folder
        self._variables = {**variables, "FARSPAN_ROLE": role.name}
        self._max_restarts = max_restarts
        self._grace_s = grace_s

    def run_as_program(self, more: Mapping[str, str], files: str | None, *, keeps_going: bool) -> int:
        """Runs it as the program that the run is for, with more variables; returns its exit code."""
        variables = {**shared_variables(self.role.num_processes, self._folder), **self._variables, **more}
        if keeps_going:
            variables["FARSPAN_KEEP_GOING"] = "1"
        if self.role.num_processes > 1:
            variables |= entropy_variables(os.environ | variables)
        return self._run(variables, files, Job, console=0, keeps_going=keeps_going)

    def run_beside(self, main: _Running) -> None:
        """Runs it as one that others go on without; where it cannot be started, ends the role the run is for."""
        variables = shared_variables(self.role.num_processes, self._folder) | self._variables
        loose = functools.partial(LooseJob, role=self.role.name, max_restarts=self._max_restarts, says=say)
        try:
            code = self._run(variables, "all", loose)
            if code:
                say(f"farspan run: the run goes on without {self.role.name}")
        except NotStartedError:  # while it waited for hosts
            return
        except LaunchError as error:
            if self._num_starts > 1:
                say(f"farspan run: the run goes on without {self.role.name}, which cannot be started again: {error}")
                return
            self.error = error
            main.events.put(Over())

    def _run(
        self,
        variables: Mapping[str, str],
        files: str | None,
        open_job: Callable[..., Job],
        *,
        console: int | None = None,
        keeps_going: bool = False,
    ) -> int:
        restarts = Restarts(self._max_restarts)

        def open_crew(shared: dict[str, str]) -> Crew:
            return self._places.open(self.role, self.events, shared, files, console=console)

        def count() -> int:
            self._num_starts += 1
            if self._num_starts > 1:  # before the first one all hosts were there
                self._places.gather(self.events, self.role)
            return self.role.num_processes

        try:
            return attempt_repeatedly(
                self.events,
                open_crew,
                count,
                folder=self._folder,
                variables=variables,
                restarts=restarts,
                files=files,
                grace_s=self._grace_s,
                keeps_going=keeps_going,
                says=self._say,
                open_job=open_job,
            )
        finally:
            restarts.close()

    def _say(self, text: str) -> None:
        start = "farspan run: "
        say(f"{start}{self.role.name}: {text.removeprefix(start)}" if text.startswith(start) else text)


def _check(roles: Sequence[Role]) -> None:
    names = [role.name for role in roles]
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise LaunchError(
            f"the role {again} is there twice.", why="a name is that of one role.", hint=f"--role {again}=4, once"
        )


def _shared(roles: Sequence[Role], fleet: Fleet | None) -> dict[str, str]:
    """Returns the variables that the processes of all roles have in common."""
    if fleet is None:
        return own_threads(sum(role.num_processes for role in roles))
    # One secret for all roles, by which their processes let each other in.
    secret = settings.text("SECRET") or secrets.token_hex(32)
    return {f"{settings.PREFIX}SECRET": secret, f"{settings.PREFIX}HOSTS": str(fleet.most)}


def _describe(roles: Sequence[Role]) -> str:
    counts = ", ".join(f"{role.num_processes} of {role.name}" for role in roles)
    return f"{counts}; the run is over when {roles[-1].name} is"
