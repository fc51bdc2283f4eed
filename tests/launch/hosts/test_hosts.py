"""What a user says about hosts, and the lines between a launcher and an agent."""

from __future__ import annotations

import os
import socket

import pytest

from farspan.errors import LaunchError
from farspan.launch.environment import read_environment
from farspan.launch.hosts.connection import Connection, LostError
from farspan.launch.hosts.host import Host, is_this_machine, read_hosts
from farspan.launch.hosts.joining import read_address


def test_a_list_of_hosts() -> None:
    names = [(host.name, host.num_processes) for host in read_hosts("a:2,me@b.example,[fd00::1]:3,10.0.0.1:4")]
    assert names == [("a", 2), ("me@b.example", 1), ("[fd00::1]", 3), ("10.0.0.1", 4)]


def test_a_file_of_hosts(tmp_path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\na slots=2 devices=0,1  # old\n\nb python=/py folder=/home\n")
    assert read_hosts(str(file)) == [
        Host(name="a", num_processes=2, devices="0,1"),
        Host(name="b", python="/py", folder="/home"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no hosts"),
        ("a:0", "'0' is no number of processes"),
        ("a:x", "'x' is no number of processes"),
        ("a,b,a:2", "names a twice"),
        ("-oProxyCommand=x:1", "is no host"),
        ("a;rm", "is no host"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        read_hosts(text)


def test_this_machine_is_known_by_its_names() -> None:
    assert all(map(is_this_machine, ["localhost", "127.0.0.1", "[::1]", socket.gethostname()]))
    assert not any(map(is_this_machine, ["10.0.0.1", "elsewhere"]))


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:70000", "a:\u0661"])
def test_an_address_has_a_host_and_a_port(text: str) -> None:
    with pytest.raises(LaunchError, match="is no address"):
        read_address(text)


@pytest.mark.parametrize(
    ("store", "found"),
    [
        ("tcp://10.0.0.1:29500", ("hosts", "10.0.0.1", 29500, None)),
        ("tcp://fd00::1:29500", ("hosts", "fd00::1", 29500, None)),
        ("/tmp/run/store", ("run", None, None, "/tmp/run/store")),
    ],
)
def test_the_store_of_a_run_is_a_file_or_an_address(store: str, found: tuple[object, ...]) -> None:
    names = {"FARSPAN_RANK": "1", "FARSPAN_WORLD_SIZE": "2", "FARSPAN_STORE": store}
    read = read_environment(names)
    assert (read.launcher, read.master_addr, read.master_port, read.store) == found


def test_who_says_what_is_no_message_or_nothing_is_given_up() -> None:
    for said, why in [(b"[1]\n", "no message"), (b"what\n", "no message"), (b"", "is closed"), (None, "nothing has")]:
        reading, writing = os.pipe()
        connection = Connection(reading, writing, silence_s=0.1, hang_up=lambda: None)
        if said is not None:
            os.write(writing, b"{}\n" + said)  # after a sign of life
        if said == b"":
            os.close(writing)
        with pytest.raises(LostError, match=why):
            connection.receive()
        connection.close()
