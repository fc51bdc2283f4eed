"""One rank that is a fork of this process."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from farspan.launch.attempts.here import inherited_variables
from farspan.launch.job import Crew
from farspan.launch.rank.process_end import end_process
from farspan.launch.rank_process import Started, handles_signal, open_log, send_signal, wait_unreaped
from farspan.launch.terminal import LogCopy
from farspan.settings import PREFIX

__all__ = ["ForkedCrew"]

_CODE_OF_EXCEPTION = 1


class ForkedCrew(Crew):
    """All ranks, as forks of this process.

    Args:
        function: What each runs.
        num_processes: How many.
        shared: The variables that all of them get.
    """

    def __init__(self, function: Callable[[], Any], num_processes: int, shared: Mapping[str, str]) -> None:
        self.num_processes = num_processes
        self._function = function
        self._variables = inherited_variables() | dict(shared)

    def start(self, number: int, log_dir: Path, more: Mapping[str, str] | None = None) -> ForkedRank:
        """Forks one, with more variables of its own."""
        own = {f"{PREFIX}RANK": str(number), f"{PREFIX}LOCAL_RANK": str(number)}
        return ForkedRank(number, self._function, self._variables | own | dict(more or {}), log_dir)


class ForkedRank(Started):
    """A fork that runs a function; what rank 0 writes goes to `sys.stdout` and `sys.stderr`, which a notebook shows."""

    def __init__(self, number: int, function: Callable[[], Any], variables: Mapping[str, str], log_dir: Path) -> None:
        self.number = number
        self.has_console = number == 0
        self.log = log_dir / f"rank{number}.log"
        self._readers: list[threading.Thread] = []
        self._is_reaped = False
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        log = open_log(self.log)
        pipes = [os.pipe(), os.pipe()] if self.has_console else []
        outputs = [entrance for _, entrance in pipes] or [log] * 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads: see _run
            self.pid = os.fork()
        if self.pid == 0:
            _run(function, variables, outputs)
        for (exit_fd, _), stream in zip(pipes, (sys.stdout, sys.stderr), strict=False):
            reader = threading.Thread(target=_copy, args=(exit_fd, stream, LogCopy(log)), daemon=True)
            self._readers.append(reader)
            reader.start()
        for file in {log, *outputs}:
            os.close(file)

    def wait(self) -> int:
        """Blocks until the process ends, and leaves it unreaped, so that its number stays its own."""
        return wait_unreaped(self.pid)

    def handles(self, number: signal.Signals) -> bool:
        """Returns whether the process handles a signal instead of being ended by it."""
        return handles_signal(self.pid, number)

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signals the process, or it and all that it started."""
        if not self._is_reaped:
            send_signal(self.pid, number, group=group)

    @contextlib.contextmanager
    def give_console(self) -> Generator[Sequence[int]]:
        """Nothing: what it writes is in the cell already."""
        yield ()

    def close(self) -> None:
        """Reaps it, and waits until all that it has written is shown."""
        if not self._is_reaped:
            os.waitpid(self.pid, 0)
            self._is_reaped = True
        for reader in self._readers:
            reader.join(2.0)


def _copy(exit_fd: int, stream: TextIO, log: LogCopy) -> None:
    """Shows what is written to a pipe, and writes it to a log."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with open(exit_fd, "rb", buffering=0) as pipe, contextlib.closing(log):
        while data := pipe.read(1 << 16):  # what is there, be it half a line: a bar, or dots
            log.write(data)
            text = decoder.decode(data)
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()


def _run(function: Callable[[], Any], variables: Mapping[str, str], outputs: list[int]) -> NoReturn:
    """The life of the fork: it never returns to what this process was about, whatever is raised."""
    code = _CODE_OF_EXCEPTION
    try:
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, file in enumerate([nothing, *outputs]):
                os.dup2(file, target)
            os.environ.clear()
            os.environ.update(variables)
            _be_rank()
            code = _call(function)
            # As a program's end waits for its threads, which no public name does.
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            end_process()
            for stream in (sys.stdout, sys.stderr):
                if not stream.closed:
                    stream.flush()
        except BaseException:
            code = code or _CODE_OF_EXCEPTION
            traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _call(function: Callable[[], Any]) -> int:
    """Returns the exit code of a program that is this function."""
    try:
        function()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # as Python does
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error  # what ends an ordinary program is found there, too
        sys.excepthook(type(error), error, error.__traceback__)  # by which the other ranks hear of it, too
        return _CODE_OF_EXCEPTION
    return 0


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an exception as Python does, in one piece: what goes to standard output comes by a pipe of its own."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))


def _be_rank() -> None:
    """Makes this fork what a process of `farspan run` is when it starts."""
    import ctypes

    from farspan.launch.files import install, keeps_apart
    from farspan.launch.rank.notes import note_training

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # as in child.py
    sys.excepthook = _show  # and not a notebook's
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.FileIO(each, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
        )
        for each in (1, 2)
    )
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # OpenMP's threads are not in a fork, and it would wait for them
    folder = os.environ.get("FARSPAN_RUN_FOLDER", "")
    if folder:
        if keeps_apart():
            install(folder, int(os.environ[f"{PREFIX}RANK"]))
        note_training(folder)
