"""Starts the processes of a job on this machine, shows one console, and says who failed and why.

              stdin   stdout            stderr
    rank 0    ours    ours              ours, by a pipe (a terminal, if ours is one) that keeps its end
    rank 1    none    LOG_DIR/rank1.log (both)
    ...

    running --a rank fails--> waiting (the others end by themselves) --grace--> SIGTERM --3 s--> SIGKILL
       |
       +-----Ctrl-C, SIGTERM: passed on to all ranks; again: the ranks are ended at once

Nothing polls: one thread per process waits for its end and puts an event on a queue; signals come by the
same queue; the deadlines are its timeouts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from farspan.errors import LaunchError

__all__ = ["run"]

_ADDR = "127.0.0.1"
_TAIL_BYTES = 1 << 20
_TAIL_LINES = 20
_MESSAGE_LINES = 40
_KILL_AFTER_S = 3.0
_INTERRUPT_GRACE_S = 30.0
_EXAMPLE = "farspan run -n 4 train.py"

_REMOTE = re.compile(r"(?:farspan\.errors\.)?RemoteError(?::|$)")
_HEADER = re.compile(r"(?:Traceback|  \+ Exception Group Traceback) \(most recent call last\):")
_GLUED = re.compile(  # to a progress bar, which leaves its line open
    r"^(.*[^\s|+].*)(?<!Exception Group )(?=Traceback \(most recent call last\):$)", re.MULTILINE
)
_CHAIN = re.compile(r"(?:The above exception was the direct|During handling of the above exception)")
_PREFIX = re.compile(r"^(?:\[rank\d+\]: ?)+")  # torch.distributed puts it before every line of a traceback


def run(
    script_argv: Sequence[str],
    num_processes: int,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    verbose: bool = False,
    grace_s: float = 10.0,
) -> int:
    """Runs `num_processes` processes of a script on this machine, until all have ended.

    Every process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    OMP_NUM_THREADS (its share of the cores, unless set), PYTHONUNBUFFERED, FARSPAN_LAUNCHER=run and
    FARSPAN_LOG_DIR. If a rank fails, the others get `grace_s` seconds to end before they are ended; then
    stderr says once which rank failed first, how, and its own traceback.

    Args:
        script_argv: A python file, `-m` and a module, or an executable; then its arguments.
        num_processes: Number of ranks, at least 1.
        log_dir: Folder for `rank1.log`, `rank2.log`, ...; None makes a fresh one for temporary files.
        port: Port at which rank 0 will listen; None picks a free one.
        environment: Further variables for every process.
        verbose: Say on stderr where the port and the logs are, before the start.
        grace_s: Seconds between the first failure and SIGTERM; SIGKILL follows 3 seconds later.

    Returns:
        0, or the exit code of the rank that failed first, or 128 + the signal that ended it; after Ctrl-C
        130 unless all ranks ended well.

    Raises:
        LaunchError: Nothing was started: no such script, bad number, folder or port.
    """
    if num_processes < 1:
        raise LaunchError(
            f"cannot start {num_processes} processes.",
            why="the number of processes is at least 1.",
            hint=_EXAMPLE,
        )
    command = _find_command(script_argv)
    port = _pick_port(port)
    folder = _make_log_dir(log_dir)
    if verbose:
        _say(f"farspan run: {num_processes} processes, port {port}, logs in {folder}")
    shared = _shared_variables(num_processes, port, folder) | dict(environment or {})
    job = _Job(num_processes=num_processes, log_dir=folder, grace_s=grace_s)
    try:
        with _signals_to(job.events):
            job.start(command, shared)
            job.wait()
    finally:
        job.close()
        if log_dir is None:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if nobody wrote: one rank has no log
    return _conclude(job)


def _conclude(job: _Job) -> int:
    """Says what went wrong, if anything did, and returns the exit code."""
    failed = [rank for rank in job.ended if rank.returncode != 0]
    own = [rank for rank in failed if not rank.was_stopped]
    if not failed:
        return 0
    if job.interrupted_by is not None and not job.failed_before_interrupt:
        _say(f"farspan run: ended by {job.interrupted_by.name}; logs in {job.log_dir}")
        return 128 + job.interrupted_by
    # A rank that only noticed the failure of another may well have ended before it.
    culprit = next((rank for rank in own if not _only_heard_of_it(rank.read_tail())), own[0])
    stopped = [rank for rank in job.ended if rank.was_stopped]
    _say(_describe_failure(job, culprit, stopped))
    return culprit.returncode if culprit.returncode > 0 else 128 - culprit.returncode


def _describe_failure(job: _Job, culprit: _Rank, stopped: Sequence[_Rank]) -> str:
    code = culprit.returncode
    how = f"exit code {code}" if code > 0 else f"killed by {_signal_name(-code)}"
    lines = [f"farspan run: rank {culprit.number} of {job.num_processes} failed: {how}."]
    if culprit.log is None:
        lines += ["  Its own output is above."]
    else:
        said = _find_cause(culprit.read_tail(), killed=code < 0 and code != -signal.SIGABRT)
        lines += ["", said, ""] if said else ["  It wrote nothing."]
    if code == -signal.SIGKILL:
        lines += ["  why   often the kernel, for want of memory: see dmesg"]
    if stopped:
        names = ", ".join(str(rank.number) for rank in sorted(stopped, key=lambda rank: rank.number))
        lines += [f"  then  ended after {job.grace_s:g} s, still running: rank {names}"]
    if job.num_processes > 1:
        lines += [f"  logs  {culprit.log or job.log_dir / 'rank*.log'}"]
    return "\n".join(lines)


# ---- what a log says


def _only_heard_of_it(log: str) -> bool:
    """Whether the last exception in a log is a RemoteError: this rank ended because another one failed."""
    lines = _split_lines(log)
    headers = [i for i, line in enumerate(lines) if _HEADER.match(line)]
    remotes = [i for i, line in enumerate(lines) if _REMOTE.match(line)]
    if not headers:
        return bool(remotes)
    return bool(remotes) and remotes[-1] >= _exception_line(lines, headers[-1])


def _find_cause(log: str, *, killed: bool) -> str:
    """The last traceback of a log with the exceptions chained to it, or else the last lines."""
    lines = _split_lines(log)
    if killed:  # a traceback before a signal was an earlier one that was caught
        fault = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")), None)
        return "\n".join(lines[-_TAIL_LINES:] if fault is None else lines[fault:][:_MESSAGE_LINES])
    start = next((i for i in reversed(range(len(lines))) if _HEADER.match(lines[i])), None)
    if start is None:
        return "\n".join(lines[-_TAIL_LINES:])
    end = _exception_line(lines, start) + _MESSAGE_LINES
    while start >= 3 and _CHAIN.match(lines[start - 2]):
        earlier = next((i for i in reversed(range(start - 2)) if _HEADER.match(lines[i])), None)
        if earlier is None:
            break
        start = earlier
    more = ["..."] if end < len(lines) else []
    return "\n".join(lines[start:end] + more)


def _split_lines(log: str) -> list[str]:
    lines = [_PREFIX.sub("", line) for line in _GLUED.sub(r"\1\n", log).splitlines()]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _exception_line(lines: Sequence[str], header: int) -> int:
    """Where the frames below a traceback's header end and the exception itself stands."""
    below = range(header + 1, len(lines))
    return next((i for i in below if lines[i] and not lines[i].startswith(" ")), len(lines) - 1)


