"""Frames on a TCP connection: never pickle, bounded before anything is allocated, the payload never copied.

+------+------------+-------------+----------------------+------------------+
| FSC1 | header u32 | payload u64 | header: a JSON object | payload: raw bytes |
+------+------------+-------------+----------------------+------------------+
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LINK_DEAD_S",
    "LINK_SILENT_S",
    "LOOK_S",
    "MAX_BUFFERS",
    "MAX_HEADER_BYTES",
    "MAX_HELLO_BYTES",
    "MAX_PAYLOAD_BYTES",
    "PROTOCOL",
    "Buffer",
    "Frame",
    "FrameReader",
    "Header",
    "ProtocolError",
    "adopt",
    "advance",
    "close_in_children",
    "decode",
    "encode",
    "is_of_link",
    "is_proof",
    "is_resending",
    "nonce",
    "proof",
    "send_all",
    "silence_s",
]

Header = dict[str, Any]
Buffer = bytes | bytearray | memoryview

PROTOCOL = 3
MAX_HEADER_BYTES = 1 << 20
MAX_HELLO_BYTES = 4096
"""Limit on a header, as long as the other end has not proven who it is."""
MAX_PAYLOAD_BYTES = 64 << 20
"""Limit on one frame of the side channel."""

_to_text = json.JSONEncoder(separators=(",", ":")).encode
_from_text = json.JSONDecoder().raw_decode
_PREFIX = struct.Struct("!4sIQ")
_MAGIC = b"FSC1"
_SCRATCH_BYTES = 64 << 10
_NOTHING = memoryview(b"")
MAX_BUFFERS = 16
"""Limit on the buffers of one system call; systems limit their number."""

LINK_DEAD_S = 6.0
"""How long a link may let nothing through before the hub gives it up."""
LINK_SILENT_S = 8.5
"""The same for a rank. It is the hub's turn first: what a rank closes looks like its death to who can still hear."""
LOOK_S = 1.0
"""The interval at which links are checked; as often the hub sends a frame over each that has nothing else to do."""
_LINK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_RESENT_AT, _PROBES_AT, _LAST_SIGNS_AT, _WINDOW_AT = 2, 3, 52, 228
"""Offsets in Linux' `struct tcp_info` of tcpi_retransmits, of tcpi_probes, of tcpi_last_data_recv and, next to it,
tcpi_last_ack_recv in milliseconds, and (since Linux 5.4) of tcpi_snd_wnd."""
_MOST_PROBES = 2
"""Probes of a full window that may be without answer."""


class ProtocolError(Exception):
    """The connection has brought something that is not one of our frames."""


class Frame(NamedTuple):
    header: Header
    payload: Buffer


def encode(
    header: Header, payload: Buffer = b"", *, spare_bytes: int = 0, max_payload: int = MAX_PAYLOAD_BYTES
) -> list[Buffer]:
    """Returns the buffers of one frame, in order; `payload` itself is the last one, not a copy.

    Args:
        header: Any JSON object.
        payload: Any bytes.
        spare_bytes: What the header must leave free, for whoever passes the frame on and adds to it.
        max_payload: What the other end takes.

    Raises:
        TypeError, ValueError: The header is no JSON, or a part is too large for one frame.
    """
    text = _to_text(header).encode("ascii")
    if len(text) > MAX_HEADER_BYTES - spare_bytes:
        raise ValueError(f"a message header of {len(text)} bytes; at most {MAX_HEADER_BYTES - spare_bytes} fit")
    if len(payload) > max_payload:
        raise ValueError(f"a message payload of {len(payload)} bytes; at most {max_payload} fit")
    head = _PREFIX.pack(_MAGIC, len(text), len(payload)) + text
    return [head, payload] if len(payload) else [head]


def decode(message: bytes | bytearray) -> Frame:
    """Returns the frame whose buffers, one after the other, are a message.

    Raises:
        ProtocolError: It is none.
    """
    view = memoryview(message)
    if len(view) < _PREFIX.size:
        raise ProtocolError(f"{len(view)} bytes that are no frame")
    magic, header_bytes, payload_bytes = _PREFIX.unpack_from(view)
    end = _PREFIX.size + header_bytes
    if magic != _MAGIC or header_bytes > MAX_HEADER_BYTES or len(view) != end + payload_bytes:
        raise ProtocolError(f"{len(view)} bytes that are no frame: {magic!r}, {header_bytes}, {payload_bytes}")
    return Frame(_header_of(bytes(view[_PREFIX.size : end])), view[end:])


