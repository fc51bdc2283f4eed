"""The side channel between real processes, some of which are killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from farspan import control as side
from farspan.control.channel import SideChannel
from farspan.control.tree import numbers
from farspan.errors import RemoteError

LONG_S = 100.0
SOURCE = str(Path(side.__file__).parents[3])

CLIENT = """
import os, sys, time
from farspan.control.channel import SideChannel
from farspan.control.tree import numbers
rank, world_size, port = map(int, sys.argv[1:4])
if "chain" in sys.argv:
    numbers.FAN_OUT = 1
channel = SideChannel.connect(rank, world_size, ("127.0.0.1", port), "secret", 30)
channel.start(0, 1)
channel.wait_agreed(0, 30)
if "fork" in sys.argv:  # like a data loader's worker
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print("child", child, flush=True)
print("agreed", flush=True)
if "victim" in sys.argv:  # waits to be killed, and begins no other step
    time.sleep(60)
try:
    channel.start(1, 1)
    channel.wait_agreed(1, 30)
    channel.close(0)
except Exception as error:
    print(type(error).__name__, error.what, flush=True)
    channel.close(0)
"""

RELAY = """
import sys, time
from farspan.control.channel import SideChannel
from farspan.control.tree import numbers
numbers.FAN_OUT = 1
hub = "127.0.0.1", int(sys.argv[1])
server = SideChannel.host(3, "secret", "127.0.0.1", rank=1, parent=hub, deadline_s=30)
channel = SideChannel.connect(1, 3, server.address, "secret", 30, server=server)
print(server.address[1], flush=True)
channel.start(0, 1)
channel.wait_agreed(0, 30)
print("agreed", flush=True)
time.sleep(60)
"""

HUB = """
import time
from farspan.control.channel import SideChannel
server = SideChannel.host(2, "secret", ("127.0.0.1", 0))
channel = SideChannel.connect(0, 2, server.address, "secret", 30, server=server)
print(server.address[1], flush=True)
time.sleep(60)
"""


@pytest.fixture
def spawn():
    processes = []

    def start(script, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=LONG_S)


@pytest.mark.parametrize(
    "fork", [False, pytest.param(True, marks=pytest.mark.skipif(not hasattr(os, "fork"), reason=""))]
)
def test_a_killed_rank_is_noticed_by_all(spawn, fork):
    server = SideChannel.host(3, "secret", ("127.0.0.1", 0))
    channel = SideChannel.connect(0, 3, server.address, "secret", LONG_S, server=server)
    port = server.address[1]
    victim, witness = spawn(CLIENT, 1, 3, port, "victim", *["fork"] * fork), spawn(CLIENT, 2, 3, port)
    told = threading.Event()
    channel.on_failure = lambda error: told.set()
    child = None
    try:
        channel.start(0, 1)
        channel.wait_agreed(0, LONG_S)
        if fork:
            child = int(victim.stdout.readline().split()[1])
        assert victim.stdout.readline() == "agreed\n"
        assert witness.stdout.readline() == "agreed\n"
        channel.start(1, 1)
        victim.send_signal(signal.SIGKILL)
        if not told.wait(LONG_S):
            pytest.fail("nobody noticed")
        with pytest.raises(RemoteError, match="rank 1 died") as caught:
            channel.wait_agreed(1, LONG_S)
        assert caught.value.rank == 1
        assert witness.stdout.readline().startswith("RemoteError rank 1 died")
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        channel.close(LONG_S)


def test_a_killed_rank_that_passes_on_for_others_is_noticed_by_all(spawn, monkeypatch):
    monkeypatch.setattr(numbers, "FAN_OUT", 1)
    server = SideChannel.host(3, "secret", "127.0.0.1")
    channel = SideChannel.connect(0, 3, server.address, "secret", LONG_S, server=server)
    try:
        victim = spawn(RELAY, server.address[1])
        witness = spawn(CLIENT, 2, 3, int(victim.stdout.readline()), "chain")
        channel.start(0, 1)
        channel.wait_agreed(0, LONG_S)
        assert victim.stdout.readline() == witness.stdout.readline() == "agreed\n"
        channel.start(1, 1)
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(RemoteError, match="rank 1 died") as caught:
            channel.wait_agreed(1, LONG_S)
        assert caught.value.rank == 1
        assert witness.stdout.readline().startswith("RemoteError rank 1 died")
    finally:
        channel.close(LONG_S)


def test_a_killed_hub_is_noticed(spawn):
    hub = spawn(HUB)
    port = int(hub.stdout.readline())
    channel = SideChannel.connect(1, 2, ("127.0.0.1", port), "secret", LONG_S)
    channel.start(0, 1)
    hub.send_signal(signal.SIGKILL)
    with pytest.raises(RemoteError, match="rank 0 died") as caught:
        channel.wait_agreed(0, LONG_S)
    assert caught.value.rank == 0
    channel.contribute("after", b"")  # What does not wait does not raise.
    channel.close(LONG_S)
