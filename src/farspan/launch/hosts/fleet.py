"""All hosts of a run: who is there, which ranks each gets, and by which address they find each other.

hosts           a:2 (this machine)    b:4              c:1
ranks           0 1                   2 3 4 5          6
store           in rank 0, at an address of a that leads to the host that is to reach it
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from farspan import settings
from farspan.errors import LaunchError
from farspan.launch.attempts import Here, find_command
from farspan.launch.attempts.here import inherited_variables
from farspan.launch.attempts.variables import own_threads
from farspan.launch.attempts.waiting import HostLostError
from farspan.launch.hosts.address import free_port
from farspan.launch.hosts.code import check_same, code_of, versions
from farspan.launch.hosts.connection import LostError
from farspan.launch.hosts.growing import Absent, Growth
from farspan.launch.hosts.host import Host, is_this_machine
from farspan.launch.hosts.reach import reach
from farspan.launch.hosts.remote import RemoteHost
from farspan.launch.job import Crew, Events
from farspan.launch.membership import MemberService
from farspan.launch.memory import MEMORY_VARIABLE, ServedMemory, keeper_variables
from farspan.launch.rank_process import Started
from farspan.launch.terminal import say
from farspan.settings import PREFIX

__all__ = ["CrewOfHosts", "Fleet", "address_of", "describe_hosts"]

_RETRY_S = 5.0


class Fleet:
    """The hosts of a run, over all its starts.

    Args:
        hosts: In the order of their ranks.
        script_argv: What each rank runs.
        ssh: How other hosts are reached.
        fewest: With how many hosts the run starts, or goes on after others are lost; None for all.
    """

    def __init__(self, hosts: Sequence[Host], script_argv: Sequence[str], *, ssh: str, fewest: int | None) -> None:
        self.hosts = list(hosts)
        self.script_argv = list(script_argv)
        self.ssh = ssh
        self.fewest = len(self.hosts) if fewest is None else fewest
        self._remote: dict[str, RemoteHost] = {}
        self._present: list[Host] = self.hosts
        self._absent = Absent(self._attempt)
        self._has_begun = False
        self._memory: ServedMemory | None = None
        """The folder of saves in memory of this host; it stays for all starts."""

    @property
    def most(self) -> int:
        """Returns how many hosts there may be."""
        return len(self.hosts)

    @property
    def num_processes(self) -> int:
        """How many ranks the hosts that are there have."""
        return sum(host.num_processes for host in self._present)

    def describe(self) -> str:
        """Returns which ranks are on which host, for the console."""
        return describe_hosts(self._present)

    @property
    def present(self) -> Sequence[Host]:
        """Returns the hosts that are there, in the order of their ranks."""
        return self._present

    @property
    def remote(self) -> Mapping[str, RemoteHost]:
        """Returns those of them that are not this machine, by name."""
        return self._remote

    def gather(self, is_enough: Callable[[Sequence[Host]], bool] = bool) -> None:
        """Connects with the hosts that are not connected; once the run has begun, waits until enough of them are back.

        Args:
            is_enough: Whether these hosts have slots enough; once the run has begun, others are waited for until then.

        Raises:
            LaunchError: Too few hosts are there, or one has another program.
        """
        until = time.monotonic() + settings.seconds("DEADLINE", default=300.0)
        pause, has_said = threading.Event(), False
        while failures := self._connect():
            error = next(iter(failures.values()))
            is_over = not self._has_begun or time.monotonic() > until
            if len(self._present) >= self.fewest and (is_over or is_enough(self._present)):
                again = self._absent.try_again([host for host in self.hosts if host.name in failures])
                for name, each in failures.items():
                    why = f"{each.why.removesuffix('.')}; it is tried again" if again else each.why
                    say(f"farspan run: without {name}: {each.what} {why}")
                break
            if is_over:
                raise error
            if not has_said:
                say(f"farspan run: waits for {', '.join(failures)} to come back (FARSPAN_DEADLINE)")
            has_said = True
            pause.wait(_RETRY_S)  # nothing tells when a host is there again
        self._has_begun = True

    def _connect(self) -> dict[str, LaunchError]:
        """Tries all hosts that are not connected; returns who failed.

        Raises:
            LaunchError: Before the first start: a host has another program.
        """
        gone = [name for name, remote in self._remote.items() if remote.is_lost]
        for name in gone:
            self._remote.pop(name).close()
        missing = [host for host in self.hosts if not is_this_machine(host.name) and host.name not in self._remote]
        failures: dict[str, LaunchError] = {}
        if missing:
            with ThreadPoolExecutor(max_workers=min(64, len(missing))) as pool:
                for host, found in zip(missing, pool.map(self._call, missing), strict=True):
                    if isinstance(found, LaunchError):
                        failures[host.name] = found
                    else:
                        self._take(host, found)
        self._note_present()
        return failures

    def _take(self, host: Host, remote: RemoteHost) -> None:
        self._remote[host.name] = remote
        remote.when_lost(functools.partial(self._absent.try_again, [host]))

    def _note_present(self) -> None:
        self._present = [host for host in self.hosts if is_this_machine(host.name) or host.name in self._remote]

    def take_back(self) -> None:
        """Connects with the hosts that have come back, or come, and waits for no other one."""
        back = self._absent.names_back()
        for host in self.hosts:
            found = self._call(host) if host.name in back else None
            if isinstance(found, RemoteHost):
                gone = self._remote.pop(host.name, None)
                if gone is not None:
                    gone.close()
                self._take(host, found)
        self._note_present()

    def _call(self, host: Host) -> RemoteHost | LaunchError:
        try:
            return self._absent.call(host)
        except LaunchError as error:
            if not self._has_begun:
                raise
            return error  # a run that goes on is not ended by a host that comes back with another program

    def _attempt(self, host: Host, is_again: bool) -> RemoteHost | LaunchError:
        """Connects with a host, and compares its program with the one here.

        Raises:
            LaunchError: It has another one, or cannot take part.
        """
        found = reach(host, self.script_argv, self.ssh, is_shown=not is_again)
        if isinstance(found, LaunchError):
            return found
        remote, theirs = found
        try:
            check_same(host, theirs, versions(), code_of(self.script_argv))
        except LaunchError:
            remote.close()
            raise
        return remote

    def open(self, events: Events, variables: dict[str, str], files: str | None) -> CrewOfHosts:
        """Returns the places of the ranks of one start.

        Args:
            events: By which other hosts' notes come.
            variables: That all ranks get.
            files: As in `run`.

        Raises:
            LaunchError: A host is lost, or cannot begin.
        """
        if variables.get(MEMORY_VARIABLE):
            self._memory = self._memory or ServedMemory()
        return CrewOfHosts(self._present, self._remote, self.script_argv, events, variables, files, memory=self._memory)

    def take_in_at_saves(self, events: Events, pipe: str) -> None:
        """Lets hosts that come while the ranks run, or come back, take part from the next save on.

        Args:
            events: By which the ranks are ended then.
            pipe: Opened by rank 0 at each save.
        """
        self.when_back(Growth(events, pipe, self.any_is_back).watch, "takes part from the next save on")

    def when_back(self, action: Callable[[], None], what_then: str) -> None:
        """From now on hosts may come while the ranks run, or come back; the action is done whenever one has.

        Args:
            action: Done in any thread.
            what_then: What becomes of such a host, for the console.
        """
        self._absent.when_back(action, what_then)

    def any_is_back(self) -> bool:
        """Returns whether a host has come, or come back, that could take part."""
        return bool(self._absent.names_back())

    def close(self, code: int) -> None:
        """Ends all agents.

        Args:
            code: Exit code of the run.
        """
        self._absent.close()
        for remote in list(self._remote.values()):
            remote.close()
        if self._memory is not None:
            self._memory.close()


class CrewOfHosts(Crew):
    """The places of all ranks of one start."""

    def __init__(
        self,
        hosts: Sequence[Host],
        remote: Mapping[str, RemoteHost],
        script_argv: Sequence[str],
        events: Events,
        variables: dict[str, str],
        files: str | None,
        *,
        memory: ServedMemory | None = None,
        console: int | None = 0,
    ) -> None:
        self.num_processes = sum(host.num_processes for host in hosts)
        self._remote = [remote[host.name] for host in hosts if host.name in remote]
        self._console = console
        self._script_argv = script_argv
        self._events = events
        self._files = files
        self.by_name = dict(remote)
        self._places: list[Here | tuple[RemoteHost, Mapping[str, str]]] = []
        own_settings = {name: text for name, text in inherited_variables().items() if name.startswith(PREFIX)}
        shared = {f"{PREFIX}SECRET": secrets.token_hex(32), **own_settings, **variables}
        shared[f"{PREFIX}WORLD_SIZE"] = str(self.num_processes)
        if memory is not None:
            shared |= memory.begin(shared)
        self._shared = shared
        own = {host.name: self._own_variables(host) for host in hosts}
        first, port = 0, 0
        ports: list[int] = []
        """The ports of the keepers of all hosts; 0 where a host keeps nothing."""
        try:
            for host in hosts:
                away = remote.get(host.name)
                if away is None:
                    free = free_port()
                    ports.append(0 if memory is None else memory.port)
                else:
                    count = host.num_processes + host.num_beside
                    free = away.begin(events, own[host.name], first=first, num_ranks=count, files=files)
                    ports.append(away.keeper_port)
                port = port or free
                first += host.num_processes
            first = 0
            for number, host in enumerate(hosts):
                away = remote.get(host.name)
                addresses = [address_of(each.name, host.name, remote) for each in hosts]
                found = [f"{address}:{at}" for address, at in zip(addresses, ports, strict=True)]
                keepers = " ".join([str(number), *found]) if all(ports) else ""
                here = {f"{PREFIX}STORE": f"tcp://{addresses[0]}:{port}"}
                here |= keeper_variables(keepers)
                if away is not None:
                    self._places += [(away, here)] * host.num_processes
                else:
                    self._places += [self._here(host, here, first)] * host.num_processes
                first += host.num_processes
            self._store = (hosts[0].name, port)
        except LostError as error:
            raise HostLostError("a host is lost.", why=f"{error}.", hint="farspan run --hosts without it") from None

    def _own_variables(self, host: Host) -> dict[str, str]:
        return {**self._shared, f"{PREFIX}LOCAL_WORLD_SIZE": str(host.num_processes)}

    def _here(self, host: Host, more: Mapping[str, str], first: int) -> Here:
        variables = self._own_variables(host) | dict(more) | own_threads(host.num_processes + host.num_beside)
        variables |= {"CUDA_VISIBLE_DEVICES": host.devices} if host.devices else {}
        command = find_command(self._script_argv)
        return Here(command, host.num_processes, variables, first=first, console=self._console)

    def put(self, number: int, local: int, host: Host, away: RemoteHost | None) -> None:
        """Lets a rank that stands for itself, and whose host is lost, be started on another host from now on.

        Args:
            number: Of the rank.
            local: Its number on that host.
            host: Which.
            away: The same; None for this machine.

        Raises:
            LostError: That host is lost, too.
        """
        variables, port = self._own_variables(host), 0
        if away is not None and away not in self._remote:
            count = host.num_processes + host.num_beside
            port = away.begin(self._events, variables, first=number, num_ranks=count, files=self._files)
            self._remote.append(away)
            self.by_name[host.name] = away
        if number == 0:  # those that are there already look for it where it was
            self._store = (host.name, port or free_port())
        at, port = self._store
        address = address_of(at, host.name, self.by_name)
        more = {f"{PREFIX}STORE": f"tcp://{address}:{port}", f"{PREFIX}LOCAL_RANK": str(local)}
        self._places[number] = (away, more) if away is not None else self._here(host, more, number - local)

    def start(self, number: int, log_dir: Path, more: Mapping[str, str] | None = None) -> Started:
        """Starts a rank on its host, with more variables of its own."""
        place = self._places[number]
        if isinstance(place, Here):
            return place.start(number, log_dir, more)
        away, variables = place
        has_console = number == self._console
        return away.start(number, {**variables, **(more or {})}, log_dir / f"rank{number}.log", has_console=has_console)

    def note_end(self, number: int) -> None:
        """Lets all other hosts' ranks know that one has ended."""
        for each in self._remote:
            each.note_end(number)

    def take_members(self, members: MemberService) -> None:
        """Lets it hear the ranks on other hosts."""
        for each in self._remote:
            each.members = members

    def finish(self, *, kills: bool) -> None:
        """Ends what is left on other hosts."""
        for each in self._remote:
            each.finish(kills=kills)


def address_of(host: str, viewer: str, remote: Mapping[str, RemoteHost]) -> str:
    """Returns the address at which one host of the run reaches another one, or itself.

    Args:
        host: The name of the one that is reached.
        viewer: Of the one that reaches it.
        remote: All hosts but this machine, by name.
    """
    if host in remote:
        return remote[host].address
    towards = viewer if viewer in remote else next(iter(remote), "")
    return remote[towards].own_address if towards else "127.0.0.1"


def describe_hosts(hosts: Sequence[Host]) -> str:
    """Returns which ranks are on which host, for the console."""
    first, parts = 0, list[str]()
    for host in hosts:
        last = first + host.num_processes - 1
        parts.append(f"{host.name} has rank {first}" + (f" to {last}" if last > first else ""))
        first = last + 1
    return ", ".join(parts)
