"""Frames: whole however the bytes arrive, bounded, and received where the receiver says."""

import contextlib
import random
import socket
import struct
import time
from typing import Any

import pytest

from farspan.control.hub.connection import Connection
from farspan.control.wire import (
    MAX_HEADER_BYTES,
    Buffer,
    FrameReader,
    ProtocolError,
    advance,
    encode,
    is_resending,
    send_all,
    silence_s,
)


class Trickle:
    """A socket that gives its bytes in pieces of random sizes."""

    def __init__(self, data, seed):
        self.data, self.random = memoryview(data), random.Random(seed)

    def recv_into(self, buffer):
        count = min(len(buffer), len(self.data), self.random.choice([1, 3, 17, 1000, 100_000]))
        buffer[:count], self.data = self.data[:count], self.data[count:]
        return count


def read_all(sock, reader):
    frames = []
    try:
        while True:
            frames += reader.read(sock)
    except EOFError:
        return [(frame.header, bytes(frame.payload)) for frame in frames]


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_whole_however_the_bytes_arrive(seed):
    rng = random.Random(seed)
    sizes = [0, 1, 20, 70_000, 300_000]
    sent = [
        ({"n": n, "text": "x" * rng.choice(sizes)}, rng.randbytes(rng.choice(sizes)))
        for n in range(rng.randrange(1, 12))
    ]
    data = b"".join(bytes(buffer) for frame in sent for buffer in encode(*frame))
    assert read_all(Trickle(data, seed), FrameReader()) == sent


def test_payload_lands_where_it_is_placed():
    buffer = bytearray(10)
    reader = FrameReader(place=lambda header, size: memoryview(buffer)[header["at"] : header["at"] + size])
    data = b"".join(map(bytes, [*encode({"at": 6}, b"5678"), *encode({"at": 0}, b"012345")]))
    read_all(Trickle(data, 0), reader)
    assert buffer == b"0123455678"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"FSC1\xff\xff\xff\xff" + bytes(8),
        bytes(encode({})[0])[:-2] + b"[]",
        bytes(encode({})[0])[:-2] + b"{]",
        bytes(encode({"a": 1})[0])[:-7] + b'{"a":1{',
        bytes(encode({"a": 1})[0])[:-7] + b"{}{a:1}",
    ],
    ids=["http", "huge", "no object", "no json", "unfinished", "more than an object"],
)
def test_nonsense_is_refused(data):
    with pytest.raises(ProtocolError):
        read_all(Trickle(data, 0), FrameReader())


def test_too_large_a_header_is_not_sent():
    with pytest.raises(ValueError, match="header"):
        encode({"x": "a" * MAX_HEADER_BYTES})


def test_partial_sends_lose_nothing():
    buffers: list[Buffer] = [b"abc", b"", b"defg"]
    for sent in range(8):
        assert b"".join(map(bytes, advance(buffers, sent))) == b"abcdefg"[sent:]


def test_send_all_over_a_real_socket():
    left, right = socket.socketpair()
    with left, right:
        send_all(left, encode({"a": 1}, b"xyz"))
        left.shutdown(socket.SHUT_WR)
        assert read_all(right, FrameReader()) == [({"a": 1}, b"xyz")]


def test_a_connection_keeps_what_its_socket_has_no_room_for():
    """All frames come, whole and in order, though each is larger than what the system takes at once."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        conn, reader, found = Connection(left, FrameReader()), FrameReader(), []
        sent = [({"number": number}, bytes([number]) * 300_000) for number in range(20)]
        for header, payload in sent:
            conn.send(encode(header, payload))
        assert conn.queue, "the first one was too large"
        for _ in range(10_000):
            conn.flush()
            with contextlib.suppress(BlockingIOError):
                found += [(frame.header, bytes(frame.payload)) for frame in reader.read(right)]
            if len(found) == len(sent):
                break
        assert found == sent
        assert not conn.queue


def test_who_has_not_read_yet_does_not_take_that_for_silence(monkeypatch):
    monkeypatch.setattr("farspan.control.hub.connection.silence_s", lambda sock: 60.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        connection = Connection(ours, FrameReader())
        assert connection.is_silent()
        theirs.sendall(b"!")
        assert not connection.is_silent()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not say what it knows of a connection")
def test_an_end_that_does_not_read_is_not_silent():
    """Its system is asked at ever longer intervals whether there is room: after 20 s a busy rank was taken for lost."""

    def send_all_there_is_room_for() -> None:
        while True:
            ours.send(bytes(1 << 20))

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        ours.settimeout(0.5)
        end, last_ack_s = time.monotonic() + 30.0, 0.0
        while last_ack_s < 0.9 and time.monotonic() < end:
            with pytest.raises(TimeoutError):
                send_all_there_is_room_for()
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
            last_ack_s = struct.unpack_from("=I", info, 56)[0] / 1e3
        assert last_ack_s >= 0.9
        assert silence_s(ours) == 0.0
        assert not is_resending(ours)


class SocketWithInfo:
    """What the system knows of its connection is given."""

    def __init__(self, info):
        self.info = info

    def getsockopt(self, level, option, size):
        return bytes(self.info[:size])


def socket_with(*, data_ms: int, ack_ms: int, window: int, num_probes: int = 0) -> Any:
    """Returns a socket with Linux' `struct tcp_info` of a connection."""
    info = bytearray(232)
    info[3] = num_probes
    struct.pack_into("=2I", info, 52, data_ms, ack_ms)
    struct.pack_into("=I", info, 228, window)
    return SocketWithInfo(info)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not say what it knows of a connection")
def test_what_is_a_sign_of_life():
    """Data that acknowledge nothing new are one: who only received for long was taken for one behind a cut link."""
    assert silence_s(socket_with(data_ms=100, ack_ms=60_000, window=65_536)) == 0.1
    assert silence_s(socket_with(data_ms=60_000, ack_ms=100, window=65_536)) == 0.1
    assert silence_s(socket_with(data_ms=60_000, ack_ms=50_000, window=65_536)) == 50.0
    assert silence_s(socket_with(data_ms=60_000, ack_ms=50_000, window=0, num_probes=1)) == 0.0
    assert silence_s(socket_with(data_ms=60_000, ack_ms=50_000, window=0, num_probes=3)) == 50.0  # gone since
