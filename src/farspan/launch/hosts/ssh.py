"""Starts an agent on another host by ssh, or by the command that is given in its place."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
from collections import deque

from farspan.errors import LaunchError
from farspan.launch.hosts.connection import Connection
from farspan.launch.hosts.host import Host
from farspan.launch.terminal import say

__all__ = ["Said", "connect_by_ssh"]

_OF_CONNECTION = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=3", "ServerAliveCountMax=3")
# What a user's ~/.ssh/config may say for sessions at a keyboard: a terminal changes what goes through, a forwarded port
# may be in use, and a connection shared with other sessions would be lost with them, or stand still.
_NOT_OF_SESSIONS = ("RequestTTY=no", "ClearAllForwardings=yes", "ControlPath=none")
_SILENCE_S = 10.0
_LAST_WORDS_S = 5.0
_KEPT_LINES = 20


class Said:
    """What ssh and the agent say on standard error, beside the connection.

    Args:
        process: That of ssh, which is reaped at its end.
        name: Of the host.
        is_shown: Whether it goes to the console at once.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, *, is_shown: bool) -> None:
        self._process = process
        self._name = name
        self._lock = threading.Lock()
        self._is_shown = is_shown
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def show(self) -> None:
        """Shows it on the console, from the beginning."""
        with self._lock:
            if not self._is_shown:
                self._is_shown = True
                for line in self._lines:
                    say(f"{self._name}: {line}")

    def last_line(self) -> str:
        """Returns the last line, once the process has ended; "" if there is none."""
        self._reading.join(_LAST_WORDS_S)
        return self._lines[-1] if self._lines else ""

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            with self._lock:
                self._lines.append(text)
                if self._is_shown:
                    say(f"{self._name}: {text}")
        self._process.wait()


def connect_by_ssh(host: Host, ssh: str, *, is_shown: bool = True) -> tuple[Connection, Said]:
    """Returns the connection with a new agent on a host, and what is said beside it.

    Args:
        host: Which.
        ssh: The command that runs another one on a host: `ssh`, or what takes a host and a line for its shell.
        is_shown: Whether what is said goes to the console at once.

    Raises:
        LaunchError: There is no such command.
    """
    words = shlex.split(ssh) or ["ssh"]
    options = (
        [word for each in (*_OF_CONNECTION, *_NOT_OF_SESSIONS) for word in ("-o", each)]
        if os.path.basename(words[0]) == "ssh"
        else []
    )
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
    said = Said(process, host.name, is_shown=is_shown)

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            process.terminate()

    connection = Connection(
        process.stdout.fileno(), process.stdin.fileno(), silence_s=_SILENCE_S, hang_up=hang_up, skips_noise=True
    )
    return connection, said


def _line_for(host: Host) -> str:
    """The line that the shell there runs: nothing that a shell could take for something else."""
    known = os.environ.get("PYTHONPATH", "")
    path = f"PYTHONPATH={shlex.quote(known)} " if known else ""
    python = shlex.quote(host.python or sys.executable)
    program = shlex.quote("import sys; from farspan.launch.hosts.agent import main; sys.exit(main())")
    return f"exec env {path}{python} -u -c {program}"