def advance(buffers: list[Buffer], sent: int) -> list[Buffer]:
    """Returns what is left of `buffers` after `sent` bytes of them went out."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:] if sent else buffer, *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


def send_all(sock: socket.socket, buffers: list[Buffer]) -> None:
    """Sends on a blocking socket; several buffers in one system call, so that a small frame is one packet."""
    while buffers:
        buffers = advance(buffers, sock.sendmsg(buffers[:MAX_BUFFERS]))


class FrameReader:
    """Turns the bytes of one socket, blocking or not, into frames.

    Args:
        max_header: Larger headers are refused before they are read (a stranger must not make us allocate).
        max_payload: Likewise for payloads.
        place: Says where the payload of this header shall be received; must be exactly `size` bytes long.
        scratch_bytes: For what is read at once, until a frame needs more.
    """

    def __init__(
        self,
        *,
        max_header: int = MAX_HEADER_BYTES,
        max_payload: int = MAX_PAYLOAD_BYTES,
        place: Callable[[Header, int], bytearray | memoryview] | None = None,
        scratch_bytes: int = _SCRATCH_BYTES,
    ) -> None:
        self.max_header = max_header
        self.max_payload = max_payload
        self.max_frames: int | None = None
        """The most frames that one `read` gives: what lies behind them stays for the next one."""
        self.place = place
        self._scratch = bytearray(scratch_bytes)
        self._begin = 0
        self._end = 0
        self._header: Header | None = None
        self._target: bytearray | memoryview = _NOTHING
        self._rest = _NOTHING

    def read(self, sock: socket.socket) -> list[Frame]:
        """Makes one `recv_into`, and returns the frames that it completed.

        Raises:
            EOFError: The connection has ended.
            ProtocolError: Not our frames, or too large.
            BlockingIOError: A non-blocking socket had nothing.
        """
        if self._header is not None:
            count = sock.recv_into(self._rest)
            if not count:
                raise EOFError
            self._rest = self._rest[count:]
            return [] if self._rest else [self._finish()]
        count = sock.recv_into(memoryview(self._scratch)[self._end :])
        if not count:
            raise EOFError
        self._end += count
        return self.take()

    def take(self) -> list[Frame]:
        """Returns the frames that are whole, of what has been read."""
        frames: list[Frame] = []
        while (self.max_frames is None or len(frames) < self.max_frames) and self._parse():
            frames.append(self._finish())
        return frames

    def _parse(self) -> bool:
        """Returns whether a whole frame lies in the scratch buffer; else makes room for the rest of it."""
        available = self._end - self._begin
        if available < _PREFIX.size:
            self._make_room(_PREFIX.size)
            return False
        magic, header_bytes, payload_bytes = _PREFIX.unpack_from(self._scratch, self._begin)
        if magic != _MAGIC or header_bytes > self.max_header or payload_bytes > self.max_payload:
            raise ProtocolError(f"not a frame: {magic!r}, {header_bytes}, {payload_bytes}")
        if available < _PREFIX.size + header_bytes:
            self._make_room(_PREFIX.size + header_bytes)
            return False
        begin = self._begin + _PREFIX.size
        header = _header_of(self._scratch[begin : begin + header_bytes])
        self._begin = begin + header_bytes
        self._start_payload(header, payload_bytes)
        return not self._rest

    def _start_payload(self, header: Header, size: int) -> None:
        self._header = header
        here = min(size, self._end - self._begin)
        if here == size and self.place is None:
            self._target = self._scratch[self._begin : self._begin + size]
        else:
            self._target = self.place(header, size) if self.place and size else bytearray(size)
            view = memoryview(self._target)
            view[:here] = memoryview(self._scratch)[self._begin : self._begin + here]
            self._rest = view[here:]
        self._begin += here
        if self._begin == self._end:
            self._begin = self._end = 0

    def _finish(self) -> Frame:
        assert self._header is not None
        frame = Frame(self._header, self._target)
        # No view may stay behind: the receiver may want to resize or hand on its buffer.
        self._header, self._target, self._rest = None, _NOTHING, _NOTHING
        return frame

    def _make_room(self, needed: int) -> None:
        if self._begin + needed <= len(self._scratch):
            return
        kept = self._scratch[self._begin : self._end]
        if needed > len(self._scratch):
            self._scratch = bytearray(needed + _SCRATCH_BYTES)
        self._scratch[: len(kept)] = kept
        self._begin, self._end = 0, len(kept)


def _header_of(text: bytes | bytearray) -> Header:
    try:
        words = text.decode("ascii")
        header, end = _from_text(words)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a header that is no JSON: {error}") from None
    if end != len(words):
        raise ProtocolError(f"a header of {len(words)} characters, of which {len(words) - end} are left over")
    if not isinstance(header, dict):
        raise ProtocolError("a header that is no object")
    return cast("Header", header)


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def adopt(sock: socket.socket) -> socket.socket:
    """Sets what all our sockets need: no Nagle delay, notice a vanished machine, do not live on in a forked child."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A machine that lost its power says nothing: after 2 s of silence probe every second; see `silence_s`.
    for name, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 15)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return close_in_children(sock)


