"""A plugin of pytest that collects the tests once, and runs those that reach a fault in forks, with the fault active.

    pytest, all collected --fork--> fault 17: tests until one fails --fork--> that one, without the fault
                          --fork--> fault 18: ...

A test that hangs or ends its process notices a fault, too. One that fails also without the fault tells nothing: the
tests after it are asked. Processes that tests start are forked from the servers of tests/support/warm, which are this
process's own; what a fork has started is ended with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from benchmarks.mutants.reached import bits, read_reached
from hypothesis import settings

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Tests to be run in a fork, until the first that fails."""

    fault: int
    tests: Sequence[str]
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """How a fork ended.

    Attributes:
        noticed: Which of the tests failed.
        how: "failed", "hung", "died".
        num_run: Tests that were run to their end.
        is_capped: Whether the time was up before the tests were.
        is_reached: Whether the fault's point was reached.
        duration_s: Of all.
    """

    noticed: int | None
    how: str
    num_run: int
    is_capped: bool
    is_reached: bool
    duration_s: float


_Job = Generator[_Request, _Result, dict[str, Any]]


def pytest_collection() -> None:
    """The examples of hypothesis are the same in each fork, and none is kept for the next one."""
    steady = settings.get_profile("steady")
    settings.register_profile("mutants", parent=steady, derandomize=True, database=None)
    settings.load_profile("mutants")


_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    order = json.loads(Path(os.environ.pop("MUTANTS_JOBS")).read_text())
    _Hunt(session, order).run()
    return True


class _Hunt:
    """All jobs, several at a time."""

    def __init__(self, session: pytest.Session, order: dict[str, Any]) -> None:
        from tests.support.warm import servers

        self._session = session
        self._order = order
        self._limits: dict[str, float] = order["limits_s"]
        self._items = {item.nodeid: item for item in session.items}
        self._folder = Path(order["folder"])
        self._given: list[Mapping[str, Any]] = [*servers.open_to_others()]
        servers.wait_for_servers(servers.NUM_SERVERS)

    def run(self) -> None:
        waiting = list(self._order["jobs"])
        running: list[tuple[_Job, _Fork]] = []
        assert threading.active_count() == 1, threading.enumerate()
        gc.collect()
        gc.freeze()
        while waiting or running:
            while waiting and len(running) < self._order["num_workers"]:
                job = self._job(waiting.pop(0))
                self._go_on(job, None, running)
            time.sleep(0.02)
            for job, fork in list(running):
                if (result := fork.poll()) is not None:
                    running.remove((job, fork))
                    self._go_on(job, result, running)

    def _go_on(self, job: _Job, result: _Result | None, running: list[tuple[_Job, _Fork]]) -> None:
        try:
            request = next(job) if result is None else job.send(result)
        except StopIteration as end:
            with Path(self._order["rows"]).open("a") as file:
                file.write(json.dumps(end.value) + "\n")
            return
        running.append((job, _Fork(self, request)))

    def _job(self, job: dict[str, Any]) -> _Job:
        """Hunts one fault; the row that comes of it."""
        row: dict[str, Any] = {"fault": job["fault"], "noticed_by": [], "unsure": [], "capped": [], "num_run": {}}
        row |= {"digest": self._order["digest"], "is_reached": False, "duration_s": 0.0}
        is_all = self._order["is_all"]
        for stage in ("quick", "rest"):
            row["num_run"][stage] = 0
            left = [name for name in job[stage] if name in self._items]
            budget_s = self._order["budgets_s"][stage]
            while left:
                tests = left[:1] if is_all else left
                result = yield _Request(fault=job["fault"], tests=tests, budget_s=budget_s)
                budget_s -= result.duration_s
                row["duration_s"] = round(row["duration_s"] + result.duration_s, 2)
                row["num_run"][stage] += result.num_run
                row["is_reached"] |= result.is_reached
                if result.is_capped or (budget_s <= 0 and len(left) > 1):
                    row["capped"].append(stage)
                if result.noticed is not None:
                    name = tests[result.noticed]
                    check = yield _Request(fault=-1, tests=[name], budget_s=1e9)
                    if check.noticed is None:
                        row["noticed_by"].append({"test": name, "stage": stage, "how": result.how})
                    else:
                        row["unsure"].append(name)
                    left = left[result.noticed + 1 :]
                else:
                    left = left[1:] if is_all else []
                if row["capped"][-1:] == [stage] or (row["noticed_by"] and not is_all):
                    break
            if row["noticed_by"] and not is_all:
                break
        return row

    def enter(self, request: _Request, folder: Path) -> NoReturn:
        """The life of a fork."""
        with contextlib.suppress(BaseException):
            self._enter(request, folder)
        os._exit(0)

    def _enter(self, request: _Request, folder: Path) -> None:
        from tests.support.warm import servers

        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["MUTANTS_FAULT"] = str(request.fault)
        os.environ["MUTANTS_REACHED"] = str(folder / "reached")
        servers.use(self._given)
        servers._server_of.cache_clear()
        (folder / "tmp").mkdir()
        factory: Any = self._session.config._tmp_path_factory  # pyright: ignore[reportAttributeAccessIssue]
        factory._basetemp = folder / "tmp"
        began = time.monotonic()
        items = [self._items[name] for name in request.tests]
        with (folder / "progress").open("a", buffering=1) as progress:
            for number, item in enumerate(items):
                if time.monotonic() - began > request.budget_s:
                    progress.write("capped\n")
                    return
                progress.write(f"start {number} {time.monotonic()}\n")
                following = items[number + 1] if number + 1 < len(items) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                sys.stdout.flush()
                if _failed:
                    progress.write(f"failed {number}\n")
                    return
                progress.write(f"passed {number}\n")
            progress.write("end\n")

    def limit_s(self, name: str) -> float:
        """When a test counts as one that hangs."""
        return self._limits[name]

    @property
    def folder(self) -> Path:
        return self._folder


