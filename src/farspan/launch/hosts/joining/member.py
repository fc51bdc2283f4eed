"""A host that takes part in the run of another one."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Sequence

from farspan import settings
from farspan.errors import LaunchError, quoted
from farspan.launch.hosts.connection import LostError
from farspan.launch.hosts.joining.proof import prove
from farspan.launch.terminal import say

__all__ = ["join_run", "read_address"]

_SILENCE_S = 60.0
_CONNECTING_S = 10.0
_RETRY_S = 0.5


def join_run(script_argv: Sequence[str], address: tuple[str, int], num_processes: int, node_rank: int | None) -> int:
    """Takes part in the run of another host with the processes of this one; returns the exit code of the run.

    Raises:
        LaunchError: Nobody listens there, or does not know the secret.
    """
    from farspan.launch.hosts.agent import Agent  # which is a program too, and must not be imported before it is run

    link = _connect(address)
    try:
        connection = prove(link, "agent", silence_s=_SILENCE_S)
        hello = {"name": socket.gethostname(), "num_processes": num_processes, "node_rank": node_rank}
        connection.send(hello)
        agent = Agent(connection, own_argv=script_argv)
        why = agent.run()
    except KeyboardInterrupt:
        say("farspan run: ended by SIGINT; the first host goes on without this one, if it can")
        return 128 + signal.SIGINT
    except LostError as error:
        raise LaunchError(
            f"{address[0]}:{address[1]} does not let this host in.",
            why=f"{error}.",
            hint="FARSPAN_SECRET=... the same on all hosts, or on none",
        ) from None
    if agent.code is None:
        say(f"farspan run: the first host is lost: {why}")
        return 1
    if why:
        say(f"farspan run: {why}")
    return agent.code


def read_address(text: str) -> tuple[str, int]:
    """Reads HOST:PORT.

    >>> read_address("a:29400"), read_address("[fd00::1]:29400")
    (('a', 29400), ('fd00::1', 29400))
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise LaunchError(
            f"--join {quoted(text)} is no address.", why="it is HOST:PORT, of the first host.", hint="--join a:29400"
        )
    return host.strip("[]"), int(port)


def _connect(address: tuple[str, int]) -> socket.socket:
    """Connects to the first host, which may be started after this one."""
    until = time.monotonic() + settings.seconds("DEADLINE", default=300.0)
    pause = threading.Event()
    while True:
        try:
            return socket.create_connection(address, timeout=_CONNECTING_S)
        except OSError as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"nobody listens at {address[0]}:{address[1]}.",
                    why=f"{error.strerror or error}, for as long as FARSPAN_DEADLINE says.",
                    hint="start the first host: farspan run -n 2 --nnodes 2 --node-rank 0 --join HOST:PORT train.py",
                ) from None
        pause.wait(_RETRY_S)  # nothing tells when somebody begins to listen on another host
