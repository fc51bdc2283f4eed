"""The one console of a job: our stdout and stderr, which take what rank 0 writes to its own; so does its log.

    stdout  a terminal     ours itself, and not in the log: a program may set up the keyboard by it
            anything else  a pipe     --a thread--> the log, our stdout
    stderr  a terminal     another    --a thread--> the log, our stderr
            anything else  a pipe     --a thread--> the log, our stderr
    both    one file       one pipe   --a thread--> the log, that file: in the order in which they were written

Everything goes straight to the file descriptor, as rank 0 itself would write it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import threading

from farspan.errors import printable

__all__ = ["Console", "LogCopy", "say", "write_all", "write_stderr"]

_HURRIED_S = 2.0
_LONGEST_LINE = 1 << 16
_MOST_LEFT = 1 << 20
"""Bytes that a pipe may still hold when a rank has ended; what a helper of it writes after them is not shown."""


class Console:
    """What one rank writes to, and what becomes of that.

    Args:
        log: File descriptor of its log, which stays the caller's.
    """

    def __init__(self, log: int) -> None:
        self._copies = [_Copy(target, log) for target in _copied()]
        entrances = {copy.target: copy.entrance for copy in self._copies}
        self.stdout = entrances.get(1, 1)
        """The file that the rank is to have as its stdout; 1 where that is ours itself."""
        self.stderr = entrances.get(2, self.stdout)
        """The file that the rank is to have as its stderr."""
        self._is_hurried = self._is_finishing = False

    def start(self) -> None:
        """Begins to copy, once the rank has the files."""
        for copy in self._copies:
            copy.start()

    def finish(self) -> None:
        """Returns when all that the rank has written is shown. It has ended.

        That takes as long as the reader of our stdout does, for which the rank itself would wait; after `hurry` 2 s.
        """
        self._is_finishing = True
        for copy in self._copies:
            copy.stop()
        for copy in self._copies:
            copy.is_over.wait(_HURRIED_S if self._is_hurried else None)

    def hurry(self) -> None:
        """Lets nobody wait for a reader that does not read: the rank is to end, and the log has it all."""
        self._is_hurried = True
        if self._is_finishing:
            for copy in self._copies:
                copy.is_over.set()


class _Copy:
    """Passes on what is written to `entrance`, to a log and `target`, until nobody can write to it or it is stopped.

    Where `target` is a terminal, so is `entrance`: progress bars go on looking as they should.
    """

    def __init__(self, target: int, log: int) -> None:
        self.target = target
        self.is_over = threading.Event()
        self._log = LogCopy(log)
        self._exit, self.entrance = _open_terminal() if os.isatty(target) else os.pipe()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        os.close(self.entrance)
        self._thread.start()

    def stop(self) -> None:
        """Lets it end with what is there: a helper may still hold the entrance."""
        os.close(self._stop_write)

    def _run(self) -> None:
        left = _MOST_LEFT
        with contextlib.closing(self._log), selectors.DefaultSelector() as selector:
            selector.register(self._exit, selectors.EVENT_READ)
            selector.register(self._stop_read, selectors.EVENT_READ)
            while left > 0:
                ready = [key.fd for key, _ in selector.select()]
                data = _read(self._exit) if self._exit in ready else b""
                if not data:
                    break
                if self._stop_read in ready:
                    left -= len(data)
                self._log.write(data)
                if not self._show(data):
                    break
        os.close(self._exit)  # from now on whoever writes learns that nobody reads
        os.close(self._stop_read)
        self.is_over.set()

    def _show(self, data: bytes) -> bool:
        """Writes to the target; returns False where the rank is to learn that it cannot be written any more."""
        if self.target == 2:
            write_stderr(data)
            return True
        try:
            write_all(self.target, data)
        except OSError as error:
            if error.errno != errno.EPIPE:  # which it learns by itself
                say(f"farspan run: standard output cannot be written any more ({error.strerror})")
            return False
        return True


class LogCopy:
    """Writes to a log what is shown elsewhere too, so that a log that cannot be written ends nothing.

    In whole lines, as stdout and stderr come by ways of their own: an unbuffered `print` writes a line in pieces.

    Args:
        file: File descriptor of the log, which stays the caller's.
    """

    def __init__(self, file: int) -> None:
        self._file = os.dup(file)
        self._line = b""

    def write(self, data: bytes) -> None:
        """Writes the lines that are whole; a progress bar ends them by a carriage return."""
        data = self._line + data
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 if len(data) < _LONGEST_LINE else len(data)
        self._line = data[whole:]
        self._put(data[:whole])

    def close(self) -> None:
        """Writes the last line, which nothing has ended."""
        self._put(self._line)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put(self, data: bytes) -> None:
        if self._file < 0:
            return
        try:
            write_all(self._file, data)
        except OSError as error:
            os.close(self._file)
            self._file = -1
            say(f"farspan run: a log cannot be written any more ({error.strerror}); the console goes on")


def _copied() -> list[int]:
    """Returns which of our files a rank does not have itself: 1 alone where 2 is the same file."""
    if os.isatty(1) or not _is_open(1):
        return [2]
    return [1] if _is_open(2) and os.path.sameopenfile(1, 2) else [1, 2]


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # a terminal's way to say that nobody holds the other end
        return b""


def _open_terminal() -> tuple[int, int]:
    """Returns a pseudo-terminal of the size of our stderr that passes bytes on as they are."""
    import termios

    read_fd, write_fd = os.openpty()
    modes = termios.tcgetattr(write_fd)
    modes[1] &= ~termios.OPOST  # the real terminal will do it
    termios.tcsetattr(write_fd, termios.TCSANOW, modes)
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(write_fd, termios.tcgetwinsize(2))
    return read_fd, write_fd


def say(text: str) -> None:
    """Writes a line to stderr."""
    write_stderr(f"{printable(text)}\n".encode(errors="backslashreplace"))


def write_stderr(data: bytes) -> None:
    """Straight to the file descriptor, as rank 0 itself would; a reader that went away is not our error."""
    with contextlib.suppress(OSError):
        write_all(2, data)


def write_all(file: int, data: bytes) -> None:
    """Writes all of it, also where another process has made the file one that does not wait."""
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            select.select([], [file], [])
