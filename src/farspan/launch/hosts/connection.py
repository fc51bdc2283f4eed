"""The connection of the launcher with an agent: lines of JSON, one for each message, over two file descriptors.

Both ends send a sign of life every 2 seconds; who hears nothing for long gives the other one up. What is about one role
of a run goes over a channel of it, `{"channel": "actor", ...}`, which is used as a connection of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

__all__ = ["Channel", "Connection", "Link", "LostError", "Message"]

Message = dict[str, Any]
_LONGEST_LINE = 8 << 20
_ALIVE_S = 2.0
_MOST_NOISE = 1000
"""Limit on the lines before the first message that are passed over."""
_MOST_WAITING = 1000
"""Limit on the messages of one channel that nobody has taken yet, before nothing more of the connection is read."""


class LostError(Exception):
    """The other end is gone; says why."""


class Link(Protocol):
    """What carries messages both ways: a connection, or a channel of one."""

    def send(self, message: Message) -> None: ...
    def receive(self) -> Message: ...
    def close(self) -> None: ...


class Channel:
    """A part of a connection, for messages that one thread of each end receives.

    Args:
        connection: Whose receiver hands on what comes.
        name: Of the channel, at both ends.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._condition = threading.Condition()
        self._come: deque[Message] = deque()
        self._lost: LostError | None = None

    def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            LostError: Nobody is there to hear it.
        """
        self._connection.send({"channel": self.name, **message})

    def receive(self) -> Message:
        """Returns the next message.

        Raises:
            LostError: An end has closed the channel, or the connection is lost.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._come or self._lost is not None)
            if not self._come:
                assert self._lost is not None
                raise self._lost
            self._condition.notify_all()
            return self._come.popleft()

    def close(self) -> None:
        """Ends the channel; the other end, and who receives here, hear of it."""
        with self._condition:
            if self._lost is not None:
                return
        self.lose(LostError("the channel is closed"))
        with contextlib.suppress(LostError):  # then the other end knows
            self.send({"closed": True})

    def put(self, message: Message) -> None:
        """Takes what has come for it; waits while too much has, which nobody has taken yet."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._come) < _MOST_WAITING or self._lost is not None)
            if self._lost is None:
                self._come.append(message)
                self._condition.notify_all()

    def lose(self, error: LostError) -> None:
        """Lets nothing come for it any more."""
        with self._condition:
            self._lost = self._lost or error
            self._condition.notify_all()


class Connection:
    """One end.

    Args:
        read_fd: Where messages come from.
        write_fd: Where they go.
        silence_s: After which time without any message the other end is given up.
        hang_up: Lets the other end, and who reads here, know that it is over. It closes no file descriptor that is
            read from: its number could be another file's by then.
        skips_noise: Whether lines before the first message are passed over: those that a shell's startup files print.
        owner: Of the file descriptors; it lives as long as the connection.

    Attributes:
        on_channel: Called, by who receives, with a channel that the other end has opened; None where it may open none.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        *,
        silence_s: float,
        hang_up: Callable[[], None],
        skips_noise: bool = False,
        owner: object = None,
    ) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._silence_s = silence_s
        self._hang_up = hang_up
        self._num_skipped_most = _MOST_NOISE if skips_noise else 0
        self._owner = owner
        self._lock = threading.Lock()
        self.on_channel: Callable[[Channel], None] | None = None
        self._channels_lock = threading.Lock()
        """Not the one under which is sent, which who receives must not wait for."""
        self._channels: dict[str, Channel] = {}
        self._lost: LostError | None = None
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
        """Returns the next message that is of no channel, however long it takes, as long as there are signs of life.

        Raises:
            LostError: The other end has closed, is silent, or says what is no message.
        """
        try:
            while True:
                message = self._message()
                if "channel" not in message:
                    return message
                self._hand_on(str(message.pop("channel")), message)
        except LostError as error:
            self._lose(error)
            raise

    def channel(self, name: str) -> Channel:
        """Returns a new channel, of a name that none has had; the other end hears of it by its first message."""
        channel = Channel(self, name)
        with self._channels_lock:
            lost = self._lost
            self._channels[name] = channel
        if lost is not None:
            channel.lose(lost)
        return channel

    def _lose(self, error: LostError) -> None:
        with self._channels_lock:
            self._lost = error
            channels = list(self._channels.values())
        for channel in channels:
            channel.lose(error)

    def _hand_on(self, name: str, message: Message) -> None:
        with self._channels_lock:
            channel = self._channels.get(name)
        if message.get("closed"):
            if channel is not None:
                channel.lose(LostError("the other end has closed the channel"))
            return
        if channel is None and self.on_channel is not None:
            channel = self.channel(name)
            self.on_channel(channel)
        if channel is not None:
            channel.put(message)

    def _message(self) -> Message:
        while True:
            line = self._line()
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                if self._num_skipped_most:
                    self._num_skipped_most -= 1
                    continue
                raise LostError(f"it said {bytes(line[:100])!r}, which is no message")
            self._num_skipped_most = 0
            if message:  # an empty one is a sign of life
                return cast("Message", message)

    def close(self) -> None:
        """Ends the connection; the other end hears of it."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._hang_up()
            self._lose(LostError("the connection is closed"))  # there may be nobody who receives any more

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
