"""Looks at all hosts: at each by itself, at their clocks, and at their links, in rounds of pairs that share no host."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from farspan import settings
from farspan.errors import LaunchError
from farspan.launch.doctor.answer import answer
from farspan.launch.doctor.facts import Facts, read_facts
from farspan.launch.hosts.address import own_address_towards, resolved
from farspan.launch.hosts.code import check_same, versions
from farspan.launch.hosts.connection import LostError
from farspan.launch.hosts.host import Host, is_this_machine
from farspan.launch.hosts.reach import reach
from farspan.launch.hosts.remote import RemoteHost

__all__ = ["Clock", "Examination", "Link", "examine", "rounds"]

_PAIR_S = 5.0
"""How long a pair of hosts has to connect and to measure its link."""
_NUM_CLOCKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How much later it is on a host than on the first one, and by how much that may be wrong, in seconds."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from one host to another; `error` says why nothing has been measured."""

    source: str
    destination: str
    address: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Examination:
    """All that has been found out; by the names of hosts, of those where it could be found out."""

    hosts: Sequence[Host]
    versions: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    facts: dict[str, Facts] = field(default_factory=dict[str, Facts])
    clocks: dict[str, Clock] = field(default_factory=dict[str, Clock])
    links: list[Link] = field(default_factory=list[Link])
    failures: list[LaunchError] = field(default_factory=list[LaunchError])


class _Reached:
    """A host that answers: the launcher's own, or by its agent."""

    def __init__(self, host: Host, ssh: str) -> None:
        self.host = host
        self._remote: RemoteHost | None = None
        self._lost: LaunchError | None = None
        if is_this_machine(host.name):
            self.versions = versions()
        else:
            found = reach(host, [""], ssh)
            if isinstance(found, LaunchError):
                raise found
            self._remote, self.versions = found

    @property
    def is_here(self) -> bool:
        return self._remote is None

    def ask(self, what: str, **more: object) -> dict[str, Any]:
        """Returns the answer.

        Raises:
            LaunchError: It has none, or is lost.
        """
        question = {"do": "examine", "what": what, **more}
        if self._lost is not None:
            raise self._lost
        try:
            if self._remote is None:
                return answer(question)
            return dict(self._remote.ask(question, "examined")["found"])
        except (LostError, KeyError, TypeError, ValueError, OSError) as error:
            lost = LaunchError(
                f"{self.host.name} has no answer to {what!r}.",
                why=f"{error}.",
                hint="the same version of farspan on all hosts",
            )
            if isinstance(error, LostError):  # an answer that comes late would be taken for that to another question
                self._lost = lost
            raise lost from None

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()


def examine(hosts: Sequence[Host], ssh: str) -> Examination:
    """Returns what there is to know of the hosts.

    Args:
        hosts: The first is what clocks are compared with.
        ssh: How other hosts are reached.
    """
    found = Examination(hosts=hosts)
    reached: dict[str, _Reached] = {}
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        for host, result in zip(hosts, pool.map(_look_at, hosts, repeat(ssh)), strict=True):
            if isinstance(result, LaunchError):
                found.failures.append(result)
            else:
                reached[host.name], found.facts[host.name] = result
                found.versions[host.name] = reached[host.name].versions
    try:
        _compare_clocks(found, reached)
        limit_s = min(_PAIR_S, settings.seconds("DEADLINE", default=_PAIR_S))
        found.links += _measure_all(list(reached.values()), limit_s)
    finally:
        for each in reached.values():
            each.close()
    return found


def _look_at(host: Host, ssh: str) -> tuple[_Reached, Facts] | LaunchError:
    try:
        reached = _Reached(host, ssh)
    except LaunchError as error:
        return error
    try:
        return reached, read_facts(host.name, reached.ask("facts", devices=host.devices))
    except LaunchError as error:
        reached.close()
        try:
            check_same(host, reached.versions, versions(), {})
        except LaunchError as differs:  # another farspan may not know what is asked
            return differs
        return error


def _compare_clocks(found: Examination, reached: dict[str, _Reached]) -> None:
    clocks: list[tuple[str, Clock]] = []
    for name, each in reached.items():
        try:
            clocks.append((name, _clock(each)))
        except LaunchError as error:
            found.failures.append(error)
    for name, clock in clocks:
        first = clocks[0][1]
        is_first = clock is first
        error_s = 0.0 if is_first else clock.error_s + first.error_s
        found.clocks[name] = Clock(offset_s=clock.offset_s - first.offset_s, error_s=error_s)


def _clock(host: _Reached) -> Clock:
    """Compares a host's clock with this one's, by the shortest of a few round trips."""
    if host.is_here:
        return Clock(offset_s=0.0, error_s=0.0)
    best: Clock | None = None
    for _ in range(_NUM_CLOCKS):
        wall_s, started = time.time(), time.monotonic()
        try:
            there_s = float(host.ask("clock")["time_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise LaunchError(
                f"{host.host.name} does not know the time.", why=f"{error}.", hint="the same farspan on all hosts"
            ) from None
        half_s = (time.monotonic() - started) / 2
        if best is None or half_s < best.error_s:
            best = Clock(offset_s=there_s - (wall_s + half_s), error_s=half_s)
    assert best is not None
    return best


def _measure_all(reached: Sequence[_Reached], limit_s: float) -> list[Link]:
    """Measures all pairs, in each direction, in rounds; returns them in the order of the hosts."""
    links: list[Link] = []
    with ThreadPoolExecutor(max_workers=max(1, len(reached) // 2)) as pool:
        for pairs in rounds(len(reached)):
            sources, destinations = [reached[i] for i, _ in pairs], [reached[j] for _, j in pairs]
            links += pool.map(_measure, sources, destinations, repeat(limit_s))
    names = [each.host.name for each in reached]
    return sorted(links, key=lambda link: (names.index(link.source), names.index(link.destination)))


def rounds(num_hosts: int) -> list[list[tuple[int, int]]]:
    """Returns all pairs in rounds: in each of them a host is in one pair, so that no two pairs share a host's link.

    It is the circle method of tournaments: the first host stays, the others go round.

    >>> rounds(3)
    [[(1, 2)], [(2, 1)], [(0, 2)], [(2, 0)], [(0, 1)], [(1, 0)]]
    """
    circle = list(range(num_hosts + num_hosts % 2))
    found: list[list[tuple[int, int]]] = []
    for _ in circle[1:]:
        half = len(circle) // 2
        pairs = [(one, other) for one, other in zip(circle[:half], circle[: half - 1 : -1], strict=True)]
        pairs = [pair for pair in pairs if max(pair) < num_hosts]
        found += [pairs, [(other, one) for one, other in pairs]]
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _measure(source: _Reached, destination: _Reached, limit_s: float) -> Link:
    link = Link(source=source.host.name, destination=destination.host.name)
    token = secrets.token_hex(16)
    address = ""
    try:
        address = own_address_towards(source.host.name) if destination.is_here else resolved(destination.host.name)
        port = int(destination.ask("listen", token=token, limit_s=limit_s + 1)["port"])
        found = source.ask("probe", address=address, port=port, token=token, limit_s=limit_s)
        if "error" in found:
            return replace(link, address=address, error=str(found["error"]))
        latency_s, bytes_per_s = float(found["latency_s"]), float(found["bytes_per_s"])
    except LaunchError as error:
        return replace(link, address=address, error=f"{error.what} {error.why}".rstrip("."))
    except (KeyError, TypeError, ValueError) as error:
        return replace(link, address=address, error=f"an answer that is none ({error})")
    return replace(link, address=address, latency_s=latency_s, bytes_per_s=bytes_per_s)