# ---- the processes


class _Rank:
    """One process and its output; `returncode` as in subprocess, once it has ended."""

    def __init__(self, number: int, command: Sequence[str], variables: Mapping[str, str], log_dir: Path):
        self.number = number
        self.returncode = 0
        self.was_stopped = False
        self.has_ended = False
        self.log: Path | None = None
        self._tee: _Tee | None = None
        stdin: int | None = None
        stdout: int | None = None
        if number == 0:
            self._tee = _Tee()
            stderr = self._tee.write_fd
        else:
            self.log = log_dir / f"rank{number}.log"
            stdin = subprocess.DEVNULL
            stdout = stderr = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            self.process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, env=variables, start_new_session=True
            )
        finally:
            if self._tee is not None:
                self._tee.start()
            else:
                os.close(stderr)

    def wait(self) -> int:
        """Blocks until the process ends, and leaves it unreaped, so that its number stays its own."""
        if not hasattr(os, "waitid"):
            return self.process.wait()
        info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if info is None or info.si_code == os.CLD_EXITED:
            return 0 if info is None else info.si_status
        return -info.si_status

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signals the process, or it and all that it started and that stayed in its group."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def read_tail(self) -> str:
        """The end of what it wrote: its log, or for rank 0 its stderr."""
        if self.log is None:
            data = bytes(self._tee.tail) if self._tee is not None else b""
        else:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                data = file.read()
        return data.decode("utf-8", errors="replace")

    def close(self) -> None:
        self.process.wait()
        if self._tee is not None:
            self._tee.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    rank: _Rank
    returncode: int


