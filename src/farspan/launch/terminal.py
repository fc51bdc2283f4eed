"""The one console of a job: our stderr, which takes what rank 0 writes to its own.

    rank 0's stderr --a pipe, or a terminal if ours is one--> a thread --> our stderr, and its end is kept

Everything goes straight to the file descriptor, as rank 0 itself would write it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading

from farspan.errors import printable
from farspan.launch.logs import TAIL_BYTES

__all__ = ["Tee", "say", "write_stderr"]


class Tee:
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
                del self.tail[:-TAIL_BYTES]
                write_stderr(data)
        os.close(self._read_fd)
        os.close(self._stop_read)


def _open_terminal() -> tuple[int, int]:
    """Returns a pseudo-terminal of the size of ours that passes bytes on as they are."""
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
        while data:
            data = data[os.write(2, data) :]
