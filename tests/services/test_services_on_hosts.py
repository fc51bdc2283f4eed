"""Objects that are called by name between processes of two hosts."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
import torch
from tests.launch.roles.hosts import RunOnHosts
from tests.support.launcher import TIMEOUT_S

import farspan
from farspan.errors import ServiceError
from farspan.services import far
from farspan.services.connection import Connection
from farspan.services.far import Port, connect_to_port
from farspan.services.names import Place, names_of_run

SECRET = "known to both hosts"


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("FARSPAN_SECRET", SECRET)
    job = RunOnHosts(tmp_path)
    yield job
    job.close()


CALLS = """
import torch
from farspan.services.names import names_of_run
class Buffer:
    def __init__(self): self.items = []
    def add(self, item): self.items.append(item); return len(self.items)
    def get(self, index): return self.items[index]
    def way(self): return names_of_run().find('actor-0', 100).address
if role == 'actor':
    with farspan.expose(f'actor-{rank}', Buffer()) as exposed:
        farspan.service('buffer', timeout=100).add(torch.full((1 << 18,), 1.0 + rank))
        exposed.wait()
buffer = Buffer()
with farspan.expose('buffer', buffer):
    actors = [farspan.service(f'actor-{number}', timeout=100) for number in range(2)]
    futures = [actor.future.add({'x': torch.ones(3), 'name': 'n'}) for actor in actors for _ in range(100)]
    print(sum(future.result(100) for future in futures), actors[1].get(99)['x'].tolist())
    while len(buffer.items) < 2: time.sleep(0.01)
    print(sum(item.sum().item() for item in buffer.items) / (1 << 18))
    print([names_of_run().find(name, 100).address for name in ('buffer', 'actor-0')], actors[1].way() == '')
"""


def test_processes_of_two_hosts_call_each_other_and_those_of_one_host_by_its_sockets(job):
    code, out, err = job.run(CALLS, "--role", "actor=2", "--role", "learner=1")
    assert code == 0 and out == "10100 [1.0, 1.0, 1.0]\n3.0\n['', '127.0.0.1'] True\n", err
    assert "learner: localhost has rank 0\n" in err and ")-1 has rank 0 to 1\n" in err
    assert job.end_second()[0] == 0


KILLED = """
from farspan.errors import ServiceError
class Actor:
    def act(self): ready(); time.sleep(1000)
    def name(self): return f"{role} {os.environ['FARSPAN_RESTART']}"
if role == 'actor':
    farspan.expose('actor', Actor()).wait()
actor = farspan.service('actor', timeout=100)
print(actor.name())
try:
    actor.act()
except ServiceError as error:
    print(error.is_loss, str(error).splitlines()[0])
print(actor.name())  # waits until it has been started again
"""


def test_a_process_that_is_killed_on_another_host_is_lost_and_back_once_started_again(job):
    job.start(KILLED, "--role", "actor=1", "--role", "learner=1", "--max-restarts", "1")
    os.kill(job.pid("actor0"), signal.SIGKILL)
    code, out, err = job.end()
    assert code == 0, err
    assert out == "actor 0\nTrue the service 'actor' of actor 0 is lost while act is called.\nactor 1\n"
    assert "actor 0 was killed by SIGKILL; restart 1 of 1 of it" in err


LOST_HOST = """
from farspan.errors import ServiceError
class Actor:
    def act(self): ready(); time.sleep(1000)
if role == 'actor':
    farspan.expose('actor', Actor()).wait()
try:
    farspan.service('actor', timeout=100).act()
except ServiceError as error:
    print(error.is_loss)
while not os.path.exists(f'{here}/go'): time.sleep(0.01)  # the launcher may hear of it later
with farspan.expose('actor', []):  # the name is free
    print('exposed')
"""


def test_a_host_that_is_lost_frees_the_names_of_its_processes_and_the_run_goes_on(job):
    job.start(LOST_HOST, "--role", "actor=1", "--role", "learner=1", "--max-restarts", "1")
    job.pid("actor0")
    job.second.kill()
    job.wait_until_said("it waits for a free slot")
    (job.folder / "go").touch()
    code, out, err = job.end()
    assert (code, out) == (0, "True\nexposed\n"), err
    assert "actor 0 is lost (its host " in err


class Numbers:
    def __init__(self) -> None:
        self.gate = threading.Event()

    def double(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    def wait(self) -> None:
        self.gate.wait(TIMEOUT_S)


@pytest.fixture
def numbers(monkeypatch):
    """A service that other hosts reach, in this process."""
    monkeypatch.setenv("FARSPAN_SECRET", SECRET)
    monkeypatch.setenv("FARSPAN_HOSTS", "2")
    numbers = Numbers()
    with farspan.expose("numbers", numbers, threads=2):
        yield numbers
        numbers.gate.set()


def connected() -> Connection:
    place = names_of_run().find("numbers", TIMEOUT_S)
    sock = connect_to_port("numbers", ("127.0.0.1", place.port), SECRET, TIMEOUT_S)
    assert sock.recv(1) == b"!"
    there = Place(socket=place.socket, address="127.0.0.1", port=place.port, who="process 1")
    return Connection(sock, "numbers", there, TIMEOUT_S)


def test_who_knows_the_secret_is_let_in_by_tcp(numbers: Numbers) -> None:
    connection = connected()
    assert connection.call("double", [torch.ones(2)], {}).result(TIMEOUT_S).tolist() == [2.0, 2.0]
    connection.close()


@pytest.mark.parametrize(("service", "secret"), [("numbers", "another"), ("other", SECRET)])
def test_who_does_not_know_the_secret_is_not(numbers: Numbers, service: str, secret: str, caplog) -> None:
    port = names_of_run().find("numbers", TIMEOUT_S).port
    with pytest.raises(ConnectionError):
        connect_to_port(service, ("127.0.0.1", port), secret, TIMEOUT_S)
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
        said = b""
        while data := _received(stranger):
            said += data
        assert len(said) == 48  # the other end's random number and proof, and nothing more
    connection = connected()
    assert connection.call("double", [torch.ones(1)], {}).result(TIMEOUT_S).tolist() == [2.0]
    connection.close()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 10)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(("caller_notices", "why"), [(True, "the link is cut"), (False, "its process has ended")])
def test_calls_over_a_link_that_is_cut_are_lost(numbers: Numbers, monkeypatch, caller_notices: bool, why: str) -> None:
    connection = connected()
    waiting = connection.call("wait", [], {})
    here = connection._sock
    monkeypatch.setattr(far, "silence_s", lambda sock: 100.0 if (sock is here) is caller_notices else 0.0)
    with pytest.raises(ServiceError, match=f"(?s)is lost while wait is called.*{why}") as raised:
        waiting.result(TIMEOUT_S)
    assert raised.value.is_loss and connection.is_lost


def test_of_many_strangers_the_oldest_goes() -> None:
    port = Port("many", SECRET)
    port.open(lambda sock: sock.close())
    strangers = [socket.create_connection(("127.0.0.1", port.number), timeout=TIMEOUT_S) for _ in range(129)]
    try:
        strangers[0].recv(16)  # the nonce of the other end
        assert strangers[0].recv(1) == b""
        connect_to_port("many", ("127.0.0.1", port.number), SECRET, TIMEOUT_S).close()
    finally:
        port.close()
        for each in strangers:
            each.close()