class _Job:
    """All ranks, and what to do when one of them ends or a signal comes."""

    def __init__(self, *, num_processes: int, log_dir: Path, grace_s: float) -> None:
        self.num_processes = num_processes
        self.log_dir = log_dir
        self.grace_s = grace_s
        # SimpleQueue, because only its put() may be called from within a signal handler.
        self.events: queue.SimpleQueue[_Ended | signal.Signals] = queue.SimpleQueue()
        self.ranks: list[_Rank] = []
        self.ended: list[_Rank] = []  # in the order of their ends
        self.interrupted_by: signal.Signals | None = None
        self.failed_before_interrupt = False
        self._deadline: float | None = None
        self._next_signal = signal.SIGTERM

    def start(self, command: Sequence[str], shared: Mapping[str, str]) -> None:
        for number in range(self.num_processes):
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            try:
                rank = _Rank(number, command, os.environ | dict(shared) | own, self.log_dir)
            except OSError as error:
                raise LaunchError(
                    f"rank {number} of {self.num_processes} could not be started.",
                    why=f"{command[0]}: {error.strerror or error}.",
                    hint="fewer processes, or see ulimit -u and ulimit -n",
                ) from None
            self.ranks.append(rank)
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def wait(self) -> None:
        """Returns when all ranks have ended, by themselves or by us."""
        while len(self.ended) < len(self.ranks):
            timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            try:
                event = self.events.get(timeout=timeout)
            except queue.Empty:
                self._stop_running()
                continue
            if isinstance(event, _Ended):
                self._note_end(event)
            else:
                self._pass_on(event)

    def close(self) -> None:
        """Ends what is left over: helpers of a job that failed, or everything after an error of ours."""
        failed = any(rank.returncode != 0 for rank in self.ended)
        # SIGTERM while nobody had to be ended, SIGKILL once that has been tried.
        leftover_signal = self._next_signal
        for rank in self.ranks:
            if not rank.has_ended:
                rank.send(signal.SIGKILL, group=True)
            elif failed:
                rank.send(leftover_signal, group=True)
        for rank in self.ranks:
            rank.close()

    def _watch(self, rank: _Rank) -> None:
        try:
            returncode = rank.wait()
        except ChildProcessError:  # reaped by close()
            returncode = 1
        self.events.put(_Ended(rank=rank, returncode=returncode))

    def _note_end(self, event: _Ended) -> None:
        event.rank.returncode = event.returncode
        event.rank.has_ended = True
        self.ended.append(event.rank)
        if event.returncode != 0 and self._deadline is None and self._next_signal == signal.SIGTERM:
            self.failed_before_interrupt = self.interrupted_by is None
            grace_s = self.grace_s if self.failed_before_interrupt else _INTERRUPT_GRACE_S
            self._deadline = time.monotonic() + grace_s

    def _pass_on(self, number: signal.Signals) -> None:
        if self.interrupted_by is not None:
            self._stop_running()
            return
        self.interrupted_by = number
        _say(f"farspan run: {number.name} passed on to all ranks; once more ends them at once")
        for rank in self.ranks:
            # A terminal sends Ctrl-C to whole groups. SIGTERM goes to the script alone, which may
            # want its helpers (data loaders) for a last checkpoint.
            rank.send(number, group=number == signal.SIGINT)

    def _stop_running(self) -> None:
        for rank in self.ranks:
            if not rank.has_ended:
                rank.was_stopped = True
                rank.send(self._next_signal, group=True)
        kill_comes = self._next_signal == signal.SIGTERM
        self._deadline = time.monotonic() + _KILL_AFTER_S if kill_comes else None
        self._next_signal = signal.SIGKILL


