"""Hosts of a list that do not answer: each is tried again while the ranks run, until it does.

lost --5 s--> tried --10 s--> tried --20 s--> ... each minute --answers--> has come back --> taken by the next start
  ^                                                                            |
  +------------------------------- lost again ---------------------------------+
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from farspan.errors import LaunchError
from farspan.launch.hosts.host import Host
from farspan.launch.hosts.remote import RemoteHost
from farspan.launch.terminal import say

__all__ = ["Absent"]

_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 60.0


class Absent:
    """The hosts that are not there, and those of them that have come back and are not taken yet.

    Args:
        attempt: Tries a host once, at the first time or again; raises a LaunchError where it answers, and cannot take
            part.
    """

    def __init__(self, attempt: Callable[[Host, bool], RemoteHost | LaunchError]) -> None:
        self._attempt = attempt
        self._on_return: Callable[[], None] | None = None
        self._what_then = ""
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        """By host: who tries it has its lock, so that it has one agent."""
        self._back: dict[str, RemoteHost] = {}
        self._stops: dict[str, threading.Event] = {}
        """By host, what ends the thread that tries it again."""
        self._is_over = False

    def when_back(self, action: Callable[[], None], what_then: str) -> None:
        """From now on hosts may be tried again; the action is done whenever one has come back.

        Args:
            action: Done in any thread.
            what_then: What becomes of a host that has come back, for the console.
        """
        self._on_return, self._what_then = action, what_then

    def names_back(self) -> set[str]:
        """Returns the names of the hosts that wait to be taken."""
        with self._lock:
            return {name for name, remote in self._back.items() if not remote.is_lost}

    def call(self, host: Host) -> RemoteHost | LaunchError:
        """Returns a host that has come back, or else tries it now.

        Raises:
            LaunchError: It answers, and cannot take part.
        """
        with self._lock:
            turn = self._turns.setdefault(host.name, threading.Lock())
            stop = self._stops.pop(host.name, None)
        if stop is not None:
            stop.set()
        with turn:  # not before an attempt that is under way has ended
            with self._lock:
                remote = self._back.pop(host.name, None)
            return remote if remote is not None and not remote.is_lost else self._attempt(host, False)

    def try_again(self, hosts: Sequence[Host]) -> bool:
        """Tries these hosts again, after pauses that grow; returns whether hosts are tried again in this run."""
        with self._lock:
            if self._is_over or self._on_return is None:
                return False
            for host in hosts:
                if host.name not in self._stops:
                    stop = self._stops[host.name] = threading.Event()
                    name = f"farspan-absent-{host.name}"
                    threading.Thread(target=self._keep_trying, args=(host, stop), name=name, daemon=True).start()
        return True

    def close(self) -> None:
        """Tries no host any more, and hangs up where one has come back."""
        with self._lock:
            self._is_over = True
            stops, back = list(self._stops.values()), list(self._back.values())
        for stop in stops:
            stop.set()
        for remote in back:
            remote.close()

    def _keep_trying(self, host: Host, stop: threading.Event) -> None:
        pause_s, refusal = _FIRST_PAUSE_S, ""
        with self._lock:
            turn = self._turns.setdefault(host.name, threading.Lock())
        while not stop.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with turn:
                if stop.is_set():
                    return
                try:
                    found = self._attempt(host, True)
                except LaunchError as error:  # it answers, and has another program or no such folder
                    if str(error) != refusal:
                        say(f"farspan run: {host.name} answers again, and does not take part yet: {error}")
                    refusal = str(error)
                    continue
                if isinstance(found, RemoteHost) and not self._put(host, found, stop):
                    found.close()
                    return
            if isinstance(found, RemoteHost):
                self._let_know(host, found, is_taken=stop.is_set())
                return

    def _let_know(self, host: Host, found: RemoteHost, *, is_taken: bool) -> None:
        if not is_taken:
            say(f"farspan run: {host.name} answers again, and {self._what_then}")
        found.when_lost(lambda: self._lose(host, found))
        if self._on_return is not None:
            self._on_return()

    def _put(self, host: Host, found: RemoteHost, stop: threading.Event) -> bool:
        """Lets a host that answers be taken; returns whether the run goes on."""
        with self._lock:
            if self._is_over:
                return False
            self._back[host.name] = found
            if self._stops.get(host.name) is stop:  # else it is taken now
                del self._stops[host.name]
        return True

    def _lose(self, host: Host, found: RemoteHost) -> None:
        """Tries a host again that is lost before it was taken."""
        with self._lock:
            if self._is_over or self._back.get(host.name) is not found:
                return
            del self._back[host.name]
        say(f"farspan run: {host.name} is lost again before it took part; it is tried again")
        self.try_again([host])
