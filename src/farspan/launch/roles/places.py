"""Where the processes of several roles run: on this machine, or laid over the slots of several hosts.

--hosts a:2,b:4 --role actor=4 --role learner=2

slots     a a b b b b
learner   0 1             the last role first: its rank 0, which has the console, is on the first host
actor         0 1 2 3     then the others, in the order in which they are named
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

from farspan.errors import LaunchError
from farspan.launch.attempts import Here
from farspan.launch.attempts.waiting import do_unless_over
from farspan.launch.hosts import Fleet, Host
from farspan.launch.hosts.fleet import Share, address_of, describe_hosts
from farspan.launch.job import Crew, Events
from farspan.launch.roles.directory import Directory
from farspan.launch.roles.role import Role

__all__ = ["OneMachine", "SeveralHosts", "lay"]


class OneMachine:
    """All processes are on this machine.

    Args:
        command: What each runs.
        folder: Where services and their directory listen.
    """

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self._command = command
        self.directory = Directory(folder)

    def gather(self, events: Events) -> None:
        """Does nothing: this machine is there."""

    def describe(self) -> str:
        """Returns nothing: where all processes are is no news."""
        return ""

    def open(
        self, role: Role, events: Events, variables: dict[str, str], files: str | None, *, console: int | None
    ) -> Crew:
        """Returns the places of one start of a role."""
        return Here(self._command, role.num_processes, variables, console=console)


class SeveralHosts:
    """The processes are on several hosts, for all starts of all roles.

    Args:
        fleet: The hosts.
        roles: In the order of the command line.
        folder: Where the directory of services listens, and the services of this machine.
    """

    def __init__(self, fleet: Fleet, roles: Sequence[Role], folder: str) -> None:
        self._fleet = fleet
        self._roles = roles
        self._lock = threading.Lock()
        self._hosts_of: Mapping[str, Sequence[Host]] = {}
        self.directory = Directory(folder, self._address)

    def gather(self, events: Events) -> None:
        """Returns when all hosts are there.

        Args:
            events: Of the role that waits.

        Raises:
            LaunchError: A host is not there in time, or the hosts have too few slots.
            NotStartedError: A signal has come meanwhile, or the run is over.
        """
        do_unless_over(self._gather, events)

    def describe(self) -> str:
        """Returns which rank of which role is on which host, a line for each role for the console."""
        return "".join(f"\nfarspan run: {name}: {describe_hosts(hosts)}" for name, hosts in self._hosts_of.items())

    def open(
        self, role: Role, events: Events, variables: dict[str, str], files: str | None, *, console: int | None
    ) -> Crew:
        """Returns the places of one start of a role.

        Raises:
            LaunchError: A host is lost.
        """
        share = Share(role=role.name, hosts=self._hosts_of[role.name], console=console)
        return self._fleet.open(events, variables, files, share)

    def _gather(self) -> None:
        with self._lock:
            self._fleet.gather()
            self._hosts_of = lay(self._roles, self._fleet.present)
            for name, remote in self._fleet.remote.items():
                # What the directory says of them is found out now, while it can be an error of the start.
                _ = remote.address, remote.own_address
                if remote.names is None:
                    remote.names = self.directory.away(name, remote.tell_process)

    def _address(self, host: str, viewer: str) -> str:
        return address_of(host, viewer, self._fleet.remote)


def lay(roles: Sequence[Role], hosts: Sequence[Host]) -> dict[str, list[Host]]:
    """Returns the hosts of each role, each with the number of processes of that role; the last role comes first.

    Args:
        roles: In the order of the command line.
        hosts: With their slots.

    Raises:
        LaunchError: There are too few slots.

    >>> a, b = Host(name="a", num_processes=2), Host(name="b", num_processes=4)
    >>> laid = lay([Role(name="actor", num_processes=3), Role(name="learner", num_processes=3)], [a, b])
    >>> {role: [(host.name, host.num_processes) for host in found] for role, found in laid.items()}
    {'learner': [('a', 2), ('b', 1)], 'actor': [('b', 3)]}
    """
    num_needed, num_there = (sum(each.num_processes for each in things) for things in (roles, hosts))
    if num_needed > num_there:
        raise LaunchError(
            f"{num_needed} processes of {len(roles)} roles, and {num_there} slots on {len(hosts)} hosts.",
            why=", ".join(f"{host.name} has {host.num_processes}" for host in hosts) + ".",
            hint="more slots (--hosts a:2,b:4; with --join the -n of each host), or fewer processes",
        )
    free = [host.num_processes for host in hosts]
    laid: dict[str, list[Host]] = {}
    for role in [roles[-1], *roles[:-1]]:
        left, laid[role.name] = role.num_processes, []
        for number, host in enumerate(hosts):
            count = min(left, free[number])
            if count:
                laid[role.name].append(dataclasses.replace(host, num_processes=count))
            left, free[number] = left - count, free[number] - count
    used = {host.name: host.num_processes - each for host, each in zip(hosts, free, strict=True)}
    return {
        name: [dataclasses.replace(host, num_beside=used[host.name] - host.num_processes) for host in found]
        for name, found in laid.items()
    }
