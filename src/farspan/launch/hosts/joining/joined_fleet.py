"""The first host, as it listens for the others and takes them in."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from farspan import settings
from farspan.errors import FarspanError, LaunchError, quoted
from farspan.launch.hosts.code import check_same, code_of, versions
from farspan.launch.hosts.connection import LostError
from farspan.launch.hosts.fleet import Fleet
from farspan.launch.hosts.host import Host
from farspan.launch.hosts.joining.proof import prove
from farspan.launch.hosts.remote import RemoteHost
from farspan.launch.tcp.listening import listen_everywhere
from farspan.launch.terminal import say
from farspan.units import count_of

__all__ = ["JoinedFleet"]

_SILENCE_S = 10.0
_MOST_PROCESSES = 4096
_LAST_CALL_S = 10.0
"""How long enough hosts wait for further ones, after the last one has come."""


class JoinedFleet(Fleet):
    """This host, and those that connect to it.

    Args:
        own: This host.
        script_argv: What each rank runs.
        port: Where it listens.
        fewest: With how many hosts the run starts, and goes on.
        most: How many there are at most.
    """

    def __init__(self, own: Host, script_argv: Sequence[str], *, port: int, fewest: int, most: int) -> None:
        super().__init__([own], script_argv, ssh="", fewest=fewest)
        self._most = most
        self._own = own
        self._arrivals: queue.SimpleQueue[tuple[int, RemoteHost]] = queue.SimpleQueue()
        self._waiting: list[RemoteHost] = []
        """The hosts that have come and do not take part yet."""
        self._on_arrival: Callable[[], None] | None = None
        self._order: dict[str, int] = {}
        self._listener = _listen(port)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def most(self) -> int:
        """Returns how many hosts there may be."""
        return self._most

    def gather(self, is_enough: Callable[[Sequence[Host]], bool] = bool) -> None:
        """Waits for hosts: before the first start for all that there may be, or for a while once there are enough.

        Args:
            is_enough: Whether these hosts have slots enough, where not all have come.

        Raises:
            LaunchError: Too few have come in time.
        """
        self._forget_lost()
        until = time.monotonic() + settings.seconds("DEADLINE", default=300.0)
        while len(self.hosts) < self.most:
            are_enough = len(self.hosts) >= self.fewest and is_enough(self.hosts)
            # A later start takes the hosts that are there: one that was lost may never come back.
            last_call_s = 0.0 if self._has_begun else _LAST_CALL_S
            limit_s = last_call_s if are_enough else max(0.0, until - time.monotonic())
            try:
                order, remote = self._arrivals.get(timeout=limit_s)
            except queue.Empty:
                if len(self.hosts) >= self.fewest:  # where they have too few slots, who lays roles over them says so
                    break
                raise LaunchError(
                    f"{len(self.hosts)} of at least {self.fewest} hosts have come.",
                    why="the others have not connected in time (FARSPAN_DEADLINE).",
                    hint=f"farspan run -n 4 --join {socket.gethostname()}:{self._listener.getsockname()[1]} train.py",
                ) from None
            self._take_in(order, remote)
        self._forget_lost()
        self._present, self._has_begun = self.hosts, True

    def when_back(self, action: Callable[[], None], what_then: str) -> None:
        """From now on the action is done whenever a host has come while the ranks run, as long as there is room."""
        self._on_arrival = action
        action()  # for those that came before

    def any_is_back(self) -> bool:
        """Returns whether a host has come that could take part."""
        waiting = [remote for remote in self._waiting if not remote.is_lost]
        num_there = 1 + sum(not remote.is_lost for remote in self._remote.values())
        return bool(waiting) and num_there < self.most

    def take_back(self) -> None:
        """Takes the hosts that have come, as long as there is room."""
        self._forget_lost()
        while len(self.hosts) < self.most:
            try:
                self._take_in(*self._arrivals.get_nowait())
            except queue.Empty:
                break
        self._forget_lost()
        self._present = self.hosts

    def close(self, code: int) -> None:
        """Lets all hosts know that it is over."""
        for remote in list(self._remote.values()):
            remote.say_over(code, "")
        self._listener.close()
        super().close(code)

    def _take_in(self, order: int, remote: RemoteHost) -> None:
        """Takes in a host that has come."""
        name = remote.host.name
        self._waiting.remove(remote)
        self._remote[name], self._order[name] = remote, order
        others = [each.host for each in self._remote.values()]
        self.hosts = [self._own, *sorted(others, key=lambda host: self._order[host.name])]

    def _forget_lost(self) -> None:
        for name in [name for name, remote in self._remote.items() if remote.is_lost]:
            self._remote.pop(name).close()
        self.hosts = [host for host in self.hosts if host is self._own or host.name in self._remote]

    def _accept(self) -> None:
        num_come = 0
        while True:
            try:
                link, address = self._listener.accept()
            except OSError:  # it is over
                return
            num_come += 1
            threading.Thread(
                target=self._let_in, args=(link, address[0].removeprefix("::ffff:"), num_come), daemon=True
            ).start()

    def _let_in(self, link: socket.socket, address: str, number: int) -> None:
        try:
            connection = prove(link, "launcher", silence_s=_SILENCE_S)
        except (LostError, OSError) as error:
            say(f"farspan run: who came from {address} is not let in: {error}")
            return
        try:
            hello = connection.receive()
            count, order = hello["num_processes"], hello["node_rank"]
            if type(count) is not int or not 1 <= count <= _MOST_PROCESSES or type(order) not in (int, type(None)):
                raise LostError(f"it says {quoted(hello)}")
            host = Host(name=f"{hello['name']}({address})-{number}", num_processes=count)
        except (LostError, KeyError) as error:
            say(f"farspan run: who came from {address} is not let in: {error}")
            connection.close()  # not the socket: its number could be another file's while the connection still sends
            return
        own_address, knows_secret = link.getsockname()[0], bool(settings.text("SECRET"))
        remote = RemoteHost(host, connection, own_address=own_address, address=address, knows_secret=knows_secret)
        say(f"farspan run: {host.name} has come, with {count_of(count, 'process')}")
        if self._has_same_program(remote):
            self._waiting.append(remote)
            self._arrivals.put((number if order is None else order, remote))
            if self._on_arrival is not None:
                self._on_arrival()

    def _has_same_program(self, remote: RemoteHost) -> bool:
        """Returns whether a host has the program of this one; else its connection is closed."""
        try:
            has = remote.ask({"do": "check"}, "checked")["has"]
            theirs = {str(key): str(text) for key, text in has.items()}
            check_same(remote.host, theirs, versions(), code_of(self.script_argv))
        except (LostError, FarspanError) as error:
            say(f"farspan run: {remote.host.name} does not take part: {error}")
            remote.say_over(2, str(error))
            remote.close()
            return False
        return True


def _listen(port: int) -> socket.socket:
    try:
        return listen_everywhere(port)
    except OSError as error:
        raise LaunchError(
            f"this host cannot listen at port {port}.", why=f"{error.strerror}.", hint="--join HOST:29401, on all hosts"
        ) from None
