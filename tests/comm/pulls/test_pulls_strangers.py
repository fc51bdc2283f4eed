"""Who does not belong to a run gets no tensors and does no harm; what a rank says is checked before it is believed."""

from __future__ import annotations

import contextlib
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.comm.pulls.answering import of_rank, wait_until
from tests.support.side import LONG_S

from farspan.comm.pulls.answers import read_answer
from farspan.comm.pulls.listener import service_of
from farspan.control.hub.joining import Client, join
from farspan.control.wire import FrameReader, encode, send_all
from farspan.errors import LaunchError, RecordError


def test_a_stranger_is_not_let_in(ranks, caplog):
    _, pulls = ranks(2, of_rank)
    address = tuple(pulls[1].listen()["address"])
    for client in (
        Client(0, 2, "guess", 1, service_of(1)),
        Client(0, 2, "secret", 1, service_of(0)),
        Client(0, 2, "secret", 1),
    ):
        with pytest.raises(LaunchError, match="does not know its secret"):
            join(client, address, LONG_S)
    with pytest.raises(LaunchError, match="no rank 7"):
        join(Client(7, 2, "secret", 1, service_of(1)), address, LONG_S)
    assert pulls[0].pull(1, {})[0] == {"from": 1}
    assert len(caplog.records) == 4


def test_strangers_do_no_harm(ranks, caplog):
    _, pulls = ranks(2, of_rank)
    address = tuple(pulls[1].listen()["address"])
    strangers = [socket.create_connection(address) for _ in range(200)]
    for stranger in strangers[::2]:
        with contextlib.suppress(OSError):  # the oldest have been closed
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert pulls[0].pull(1, {})[0] == {"from": 1}
    for stranger in strangers:
        stranger.close()
    listener = pulls[1]._listener
    assert listener is not None
    wait_until(lambda: not listener._strangers)
    assert len([each for each in caplog.records if "stranger" in each.getMessage()]) <= 10


_HELLOS = (
    {"t": "hello", "rank": [0], "world_size": {}, "nonce": 1, "proof": 2},
    {"t": "hello", "rank": 0, "world_size": 2, "nonce": "\ud800", "proof": "\ud800"},
    {"t": "hello", "rank": True, "world_size": None, "nonce": "n", "proof": "p", "protocol": 1e300},
    {"pull": {"name": "w"}},
    {},
)


def test_no_hello_harms_a_run(ranks):
    _, pulls = ranks(2, of_rank)
    address = tuple(pulls[1].listen()["address"])
    nested = [
        b'{"t":"hello","proof":"","rank":' + b"[" * depth + b"]" * depth + b"}" for depth in range(900, 1_050, 10)
    ]
    frames = [struct.pack("!4sIQ", b"FSC1", len(text), 0) + text for text in nested]
    frames += [encode(hello)[0] for hello in _HELLOS]
    for data in [*frames, b"", b"FSC1", b"FSC1" + b"\xff" * 12, b"\0" * 100]:
        with socket.create_connection(address) as stranger:
            stranger.sendall(data)
    assert pulls[0].pull(1, {})[0] == {"from": 1}


@pytest.mark.parametrize("said", [{"pull": 1}, {"pull": None}, {}])
def test_a_rank_that_asks_nonsense_is_not_answered(ranks, said):
    _, pulls = ranks(3, of_rank)
    address = tuple(pulls[1].listen()["address"])
    sock, _ = join(Client(0, 3, "secret", 1, service_of(1)), address, LONG_S)
    with sock:
        send_all(sock, encode(said))
        assert sock.recv(1) == b""
    assert pulls[2].pull(1, {})[0] == {"from": 1}


def test_a_stranger_in_the_place_of_an_owner_is_found(ranks, monkeypatch):
    monkeypatch.setattr("farspan.comm.pulls.pulls._CAUSE_S", 0.1)
    _, pulls = ranks(2, of_rank)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pulls[0]._addresses[1] = listener.getsockname()
        asked = pool.submit(pulls[0].pull, 1, {"name": "w"})
        with listener.accept()[0] as sock:
            send_all(sock, encode({"t": "challenge", "nonce": "0"}))
            sock.recv(1000)
            send_all(sock, encode({"t": "welcome", "proof": "guess"}))
            pulls_error = asked.exception(LONG_S)
    assert isinstance(pulls_error, LaunchError) and "found a stranger" in str(pulls_error)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        ({"dtype": "float32", "shape": [2]}, 4),
        ({"dtype": "float32", "shape": [1 << 40]}, 4),
        ({"dtype": "object", "shape": [1]}, 8),
        ({"dtype": "float32", "shape": [-1]}, 4),
        ({}, 4),
    ],
)
def test_a_tensor_of_other_bytes_than_it_says_is_refused(head, size):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_all(theirs, [*encode({"body": {}, "num_tensors": 1}), *encode(head, bytes(size))])
        with pytest.raises(RecordError):
            read_answer(ours, FrameReader())


def test_no_memory_is_taken_for_more_bytes_than_a_tensor_has():
    ours, theirs = socket.socketpair()
    text = b'{"dtype":"float32","shape":[2]}'
    with ours, theirs:
        send_all(
            theirs, [*encode({"body": {}, "num_tensors": 1}), struct.pack("!4sIQ", b"FSC1", len(text), 1 << 40), text]
        )
        with pytest.raises(RecordError):  # now: the bytes have not come
            read_answer(ours, FrameReader())
