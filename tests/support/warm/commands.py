"""`farspan run` without its imports: the launcher and its ranks are forked from processes that have imported torch.

    server --> launcher --> nursery, which has one thread
                  |            |
                  |   command, |--> rank, which the kernel gives to the launcher as its own child
                  |   variables, files

All but exec is as in a real start: processes with numbers, signals, parents, outputs and ends of their own, tied to the
launcher's life; what `farspan run` puts before the script is run before it. tests/launch has the real starts. For tests
of what comes after a start, on Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.hangs.hangs import PATIENCE_S, descendants, show_stacks, show_stacks_at_end
from tests.support.ranks import SOURCES, ended, outputs
from tests.support.warm.servers import start

__all__ = ["farspan_run"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LONGEST_REQUEST = 2**20


def farspan_run(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `farspan run` with these words after it; returns how the launcher ended, and its outputs.

    Args:
        words: The options of `farspan run`, a python file, and its arguments.
        environment: More variables.
        timeout_s: When the launcher is killed, and with it its ranks: the error shows the stacks of all of them.
        folder: Where it runs, if not in the current one.
    """
    words = [f"{SOURCES}/farspan/__main__.py", "run", *words]
    variables = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", **(environment or {})}
    with tempfile.TemporaryDirectory() as shown:
        paths = outputs(Path(shown), 0)
        process = start(0, _launch, words, variables, str(folder or Path.cwd()), *map(str, paths))
        process.join(timeout_s)
        is_late = process.exitcode is None
        if is_late and process.pid is not None:
            show_stacks(descendants(process.pid))
            process.join(PATIENCE_S)  # the launcher ends after its ranks
            show_stacks([process.pid] if process.exitcode is None else [])
            process.join(PATIENCE_S)
            process.kill()
            process.join()
        out, err = (path.read_text(errors="replace") if path.exists() else "" for path in paths)
        stacks = [f"{path.name}:\n{path.read_text()}" for path in sorted(Path(shown).glob("stacks of *"))]
    if is_late:
        raise AssertionError("\n".join([f"not ended after {timeout_s} s: {words}", out, err, *stacks]))
    return subprocess.CompletedProcess(words, process.exitcode or 0, out, err)


def _launch(words: list[str], variables: Mapping[str, str], folder: str, stdout: str, stderr: str) -> None:
    """Becomes the launcher."""
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (stdout, stderr)]
    os.chdir(folder)
    _Forked.stacks = os.path.dirname(stderr)
    _Forked.nursery = _open_nursery()
    rank_process: Any = __import__("farspan.launch.rank_process", fromlist=["subprocess"])
    rank_process.subprocess = types.SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=_Forked)
    _become(words, variables, files)


def _become(words: list[str], variables: Mapping[str, str], files: Sequence[int], site: str = "") -> None:
    """Runs `python SCRIPT ARGUMENTS` in this process, after what `farspan run` has every Python load, and ends it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    name = f"rank {variables['FARSPAN_RANK']}" if "FARSPAN_RANK" in variables else "the launcher"
    path = f"{_Forked.stacks}/stacks of {name}, process {os.getpid()}"
    show_stacks_at_end(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTHONUNBUFFERED" in variables:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv[:] = words
    known = [
        path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path and path != os.path.dirname(site)
    ]
    sys.path[:0] = [os.path.dirname(os.path.abspath(words[0])), *known]
    if site:
        runpy.run_path(site)
    os._exit(ended(words[0]))


def _open_nursery() -> socket.socket:
    """Forks a process that forks ranks on demand; returns the socket that it listens to."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_REQUEST)
    launcher = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    while True:
        request, files, _, _ = socket.recv_fds(theirs, _LONGEST_REQUEST, 3)
        if not request:
            os._exit(0)
        _fork_rank(request, files, theirs, launcher)


def _fork_rank(request: bytes, files: list[int], answers: socket.socket, launcher: int) -> None:
    """Forks a process that runs a command, as a child of the launcher's, which adopts what has no parent any more."""
    orphaned, parent_has_ended = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(parent_has_ended)
        os.read(orphaned, 1)
        os.close(orphaned)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGKILL)
        os.setsid()
        answers.send(str(os.getpid()).encode())
        answers.close()
        given = json.loads(request)
        site = next(item for item in given["variables"]["PYTHONPATH"].split(os.pathsep) if item.endswith("/site"))
        _become(given["words"], given["variables"], files, f"{site}/sitecustomize.py")
    os.waitpid(between, 0)
    for file in (orphaned, parent_has_ended, *files):
        os.close(file)


class _Forked:
    """What the launcher needs of subprocess.Popen."""

    nursery: socket.socket
    stacks: str
    """The folder in which each process shows its stacks."""
    _one_at_a_time = threading.Lock()

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        assert command[0] == command[5] == sys.executable and command[3].endswith("/child.py")
        with open(os.devnull) as nothing, self._one_at_a_time:
            files = [0 if stdin is None else nothing.fileno(), stdout or 1, 2 if stderr is None else stderr]
            request = json.dumps({"words": list(command[6:]), "variables": dict(env)}).encode()
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            socket.send_fds(self.nursery, [request], files)
            self.pid = int(self.nursery.recv(64))
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode
