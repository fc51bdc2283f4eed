"""The connection of the launcher with an agent: lines of JSON, one for each message, over two file descriptors.

Both ends send a sign of life every 2 seconds; who hears nothing for long gives the other one up.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable
from typing import Any, cast

__all__ = ["Connection", "LostError", "Message"]

Message = dict[str, Any]
_LONGEST_LINE = 8 << 20
_ALIVE_S = 2.0


class LostError(Exception):
    """The other end is gone; says why."""


class Connection:
    """One end.

    Args:
        read_fd: Where messages come from.
        write_fd: Where they go.
        silence_s: After which time without any message the other end is given up.
        hang_up: Lets the other end, and who reads here, know that it is over. It closes no file descriptor that is
            read from: its number could be another file's by then.
        owner: Of the file descriptors; it lives as long as the connection.
    """

    def __init__(
        self, read_fd: int, write_fd: int, *, silence_s: float, hang_up: Callable[[], None], owner: object = None
    ) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._silence_s = silence_s
        self._hang_up = hang_up
        self._owner = owner
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._is_over = threading.Event()
        threading.Thread(target=self._show_life, daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            LostError: Nobody is there to hear it.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._write_fd, data) :]
            except OSError as error:
                raise LostError(f"the connection is closed ({error.strerror})") from None

    def receive(self) -> Message:
        """Returns the next message, however long it takes, as long as there are signs of life.

        Raises:
            LostError: The other end has closed, is silent, or says what is no message.
        """
        while True:
            line = self._line()
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                raise LostError(f"it said {bytes(line[:100])!r}, which is no message") from None
            if not isinstance(message, dict):
                raise LostError("it said what is no message")
            if message:  # an empty one is a sign of life
                return cast("Message", message)

    def close(self) -> None:
        """Ends the connection; the other end hears of it."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._hang_up()

    def _line(self) -> bytearray:
        while (end := self._buffer.find(b"\n")) < 0:
            try:
                if not select.select([self._read_fd], [], [], self._silence_s)[0]:
                    raise LostError(f"nothing has come from it for {self._silence_s:.0f} s")
                data = os.read(self._read_fd, 1 << 16)
            except (OSError, ValueError) as error:
                raise LostError(f"the connection is closed ({error})") from None
            if not data:
                raise LostError("the connection is closed")
            self._buffer += data
            if len(self._buffer) > _LONGEST_LINE:
                raise LostError("it sent a line without end")
        line = self._buffer[:end]
        del self._buffer[: end + 1]
        return line

    def _show_life(self) -> None:
        while not self._is_over.wait(_ALIVE_S):
            try:
                self.send({})
            except LostError:
                return