class _Fork:
    """A fork as its parent sees it."""

    num_forks = 0

    def __init__(self, hunt: _Hunt, request: _Request) -> None:
        _Fork.num_forks += 1
        self._hunt, self._request = hunt, request
        self._folder = hunt.folder / f"fork{os.getpid()}.{_Fork.num_forks}"
        self._folder.mkdir()
        self._began, self._began_at = time.monotonic(), time.time()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            hunt.enter(request, self._folder)

    def poll(self) -> _Result | None:
        """How it ended; None while it runs."""
        has_ended = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        file = self._folder / "progress"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        last = lines[-1] if lines else ["start", "0", str(self._began)]
        is_hung = False
        if not has_ended:
            limit_s = self._hunt.limit_s(self._request.tests[int(last[1])]) if last[0] == "start" else 60.0
            since = float(last[2]) if last[0] == "start" else max(file.stat().st_mtime - time.time(), -1e9)
            waited_s = time.monotonic() - since if last[0] == "start" else -since
            if waited_s <= limit_s:
                return None
            is_hung = True
        noticed, how = None, ""
        if last[0] == "failed":
            noticed, how = int(last[1]), "failed"
        elif last[0] == "start":
            noticed, how = int(last[1]), "hung" if is_hung else "died"
        elif last[0] == "passed":  # between two tests
            noticed, how = min(int(last[1]) + 1, len(self._request.tests) - 1), "hung" if is_hung else "died"
        found = read_reached(self._folder / "reached")
        self._clean(found.pids, is_waited_for=has_ended)
        return _Result(
            noticed=noticed,
            how=how,
            num_run=sum(line[0] in ("passed", "failed") for line in lines),
            is_capped=last[0] == "capped",
            is_reached=self._request.fault in bits(found.mask),
            duration_s=time.monotonic() - self._began,
        )

    def _clean(self, pids: frozenset[int], *, is_waited_for: bool) -> None:
        """Ends what the fork has started, and removes its files."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if not is_waited_for:
            os.waitpid(self._pid, 0)
        for pid in pids - {self._pid, os.getpid()}:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() >= self._began_at - 1.0:
                    process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
