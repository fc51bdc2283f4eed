"""What a user says about hosts, and the lines between a launcher and an agent."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from farspan.errors import LaunchError
from farspan.launch.environment import read_environment
from farspan.launch.hosts import Fleet
from farspan.launch.hosts import fleet as fleet_module
from farspan.launch.hosts.agent import Agent
from farspan.launch.hosts.connection import Connection, LostError, Message
from farspan.launch.hosts.host import Host, is_this_machine, read_hosts
from farspan.launch.hosts.joining import join_run, member, read_address
from farspan.launch.hosts.joining.proof import prove
from farspan.launch.hosts.remote import RemoteHost
from farspan.launch.hosts.ssh import connect_by_ssh
from farspan.launch.run_job import run


def test_a_list_of_hosts() -> None:
    names = [(host.name, host.num_processes) for host in read_hosts("a:2,me@b.example,[fd00::1]:3,10.0.0.1:4")]
    assert names == [("a", 2), ("me@b.example", 1), ("[fd00::1]", 3), ("10.0.0.1", 4)]


def test_a_list_that_is_too_long_for_the_name_of_a_file() -> None:
    assert len(read_hosts(",".join(f"node{i}.cluster.example:8" for i in range(200)))) == 200


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


def test_what_a_shell_prints_before_the_first_message_is_passed_over_and_nothing_after_it() -> None:
    reading, writing = os.pipe()
    connection = Connection(reading, writing, silence_s=5.0, hang_up=lambda: None, skips_noise=True)
    os.write(writing, b'Welcome!\n[1]\n\n{"is": "checked"}\nwhat\n')
    assert connection.receive() == {"is": "checked"}
    with pytest.raises(LostError, match="said b'what', which is no message"):
        connection.receive()
    connection.close()


REACH = """
import sys
from farspan.launch.hosts.host import Host
from farspan.launch.hosts.reach import reach
for said in sys.argv[2:]:
    open("said", "w").write(said)
    error = reach(Host(name="far"), [""], sys.argv[1], is_shown=False)
    print(error.why, error.hint, sep="|")
"""


def test_what_ssh_says_is_why_and_the_hint_is_what_mends_it(tmp_path) -> None:
    ssh = tmp_path / "ssh.sh"
    ssh.write_text("#!/bin/sh\ncat said >&2\nexit 255\n")
    ssh.chmod(0o755)
    hints = {
        "Host key verification failed": "ssh far     once by hand",
        "me@far: Permission denied (publickey)": "ssh-copy-id far ",
        "no route to host": f"ssh far {sys.executable} -c ",
    }
    command = [sys.executable, "-c", REACH, str(ssh), *[f"{said}.\n" for said in hints]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for line, (said, hint) in zip(done.stdout.splitlines(), hints.items(), strict=True):
        assert line.startswith(f"{said}.|{hint}")
    assert not done.stderr


def test_ssh_gets_an_address_of_ipv6_without_brackets(monkeypatch) -> None:
    commands = []

    def start(command: list[str], **_: object) -> None:
        commands.append(command)
        raise OSError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(LaunchError, match="cannot be reached"):
        connect_by_ssh(Host(name="me@[fd00::1]"), "ssh")
    assert commands[0][-2] == "me@fd00::1"


class Far:
    """What the launcher says to a host, and hears from it, by pipes."""

    def __init__(self, *, knows_secret: bool = False) -> None:
        self.hears, to_host = os.pipe()
        from_host, self.says = os.pipe()
        connection = Connection(from_host, to_host, silence_s=5.0, hang_up=lambda: None)
        self.remote = RemoteHost(Host(name="far"), connection, knows_secret=knows_secret)

    def say(self, message: Message) -> None:
        os.write(self.says, json.dumps(message).encode() + b"\n")


def test_a_host_is_lost_where_its_output_cannot_be_written(tmp_path, monkeypatch) -> None:
    far = Far()
    rank = far.remote.start(1, {}, tmp_path / "rank1.log", has_console=False)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rank, "write", fail)
    far.say({"is": "output", "number": 1, "stream": 1, "data": ""})
    assert rank.wait() == 255 and "cannot be written here (No space left on device)" in rank.lost
    rank.close()


@pytest.mark.parametrize("knows", [True, False])
def test_a_secret_that_a_host_knows_is_not_sent(knows: bool) -> None:
    far = Far(knows_secret=knows)
    far.say({"is": "begun", "port": 1, "keeper": 0})
    variables = {"FARSPAN_SECRET": "said by nobody", "FARSPAN_RANK": "0"}
    assert far.remote.begin(queue.SimpleQueue(), variables, first=0, num_ranks=1, files=None) == 1
    sent = os.read(far.hears, 1 << 16)
    assert b"FARSPAN_RANK" in sent and (b"said by nobody" in sent) is not knows
    far.remote.close()


def test_who_is_not_let_in_is_hung_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), timeout=5.0)
        here, _ = listener.accept()
    with here, there:
        there.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(LostError, match="which is no message"):
            prove(here, "launcher", silence_s=5.0)
        there.recv(1 << 16)
        assert there.recv(1) == b""  # and nobody sends signs of life to what has its number next


def test_who_waits_for_hosts_can_be_interrupted() -> None:
    class Waiting:
        num_processes, code = 2, 0

        def gather(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60.0)

        def close(self, code: int) -> None:
            self.code = code

    fleet: Any = Waiting()
    assert run([sys.executable], 2, fleet=fleet) == fleet.code == 128 + signal.SIGTERM


def test_a_host_that_starts_anew_is_waited_for_once_the_run_has_begun(monkeypatch) -> None:
    found = []
    fleet = Fleet([Host(name="far")], ["train.py"], ssh="ssh", fewest=None)
    away = LaunchError("far cannot be reached.", why="Connection refused.", hint="")
    monkeypatch.setattr(fleet_module, "reach", lambda *_, **__: found.pop(0))
    monkeypatch.setattr(fleet_module, "check_same", lambda *_: None)
    monkeypatch.setattr(fleet_module, "_RETRY_S", 0.01)
    found[:] = [away]
    with pytest.raises(LaunchError, match="cannot be reached"):  # it has never been there
        fleet.gather()
    first, second = Far().remote, Far().remote
    found[:] = [(first, {})]
    fleet.gather()
    first.is_lost = True
    found[:] = [away, away, (second, {})]
    fleet.gather()
    assert not found and fleet.num_processes == 1
    monkeypatch.setenv("FARSPAN_DEADLINE", "0.05")
    second.is_lost = True
    found[:] = [away] * 100
    with pytest.raises(LaunchError, match="cannot be reached"):
        fleet.gather()


def test_a_host_that_has_joined_may_leave(monkeypatch) -> None:
    heard = []

    def serve() -> None:
        link, _ = listener.accept()
        with link:
            connection = prove(link, "launcher", silence_s=5.0)
            heard.append(connection.receive())
            left.set()
            connection.close()

    def run_until_ctrl_c(agent: Agent) -> str:
        assert left.wait(10.0)
        agent._connection.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Agent, "run", run_until_ctrl_c)
    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = threading.Thread(target=serve)
        first.start()
        with socket.create_connection(listener.getsockname()) as link:
            monkeypatch.setattr(member, "_connect", lambda _: link)
            assert join_run(["train.py"], ("first", 1), 2, None) == 128 + signal.SIGINT
        first.join()
    assert heard[0]["num_processes"] == 2
