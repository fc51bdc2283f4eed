"""Connects with another host by ssh, and hears what it has: versions, and the script's code."""

from __future__ import annotations

import os
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
        why = said.last_line() or str(error)
        hint = f"ssh {host.name} {host.python or 'python'} -c 'import farspan'     must work without a password"
        return LaunchError(f"{host.name} cannot be reached.", why=f"{why}.", hint=hint)
    except LaunchError:
        remote.close()
        raise
    said.show()
    return remote, {str(name): str(text) for name, text in has.items()}
