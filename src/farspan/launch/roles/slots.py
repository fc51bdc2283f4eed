"""Which process of which role has which slot, of the hosts that are there.

--hosts a:2,b:2,c:2 --role actor=3 --role learner=2

slots     a a b b c c
learner   0 1                the last role first: its rank 0, which has the console, is on the first host
actor         0 1 2          then the others, in the order in which they are named; one slot is left over

b is lost: actor 0 gets the free slot of c, actor 1 waits for one. What the last role has lost with a host is kept for
it: no other process gets the slots that it needs.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from farspan.errors import LaunchError
from farspan.launch.hosts import Host
from farspan.launch.roles.role import Role

__all__ = ["Slots", "lay"]


class Slots:
    """The slots of all hosts, and who has them. From any thread.

    Args:
        main: The name of the role that the run is for.
    """

    def __init__(self, main: str) -> None:
        self._main = main
        self._lock = threading.RLock()
        self._hosts: list[Host] = []
        self._held: dict[str, dict[int, tuple[str, int]]] = {}
        """By role and rank: the name of the host, which may be lost, and the number of the process there."""
        self._when_free: dict[str, Callable[[], None]] = {}

    def set_hosts(self, hosts: Sequence[Host]) -> None:
        """Takes which hosts are there, with their slots."""
        with self._lock:
            self._hosts = list(hosts)
        self._let_know()

    def lose(self, name: str) -> None:
        """Takes the loss of a host, the slots of which nobody gets any more."""
        with self._lock:
            self._hosts = [host for host in self._hosts if host.name != name]

    def has_room(self, roles: Sequence[Role], hosts: Sequence[Host]) -> bool:
        """Returns whether there are slots enough on these hosts for all processes of some roles."""
        with self._lock:
            return sum(role.num_processes for role in roles) <= self._num_free([role.name for role in roles], hosts)

    def lay(self, role: Role, hosts: Sequence[Host]) -> Sequence[Host]:
        """Returns the hosts of a role that starts, each with the number of its processes, which have the slots now.

        Args:
            role: Which.
            hosts: Those that are there, with their slots.

        Raises:
            LaunchError: There are too few slots; then the role keeps those that it had.
        """
        with self._lock:
            self._hosts = list(hosts)
            num_free = self._num_free([role.name], self._hosts)
            if role.num_processes > num_free:
                what = f"{role.num_processes} processes of {role.name}"
                raise _too_few(what, num_free, self._hosts, self._used(but=role.name))
            used, held = self._used(but=role.name), dict[int, tuple[str, int]]()
            for host in self._hosts:
                count = max(0, min(role.num_processes - len(held), host.num_processes - used[host.name]))
                held |= {len(held) + each: (host.name, each) for each in range(count)}
            self._held[role.name] = held
            found = self.hosts_of(role.name)
        self._let_know()  # it may have had more than it needs
        return found

    def hosts_of(self, role: str) -> Sequence[Host]:
        """Returns the hosts on which a role has processes, with the numbers of these and of others beside them."""
        with self._lock:
            own, used = Counter(name for name, _ in self._held[role].values()), self._used()
            return [
                dataclasses.replace(host, num_processes=own[host.name], num_beside=used[host.name] - own[host.name])
                for host in self._hosts
                if own[host.name]
            ]

    def move(self, role: str, rank: int) -> tuple[Host, int] | None:
        """Returns a host with a free slot, which the process has from now on, and its number on that host in its role;
        None where no slot is free: then it has none.
        """
        with self._lock:
            held = self._held.setdefault(role, {})
            held.pop(rank, None)
            used = self._used()
            host = next((host for host in self._hosts if host.num_processes > used[host.name]), None)
            if host is None or not self._num_free([], self._hosts):
                return None
            there = {each for name, each in held.values() if name == host.name}
            number = next(each for each in range(len(there) + 1) if each not in there)
            held[rank] = (host.name, number)
            return dataclasses.replace(host, num_beside=used[host.name] - len(there)), number

    def give_up(self, role: str, rank: int) -> None:
        """Takes that a process does not come again."""
        with self._lock:
            self._held.get(role, {}).pop(rank, None)
        self._let_know()

    def when_free(self, role: str, action: Callable[[], None]) -> None:
        """Does something, for a role, whenever slots may have become free."""
        with self._lock:
            self._when_free[role] = action

    def _let_know(self) -> None:
        with self._lock:
            actions = list(self._when_free.values())
        for action in actions:
            action()

    def _used(self, but: str = "") -> Counter[str]:
        return Counter(name for role, held in self._held.items() if role != but for name, _ in held.values())

    def _num_free(self, roles: Sequence[str], hosts: Sequence[Host]) -> int:
        """Returns how many slots these roles may have, with those that they have."""
        names = {host.name for host in hosts}
        used = Counter(name for role, held in self._held.items() if role not in roles for name, _ in held.values())
        num_free = sum(max(0, host.num_processes - used[host.name]) for host in hosts)
        kept = [name for name, _ in self._held.get(self._main, {}).values() if name not in names]
        return max(0, num_free - (0 if self._main in roles else len(kept)))


def lay(slots: Slots, roles: Sequence[Role], hosts: Sequence[Host]) -> Mapping[str, Sequence[Host]]:
    """Lays all roles over the slots of hosts, the last role first; returns the hosts of each.

    Raises:
        LaunchError: There are too few slots.

    >>> a, b = Host(name="a", num_processes=2), Host(name="b", num_processes=4)
    >>> roles = [Role(name="actor", num_processes=3), Role(name="learner", num_processes=3)]
    >>> laid = lay(Slots("learner"), roles, [a, b])
    >>> {role: [(host.name, host.num_processes) for host in found] for role, found in laid.items()}
    {'learner': [('a', 2), ('b', 1)], 'actor': [('b', 3)]}
    """
    if not slots.has_room(roles, hosts):
        num_needed, num_there = (sum(each.num_processes for each in things) for things in (roles, hosts))
        raise _too_few(f"{num_needed} processes of {len(roles)} roles", num_there, hosts, Counter())
    order = [roles[-1], *roles[:-1]]
    for role in order:
        slots.lay(role, hosts)
    return {role.name: slots.hosts_of(role.name) for role in order}


def _too_few(processes: str, num_free: int, hosts: Sequence[Host], used: Counter[str]) -> LaunchError:
    free = ("free slot" if used else "slot") + ("s" if num_free != 1 else "")
    there = [f"{host.name} has {host.num_processes}" for host in hosts]
    if used:
        there = [f"{each}, {used[host.name]} in use" for each, host in zip(there, hosts, strict=True)]
    return LaunchError(
        f"{processes}, and {num_free} {free} on {len(hosts)} hosts.",
        why=f"{'; '.join(there) if used else ', '.join(there)}.",
        hint="more slots (--hosts a:2,b:4; with --join the -n of each host), or fewer processes",
    )