class _Tee:
    """Copies what is written to `write_fd` to our stderr and keeps its end.

    Where our stderr is a terminal, so is `write_fd`: progress bars go on looking as they should.
    """

    def __init__(self) -> None:
        self.tail = bytearray()
        self._read_fd, self.write_fd = _open_terminal() if os.isatty(2) else os.pipe()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        os.close(self.write_fd)
        self._thread.start()

    def stop(self) -> None:
        """Waits until all that was written has been copied; a helper may still hold the other end."""
        os.close(self._stop_write)
        self._thread.join(timeout=2.0)

    def _copy(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            selector.register(self._stop_read, selectors.EVENT_READ)
            while any(key.fd == self._read_fd for key, _ in selector.select()):
                try:
                    data = os.read(self._read_fd, 1 << 16)
                except OSError:  # a terminal's way to say that nobody holds the other end
                    break
                if not data:
                    break
                self.tail += data
                del self.tail[:-_TAIL_BYTES]
                _write_stderr(data)
        os.close(self._read_fd)
        os.close(self._stop_read)


def _open_terminal() -> tuple[int, int]:
    """A pseudo-terminal of the size of ours that passes bytes on as they are."""
    import termios

    read_fd, write_fd = os.openpty()
    modes = termios.tcgetattr(write_fd)
    modes[1] &= ~termios.OPOST  # the real terminal will do it
    termios.tcsetattr(write_fd, termios.TCSANOW, modes)
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(write_fd, termios.tcgetwinsize(2))
    return read_fd, write_fd


# ---- small things


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[_Ended | signal.Signals]) -> Generator[None, None, None]:
    """Turns SIGINT and SIGTERM into events; those that are ignored (nohup, `&` in a script) stay ignored."""

    def handle(number: int, _frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGINT, signal.SIGTERM]
    before = {s: signal.getsignal(s) or signal.SIG_DFL for s in signals}
    before = {s: handler for s, handler in before.items() if handler is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handle)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # or nobody could learn an exit code
            before[signal.SIGCHLD] = signal.SIG_IGN
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find_command(script_argv: Sequence[str]) -> list[str]:
    """The command line that runs a python file, a module or an executable, tied to our life on Linux."""
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


def _pick_port(port: int | None) -> int:
    if port is not None and not 1 <= port <= 65535:
        raise LaunchError(f"there is no port {port}.", why="ports go from 1 to 65535.", hint="--port 29500")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_ADDR, port or 0))
        except OSError as error:
            why = "another program listens there" if error.errno == errno.EADDRINUSE else str(error)
            raise LaunchError(
                f"port {port} cannot be used.", why=f"{why}.", hint="leave --port out: a free one is found"
            ) from None
        return int(probe.getsockname()[1])


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


def _shared_variables(num_processes: int, port: int, log_dir: Path) -> dict[str, str]:
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": _ADDR,
        "MASTER_PORT": str(port),
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


def _say(text: str) -> None:
    _write_stderr(f"{text}\n".encode(errors="backslashreplace"))


def _write_stderr(data: bytes) -> None:
    """Straight to the file descriptor, as rank 0 itself would; a reader that went away is not our error."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
