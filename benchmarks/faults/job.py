"""One run: a launcher in a process of its own, the fault if it comes from outside, and an end after a bounded time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.faults.kinds import DEADLINE_S, KINDS, Case
from benchmarks.faults.left import end_marked, left_files, shared_names, wait_for_none

__all__ = ["Outcome", "plain_lines", "run_case"]

_SCRIPT = Path(__file__).with_name("train.py")
_LONGEST_S = 90.0
"""Of a run whose fault nobody has found."""
_SETTLE_S = {"run": 3.0, "torchrun": 8.0}
"""How long helpers may outlive the launcher: workers of torch's loader look for their parent every 5 s."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a case.

    Attributes:
        code: The launcher's exit code; None if it had to be ended.
        out, err: What the launcher and the ranks have written.
        logs: Of each other rank, where the launcher keeps one.
        struck: Whether the fault has come at all.
        duration_s: From the fault until the launcher and every process with the mark had ended.
        processes: Those that were left.
        files: The same of folders and shared memory.
        report_kept: Whether a report lies where one was asked for.
    """

    code: int | None = None
    out: str = ""
    err: str = ""
    logs: dict[str, str] = field(default_factory=dict)
    struck: bool = False
    duration_s: float = 0.0
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    report_kept: bool = False


class _Events:
    """What the ranks send of their moments."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))
        self._socket.settimeout(0.2)
        self._queue: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.seen: list[dict[str, object]] = []
        self._over = False
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while not self._over:
            with contextlib.suppress(TimeoutError):
                self._queue.put(json.loads(self._socket.recv(4096)))

    def wait(self, name: str, rank: int, until: float, process: subprocess.Popen[bytes]) -> dict[str, object] | None:
        """The first event of that name and rank; None if the launcher ends first, or the time does."""
        while True:
            for event in self.seen:
                if event["event"] == name and event["rank"] == rank:
                    return event
            if time.monotonic() > until or (process.poll() is not None and self._queue.empty()):
                return None
            with contextlib.suppress(queue.Empty):
                self.seen.append(self._queue.get(timeout=0.05))

    def last(self, name: str) -> float | None:
        """When an event of that name came last."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.seen.append(self._queue.get(timeout=0.0))
        return max((float(str(event["time"])) for event in self.seen if event["event"] == name), default=None)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self._socket.close()


def run_case(case: Case, folder: Path, cache: Path) -> Outcome:
    """Run a case in a new folder; nothing of it runs when this returns."""
    mark = f"faults-{secrets.token_hex(8)}"
    for name in ("tmp", "logs", "report"):
        (folder / name).mkdir(parents=True)
    (folder / "case.json").write_text(json.dumps(case.described()))
    shared_before = shared_names()
    outcome = Outcome()
    with _mounts(case, folder):
        try:
            _run(case, folder, cache, mark, outcome)
            left = wait_for_none(mark, _SETTLE_S[case.launcher])
            outcome.processes = list(left.values())
        finally:
            end_marked(mark)
            wait_for_none(mark, 5.0)
        for path in sorted((folder / "logs").rglob("*.log")):
            outcome.logs[path.name] = path.read_text(errors="replace")
        outcome.report_kept = bool(list((folder / "report").glob("*.html"))) if (folder / "report").is_dir() else False
    outcome.out = (folder / "out").read_text(errors="replace") if (folder / "out").exists() else outcome.out
    outcome.err = (folder / "err").read_text(errors="replace")
    outcome.files = left_files(folder / "tmp", shared_before)
    return outcome


def _run(case: Case, folder: Path, cache: Path, mark: str, outcome: Outcome) -> None:
    events = _Events(folder / "events")
    is_closed = case.kind == "closed_stdout"
    try:
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                _command(case, folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_closed else out,
                stderr=err,
                env=_environment(case, folder, cache, mark),
                cwd=folder,
                start_new_session=True,
            )
        until = time.monotonic() + _LONGEST_S
        struck_at = _strike(case, process, events, until)
        _wait(process, until)
        outcome.code = process.poll()
        if process.stdout is not None:
            process.stdout.close()
        own = events.last("fault")
        struck_at = struck_at if own is None else max(own, struck_at or own)
        outcome.struck = struck_at is not None
        wait_for_none(mark, _SETTLE_S[case.launcher], but={process.pid})
        outcome.duration_s = time.monotonic() - (struck_at or time.monotonic())
        if outcome.code is None:
            process.kill()
            process.wait()
    finally:
        events.close()


def _wait(process: subprocess.Popen[bytes], until: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.1, until - time.monotonic()))


def _strike(case: Case, process: subprocess.Popen[bytes], events: _Events, until: float) -> float | None:
    """Bring the fault, if it comes from outside; when it was."""
    if case.kind == "closed_stdout":
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return time.monotonic()
    if case.kind == "stop_and_raise":
        if events.wait("stop the victim", case.other, until, process) is None:
            return None
        victim = events.wait("started", case.victim, until, process)
        assert victim is not None
        return _send(int(str(victim["pid"])), signal.SIGSTOP)
    given = KINDS[case.kind].from_outside
    if given is None:
        return None
    event = events.wait(case.since, case.victim, until, process)
    if event is None:
        return None
    time.sleep(max(0.0, float(str(event["time"])) + case.delay_s - time.monotonic()))
    name, whom = given
    return _send(process.pid if whom == "launcher" else int(str(event["pid"])), signal.Signals[name])


def _send(pid: int, number: signal.Signals) -> float | None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return None
    return time.monotonic()


def _command(case: Case, folder: Path) -> list[str]:
    script = [str(_SCRIPT), json.dumps(case.described())]
    if case.launcher == "torchrun":
        port = _free_port(case)
        words = ["-m", "torch.distributed.run", f"--nproc-per-node={case.num_ranks}", f"--master-port={port}"]
        return [sys.executable, *words, *script]
    return [
        *(sys.executable, "-m", "farspan", "run", "-n", str(case.num_ranks)),
        *("--log-dir", str(folder / "logs"), *script),
    ]


def _free_port(case: Case) -> int:
    """One below those that systems give to whoever asks for any."""
    for number in range(1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 10_000 + (case.seed * 37 + number) % 20_000))
            return int(listener.getsockname()[1])
    raise RuntimeError("no port is free")


def _environment(case: Case, folder: Path, cache: Path, mark: str) -> dict[str, str]:
    given = {name: text for name, text in os.environ.items() if not name.startswith(("FARSPAN_", "FAULTS_"))}
    given |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(cache),
        "FAULTS_MARK": mark,
        "FAULTS_EVENTS": str(folder / "events"),
    }
    if KINDS[case.kind].has_deadline:
        given["FARSPAN_DEADLINE"] = f"{DEADLINE_S:g}"
    if case.kind == "report":
        given["FARSPAN_REPORT"] = "/dev/full" if case.variant == 0 else str(folder / "report" / "step.html")
    if case.kind == "secret" and case.variant == 1:
        given["FARSPAN_SECRET"] = "of this run"
    return given


@contextlib.contextmanager
def _mounts(case: Case, folder: Path) -> Iterator[None]:
    """A disk of a few KiB for the logs, or one that nobody can write to for the report, where the case wants it."""
    if case.kind == "full_disk":
        place, options = folder / "logs", "size=16k"
    elif case.kind == "report" and case.variant == 1:
        place, options = folder / "report", "ro"
    else:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=20)


def plain_lines(folder: Path, num_steps: int) -> list[str]:
    """What the program prints without farspan."""
    case = json.dumps({"kind": "plain", "victim": 0, "other": 1, "num_steps": num_steps, "step": -1, "place": ""})
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment = {name: text for name, text in environment.items() if name not in ("RANK", "FARSPAN_RANK")}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), case], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(f"the plain program failed:\n{done.stderr}")
    return done.stdout.splitlines()
