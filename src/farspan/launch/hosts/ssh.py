"""Starts an agent on another host by ssh, or by the command that is given in its place."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

from farspan.errors import LaunchError
from farspan.launch.hosts.connection import Connection
from farspan.launch.hosts.host import Host
from farspan.launch.terminal import say

__all__ = ["connect_by_ssh"]

_SETTINGS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=3", "ServerAliveCountMax=3")
_SILENCE_S = 10.0
_LAST_WORDS_S = 5.0


def connect_by_ssh(host: Host, ssh: str) -> tuple[Connection, Callable[[], str]]:
    """Returns the connection with a new agent on a host, and what gives the last line of its standard error.

    Args:
        host: Which.
        ssh: The command that runs another one on a host: `ssh`, or what takes a host and a line for its shell.

    Raises:
        LaunchError: There is no such command.
    """
    words = shlex.split(ssh) or ["ssh"]
    options = [word for each in _SETTINGS for word in ("-o", each)] if os.path.basename(words[0]) == "ssh" else []
    destination = host.name.replace("[", "").replace("]", "")  # ssh takes an address of IPv6 as it is
    command = [*words, *options, destination, _line_for(host)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(
            f"{host.name} cannot be reached.",
            why=f"{ssh!r} cannot be started: {error.strerror}.",
            hint="install ssh, or --join HOST:PORT on each host",
        ) from None
    assert process.stdin is not None and process.stdout is not None
    said: deque[str] = deque(maxlen=1)
    showing = threading.Thread(target=_show, args=(process, host.name, said), daemon=True)
    showing.start()

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            process.terminate()

    def last_words() -> str:
        showing.join(_LAST_WORDS_S)
        return said[-1] if said else ""

    connection = Connection(process.stdout.fileno(), process.stdin.fileno(), silence_s=_SILENCE_S, hang_up=hang_up)
    return connection, last_words


def _line_for(host: Host) -> str:
    """The line that the shell there runs: nothing that a shell could take for something else."""
    known = os.environ.get("PYTHONPATH", "")
    path = f"PYTHONPATH={shlex.quote(known)} " if known else ""
    python = shlex.quote(host.python or sys.executable)
    program = shlex.quote("import sys; from farspan.launch.hosts.agent import main; sys.exit(main())")
    return f"exec env {path}{python} -u -c {program}"


def _show(process: subprocess.Popen[bytes], name: str, said: deque[str]) -> None:
    """Shows what ssh and the agent say beside the connection, and reaps ssh."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        said.append(text)
        say(f"{name}: {text}")
    process.wait()
