"""Who does not belong to a run, at the hub's port or in its place, neither takes part nor does harm."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.side import LONG_S, SHORT_S, each, step

from farspan.control.channel import SideChannel
from farspan.control.wire import Frame, FrameReader, encode, is_proof, proof
from farspan.errors import DeadlineError, LaunchError


@pytest.mark.parametrize(
    ("rank", "world_size", "secret", "why"),
    [
        (1, 2, "guess", "does not know its secret"),
        (1, 3, "secret", "expects 3"),
        (0, 2, "secret", "before"),
        (7, 2, "secret", "no rank"),
    ],
)
def test_who_does_not_belong_is_refused(ranks, rank, world_size, secret, why):
    (channel,) = ranks(2, absent=[1])
    with pytest.raises(LaunchError, match=why):
        SideChannel.connect(rank, world_size, channel._server.address, secret, LONG_S)
    assert channel.failure is None


def test_strangers_do_no_harm(ranks):
    channels = ranks(2)
    strangers = [socket.create_connection(channels[0]._server.address) for _ in range(150)]
    for stranger in strangers[::2]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert each(channels, step(0)) == [None] * 2
    for stranger in strangers:
        stranger.close()


def test_little_is_said_of_many_strangers(ranks, caplog):
    channels = ranks(2)
    for number in range(60):
        with socket.create_connection(channels[0]._server.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else _framed(_NO_TEXT))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # until the hub has had enough of it
                    pass
    assert each(channels, step(0)) == [None] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 10 and lines[-1].endswith("further strangers are not reported")


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(LaunchError, match="cannot reach"):
        SideChannel.connect(1, 2, address, "secret", LONG_S)


def test_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(DeadlineError, match="answer its hello"):
        SideChannel.connect(1, 2, server.getsockname(), "secret", SHORT_S)


def test_nobody_takes_the_connection():
    """As a firewall that drops what comes: the queue of those who want to connect is full."""
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = closing.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(SideChannel.connect, 1, 2, server.getsockname(), "secret", SHORT_S)
            with pytest.raises(DeadlineError, match="answer its hello"):
                connecting.result(LONG_S / 4)


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()))
_ANYTHING = st.recursive(_PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
_HELLOS = st.fixed_dictionaries(
    {"t": st.just("hello")},
    optional=dict.fromkeys(("protocol", "rank", "world_size", "nonce", "proof", "token"), _ANYTHING),
)
_NO_TEXT = b'{"t":"hello","rank":0,"world_size":2,"nonce":"\\ud800","proof":"\\ud800"}'


def _framed(text: bytes) -> bytes:
    """A frame with any header."""
    return struct.pack("!4sIQ", b"FSC1", len(text), 0) + text


def test_no_hello_harms_a_run(ranks) -> None:
    channels = ranks(2)

    def send(data: bytes) -> None:
        with socket.create_connection(channels[0]._server.address) as stranger:
            stranger.sendall(data)

    @settings(max_examples=300, deadline=None)
    @example(_framed(_NO_TEXT))
    @given(st.binary(max_size=100) | _HELLOS.map(lambda hello: json.dumps(hello).encode()).map(_framed))
    def send_anything(data: bytes) -> None:
        send(data)

    send_anything()
    for depth in range(900, 1_050):  # some can just be read, and not be written again
        send(_framed(b'{"t":"hello","proof":"","rank":' + b"[" * depth + b"]" * depth + b"}"))
    assert each(channels, step(0)) == [None] * 2


@contextlib.contextmanager
def listening(act: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Something at an address that lets a connection come, and acts."""

    def accept() -> None:
        with listener.accept()[0] as connection:
            act(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_S)
        acting = threading.Thread(target=accept)
        acting.start()
        yield listener.getsockname()
        acting.join()


def test_a_hello_that_was_overheard_is_of_no_use(ranks) -> None:
    (channel,) = ranks(2, absent=[1])
    said: list[Frame] = []

    def overhear(rank: socket.socket) -> None:
        """Between a rank and the hub: pass on the challenge, and keep the hello."""
        with socket.create_connection(channel._server.address) as hub:
            rank.sendall(hub.recv(4096))
            said.extend(FrameReader().read(rank))

    with listening(overhear) as address, pytest.raises(LaunchError, match="closed the connection"):
        SideChannel.connect(1, 2, address, "secret", LONG_S)
    assert "secret" not in json.dumps(said[0].header)
    with socket.create_connection(channel._server.address) as again:
        again.sendall(encode(said[0].header)[0])
        reader, heard = FrameReader(), list[Frame]()
        while len(heard) < 2:
            heard += reader.read(again)
        assert "does not know its secret" in heard[1].header["why"]


@pytest.mark.parametrize("given", [None, 1, ["proof"], {}, "", "proof", "\ud800", b"proof"])
def test_what_is_no_proof_is_refused_whatever_it_is(given) -> None:
    assert not is_proof(given, "secret", "rank", "challenge", 1)
    assert is_proof(proof("secret", "rank", 1), "secret", "rank", 1)
    others: list[Any] = [None, 1.0, True, ["rank"]]
    for said in others:
        assert not is_proof(proof("secret", "rank", said), "secret", "rank", said)


def test_a_hub_that_does_not_know_the_secret_is_not_joined() -> None:
    def pretend(rank: socket.socket) -> None:
        rank.sendall(encode({"t": "challenge", "nonce": "1"})[0])
        FrameReader().read(rank)
        rank.sendall(encode({"t": "welcome", "proof": "2"})[0])
        rank.recv(1)

    with listening(pretend) as address, pytest.raises(LaunchError, match="a stranger where rank 0's side channel"):
        SideChannel.connect(1, 2, address, "secret", LONG_S)


def test_a_stranger_in_the_hubs_place_cannot_make_a_rank_take_much() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet_with_a_megabyte() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(struct.pack("!4sIQ", b"FSC1", 1 << 20, 0) + b" " * 100)
                connection.recv(1)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(greet_with_a_megabyte)
            with pytest.raises(LaunchError, match="closed the connection during the hello"):
                SideChannel.connect(1, 2, server.getsockname(), "secret", LONG_S)
