"""Connects with another host by ssh, and hears what it has: versions, and the script's code."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from farspan.errors import LaunchError
from farspan.launch.hosts.connection import LostError
from farspan.launch.hosts.host import Host
from farspan.launch.hosts.remote import RemoteHost
from farspan.launch.hosts.ssh import connect_by_ssh

__all__ = ["reach"]


def reach(
    host: Host, script_argv: Sequence[str], ssh: str, *, is_shown: bool = True
) -> tuple[RemoteHost, dict[str, str]] | LaunchError:
    """Returns a host, and its versions and digests of files by name; or why it does not answer.

    Args:
        host: Which.
        script_argv: What its ranks are to run; [""] for nothing.
        ssh: How it is reached.
        is_shown: Whether what ssh says goes to the console, even where the host does not answer.

    Raises:
        LaunchError: It has no such folder, or there is no ssh.
    """
    connection, said = connect_by_ssh(host, ssh, is_shown=is_shown)
    remote = RemoteHost(host, connection)
    question = {"do": "check", "argv": list(script_argv), "folder": host.folder or os.getcwd()}
    try:
        has = remote.ask(question, "checked")["has"]
    except LostError as error:
        remote.close()
        why = (said.last_line() or str(error)).removesuffix(".")
        return LaunchError(f"{host.name} cannot be reached.", why=f"{why}.", hint=_hint(host, why))
    except LaunchError:
        remote.close()
        raise
    said.show()
    return remote, {str(name): str(text) for name, text in has.items()}


def _hint(host: Host, why: str) -> str:
    if "Host key verification failed" in why:  # ssh asks nothing here, where its output is not a terminal
        return f"ssh {host.name}     once by hand, which shows the key of the host and asks whether it is known"
    if "Permission denied" in why:
        return f"ssh-copy-id {host.name}     or a key in ssh-agent: ssh must work without a password"
    python = shlex.quote(host.python or sys.executable)
    return f"ssh {host.name} {python} -c 'import farspan'     must work without a password"
