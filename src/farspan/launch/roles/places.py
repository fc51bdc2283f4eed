"""Where the processes of several roles run: on this machine, or on the slots of several hosts (`slots`)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from farspan.launch.attempts import Here
from farspan.launch.attempts.waiting import HostLostError, do_unless_over
from farspan.launch.hosts import Fleet, Host
from farspan.launch.hosts.connection import LostError
from farspan.launch.hosts.fleet import CrewOfHosts, address_of, describe_hosts
from farspan.launch.hosts.host import is_this_machine
from farspan.launch.hosts.remote import RemoteHost
from farspan.launch.job import Crew, Events
from farspan.launch.roles.directory import Directory
from farspan.launch.roles.loose_job import LooseCrew
from farspan.launch.roles.role import Role
from farspan.launch.roles.slots import Slots, lay

__all__ = ["OneMachine", "SeveralHosts"]


class OneMachine:
    """All processes are on this machine.

    Args:
        command: What each runs.
        folder: Where services and their directory listen.
    """

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self._command = command
        self.directory = Directory(folder)

    def gather(self, events: Events, role: Role | None = None) -> None:
        """Does nothing: this machine is there."""

    def take_in_when_back(self) -> None:
        """Does nothing: no host can come."""

    def describe(self) -> str:
        """Returns nothing: where all processes are is no news."""
        return ""

    def open(
        self, role: Role, events: Events, variables: dict[str, str], files: str | None, *, console: int | None
    ) -> Crew:
        """Returns the places of one start of a role."""
        return _CrewHere(self._command, role.num_processes, variables, console=console)


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
        """Who has it decides which hosts are there."""
        self._slots = Slots(roles[-1].name)
        self._laid: dict[str, Sequence[Host]] = {}
        self.directory = Directory(folder, self._address)

    def gather(self, events: Events, role: Role | None = None) -> None:
        """Returns when enough hosts are there.

        Args:
            events: Of the role that waits.
            role: The one that is started again, for which there must be slots enough; None before the first start.

        Raises:
            LaunchError: Too few hosts are there in time, or they have too few slots.
            NotStartedError: A signal has come meanwhile, or the run is over.
        """
        do_unless_over(functools.partial(self._gather, role), events)

    def describe(self) -> str:
        """Returns which rank of which role is on which host, a line for each role for the console."""
        return "".join(f"\nfarspan run: {name}: {describe_hosts(hosts)}" for name, hosts in self._laid.items())

    def open(
        self, role: Role, events: Events, variables: dict[str, str], files: str | None, *, console: int | None
    ) -> Crew:
        """Returns the places of one start of a role.

        Raises:
            HostLostError: A host is lost.
        """
        hosts, argv = self._laid[role.name], self._fleet.script_argv
        return _Crew(self._slots, self._part, role.name, hosts, argv, events, variables, files, console=console)

    def take_in_when_back(self) -> None:
        """From now on hosts that come, or come back, while the processes run are there for those that wait."""
        self._fleet.when_back(self._begin_to_take, "its slots are free")

    def _begin_to_take(self) -> None:
        threading.Thread(target=self._take_back, name="farspan-places", daemon=True).start()

    def _take_back(self) -> None:
        with self._lock:
            if self._fleet.any_is_back():
                self._fleet.take_back()
                self._slots.set_hosts(self._hosts_there())

    def _gather(self, role: Role | None) -> None:
        with self._lock:
            self._fleet.gather(functools.partial(self._slots.has_room, self._roles if role is None else [role]))
            hosts = self._hosts_there()
            if role is None:
                self._laid |= lay(self._slots, self._roles, hosts)
            else:  # before others hear of slots that may be free
                self._laid[role.name] = self._slots.lay(role, hosts)

    def _hosts_there(self) -> Sequence[Host]:
        for name, remote in self._fleet.remote.items():
            # What the directory says of them is found out now, while it can be an error of the start.
            _ = remote.address, remote.own_address
            if remote.names is None:
                remote.names = self.directory.away(name, remote.tell_process)
        return [host for host in self._fleet.present if self._is_there(host.name)]

    def _is_there(self, name: str) -> bool:
        return is_this_machine(name) or not self._fleet.remote[name].is_lost

    def _part(self, role: str, host: str) -> RemoteHost | None:
        """Returns a host for one role; None for this machine.

        Raises:
            LostError: It is lost.
        """
        if is_this_machine(host):
            return None
        remote = self._fleet.remote.get(host)
        if remote is None or remote.is_lost:
            raise LostError(f"the host {host} is lost")
        return remote.part(role)

    def _address(self, host: str, viewer: str) -> str:
        return address_of(host, viewer, self._fleet.remote)


class _CrewHere(Here, LooseCrew):
    """The places of one start of a role that is on this machine: no host is lost, and nobody waits for a place."""


class _Crew(CrewOfHosts, LooseCrew):
    """The places of one start of a role, of which processes that stand for themselves may get others.

    Args:
        slots: Of all roles.
        part: Returns a host, by its name, for a role.
        role: Its name.
        hosts: Where its ranks are.
        *args: Of a crew of hosts.
        **kwargs: Of a crew of hosts.
    """

    def __init__(
        self,
        slots: Slots,
        part: Callable[[str, str], RemoteHost | None],
        role: str,
        hosts: Sequence[Host],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._slots = slots
        self._role = role
        self._part = functools.partial(part, role)
        self._host_of = [host.name for host in hosts for _ in range(host.num_processes)]
        try:
            parts = {host.name: self._part(host.name) for host in hosts}
        except LostError as error:
            raise HostLostError(f"{error}.", hint="start it again") from None
        super().__init__(hosts, {name: part for name, part in parts.items() if part is not None}, *args, **kwargs)

    def move(self, number: int) -> str:
        """Gives a rank that was lost with its host a place on another one; returns its name, "" where there is none."""
        if not self._is_back(self._host_of[number]):
            self._slots.lose(self._host_of[number])
        while (found := self._slots.move(self._role, number)) is not None:
            host, local = found
            try:
                self.put(number, local, host, self._part(host.name))
            except LostError:
                self._slots.lose(host.name)
            else:
                self._host_of[number] = host.name
                return host.name
        return ""

    def _is_back(self, name: str) -> bool:
        """Returns whether a host that was lost is there again, over another connection."""
        try:
            return self._part(name) is not self.by_name.get(name)
        except LostError:
            return False

    def give_up(self, number: int) -> None:
        """Gives the place of a rank that does not come again to others."""
        self._slots.give_up(self._role, number)

    def when_free(self, action: Callable[[], None]) -> None:
        """Does something, from any thread, whenever places may have become free."""
        self._slots.when_free(self._role, action)
