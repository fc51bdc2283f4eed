"""What a user says about the hosts of a run: a list on the command line, or a file with a line for each.

--hosts a:2,b:4            two processes on a, four on b

--hosts hosts.txt
    a  slots=2  devices=0,1
    b  slots=4  python=/opt/py/bin/python  folder=/home/me/project      # a comment
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from farspan.errors import LaunchError, quoted
from farspan.units import parse_count

__all__ = ["Host", "is_this_machine", "read_hosts"]

_MOST_PROCESSES = 4096
_MOST_HOSTS = 4096
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]+\])")
_KEYS = ("slots", "devices", "python", "folder")
_EXAMPLE = "farspan run --hosts a:2,b:4 train.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of a run.

    Attributes:
        name: What ssh calls it.
        num_processes: How many ranks it gets.
        devices: Numbers of the GPUs that these may use, as in CUDA_VISIBLE_DEVICES; "" for all.
        python: The interpreter there; "" for the path of the launcher's own.
        folder: Where the script is started there; "" for the launcher's own folder.
        num_beside: How many processes of other roles share its cores.
    """

    name: str
    num_processes: int = 1
    devices: str = ""
    python: str = ""
    folder: str = ""
    num_beside: int = 0


def read_hosts(text: str) -> list[Host]:
    """Returns the hosts that a list or a file names, each once.

    Raises:
        LaunchError: It is neither, or a host is said twice.

    >>> [(host.name, host.num_processes) for host in read_hosts("a:2,b")]
    [('a', 2), ('b', 1)]
    """
    if os.path.isfile(text):  # which a list that is too long for a name is not
        lines = [line.partition("#")[0].split() for line in _read(text).splitlines()]
        hosts = [_read_line(words, text) for words in lines if words]
    else:
        hosts = [_read_item(item) for item in text.split(",") if item.strip()]
    if not 0 < len(hosts) <= _MOST_HOSTS:
        raise LaunchError(
            f"--hosts {quoted(text)} names {len(hosts) or 'no'} hosts.",
            why=f"it is a list or a file of 1 to {_MOST_HOSTS} hosts.",
            hint=_EXAMPLE,
        )
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LaunchError(
            f"--hosts names {twice} twice.",
            why="its ranks are started together, and know how many they are.",
            hint=f"{twice}:{sum(host.num_processes for host in hosts if host.name == twice)}",
        )
    return hosts


def is_this_machine(name: str) -> bool:
    """Returns whether a host is the one that this process runs on, by its name or as the loopback address."""
    bare = name.rpartition("@")[2].strip("[]")
    if bare in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def _read(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError as error:
        raise LaunchError(f"--hosts {file} cannot be read.", why=f"{error.strerror}.", hint=_EXAMPLE) from None


def _read_item(item: str) -> Host:
    name, count = item.strip(), "1"
    match = re.fullmatch(r"(.*[^:]|.*\]):([^:\]]*)", name)
    if match is not None:
        name, count = match[1], match[2]
    return Host(name=_checked(name, item), num_processes=_count(count, item))


def _read_line(words: list[str], file: str) -> Host:
    given: dict[str, str] = {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in _KEYS or not value:
            raise LaunchError(
                f"{file}: {quoted(word)} says nothing about a host.",
                why=f"what can be said is {', '.join(f'{each}=' for each in _KEYS)}.",
                hint=f"{words[0]} slots=4",
            )
        given[key] = value
    return Host(
        name=_checked(words[0], words[0]),
        num_processes=_count(given.get("slots", "1"), " ".join(words)),
        devices=given.get("devices", ""),
        python=given.get("python", ""),
        folder=given.get("folder", ""),
    )


def _checked(name: str, item: str) -> str:
    if not _NAME.fullmatch(name):  # what begins with - would be an option of ssh
        raise LaunchError(f"{quoted(item.strip())} is no host.", why="it is a name, or user@name.", hint=_EXAMPLE)
    return name


def _count(text: str, item: str) -> int:
    value = parse_count(text)
    if value is None or not 1 <= value <= _MOST_PROCESSES:
        raise LaunchError(
            f"{quoted(item)}: {quoted(text)} is no number of processes.",
            why=f"it is a whole number from 1 to {_MOST_PROCESSES}.",
            hint=_EXAMPLE,
        )
    return value