def close_in_children(sock: socket.socket) -> socket.socket:
    """Lets forked children close a socket: their copy would hide the end of this process from the other end."""
    _open_sockets.add(sock)
    return sock


def silence_s(sock: socket.socket) -> float:
    """Returns how many seconds the other end's system has given no sign of life; 0 where this system does not know.

    Systems answer probes and acknowledge data by themselves: a process that is stopped, or too busy to read, is not
    silent; a link that is cut is. (TCP_USER_TIMEOUT would take the former for the latter once its buffer is full.)
    """
    info = _info(sock)
    if len(info) < _LAST_SIGNS_AT + 8 or _has_no_room(info):
        return 0.0
    return min(struct.unpack_from("=2I", info, _LAST_SIGNS_AT)) / 1e3  # data with no new ack leave that one as it was


def is_resending(sock: socket.socket) -> bool:
    """Returns whether what was sent last has not been acknowledged in time and goes out again and again; False where
    this system does not know. A process that does not read has its data acknowledged by its system, or nothing is sent
    to it.
    """
    info = _info(sock)
    return len(info) > _RESENT_AT and info[_RESENT_AT] > 0 and not _has_no_room(info)


def _info(sock: socket.socket) -> bytes:
    """Returns what the system knows of a TCP connection; nothing where it does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return b""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW_AT + 4)


def _has_no_room(info: bytes) -> bool:
    """Returns whether the other end's system has said that its process does not read what has come, and has not ceased
    to answer since: it is asked at ever longer intervals, up to two minutes, in which nothing comes from it.
    """
    is_known = len(info) >= _WINDOW_AT + 4
    return is_known and struct.unpack_from("=I", info, _WINDOW_AT)[0] == 0 and info[_PROBES_AT] <= _MOST_PROBES


def is_of_link(error: BaseException) -> bool:
    """Returns whether the system's error means that the other end cannot be reached, rather than that it has closed."""
    return isinstance(error, OSError) and error.errno in _LINK_ERRORS


def _close_in_child() -> None:
    # A data loader's forked worker would hold the connection open, and hide its parent's death.
    for sock in list(_open_sockets):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# -- who belongs to a run ---------------------------------------------------------------------------------------------
#
#   hub   challenge: a random number of the hub's            --> rank
#   rank  hello: who it is, a random number of its own,
#         proof = HMAC(secret, "rank", both, who)            --> hub
#   hub   welcome: proof = HMAC(secret, "hub", both, who)    --> rank


def nonce() -> str:
    """Returns a random number that is sent once."""
    return secrets.token_hex(16)


def proof(secret: str, *said: str | int) -> str:
    """Returns the HMAC of `said`, which only who knows `secret` can compute."""
    return hmac.new(os.fsencode(secret), json.dumps(said).encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, secret: str, *said: Any) -> bool:
    """Returns whether `given`, which may be anything, is the proof; what is no plain text or number cannot be."""
    if not isinstance(given, str) or not all(type(item) in (str, int) for item in said):
        return False
    return hmac.compare_digest(given.encode(errors="replace"), proof(secret, *said).encode())
