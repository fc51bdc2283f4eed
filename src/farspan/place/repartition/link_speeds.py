"""Measures the links between hosts: the first rank of each host sends to that of the next one, and gets an answer.

    first turn     host 0 -> host 1     host 2 -> host 3
    second turn    host 1 -> host 2     host 3 -> host 4

Messages take the transport that the model's data take.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence

import torch

from farspan.comm.transport import DeviceWork, Work
from farspan.devices import CPU
from farspan.errors import DeadlineError
from farspan.execute.engine import Engine
from farspan.execute.teams import own_device
from farspan.plan import Worker, are_direct
from farspan.profile import HostLink
from farspan.program.program import Channel

__all__ = ["links_of_hosts"]

_SMALL_BYTES, _NUM_SMALL = 1 << 10, 5
_LARGE_BYTES, _NUM_LARGE = 4 << 20, 3
_CHANNEL = 1 << 20
"""Apart from those of messages."""


def links_of_hosts(engine: Engine, hosts: Sequence[str]) -> dict[str, HostLink]:
    """Measures by host the slower one of its links to the host before and the host after it; all ranks call it, between
    steps.

    Args:
        engine: This rank's.
        hosts: Of each rank.

    Returns:
        Empty where there is one host only.

    Raises:
        DeadlineError: A message did not come in time.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(itertools.pairwise(firsts))
    if not pairs:
        return {}
    channels = [_between(engine, *ends) for pair in pairs for ends in (pair, pair[::-1])]
    engine.channels.open([channel for channel in channels if channel.is_between_gpus])
    own: HostLink | None = None
    for turn in (0, 1):
        engine.agreement.barrier("links are timed")
        for caller, called in pairs[turn::2]:
            if engine.rank == caller:
                own = _link_to(called, engine)
            elif engine.rank == called:
                _answer(caller, engine)
    blob = b"" if own is None else json.dumps([own.bytes_per_s, own.latency_s]).encode()
    blobs = engine.agreement.gather("links between hosts", blob)
    found: dict[str, HostLink] = {}
    for caller, called in pairs:
        bytes_per_s, latency_s = json.loads(blobs[caller])
        link = HostLink(bytes_per_s=bytes_per_s, latency_s=latency_s)
        for host in (hosts[caller], hosts[called]):
            found[host] = link.slower_of(found.get(host, link))
    return found


def _between(engine: Engine, src: int, dst: int) -> Channel:
    """Returns the channel for messages from one rank to another."""
    source, target = [Worker(rank, own_device(rank, engine.devices)) for rank in (src, dst)]
    return Channel(source, target, _CHANNEL, are_direct(source, target, engine.devices))


def _link_to(rank: int, engine: Engine) -> HostLink:
    small = min(_call(rank, _SMALL_BYTES, engine) for _ in range(_NUM_SMALL))
    large = min(_call(rank, _LARGE_BYTES, engine) for _ in range(_NUM_LARGE))
    return HostLink(bytes_per_s=_LARGE_BYTES / max(large - small, 1e-9), latency_s=small / 2)


def _call(rank: int, size_bytes: int, engine: Engine) -> float:
    """Seconds until the answer to a message of that size is here."""
    channel = _between(engine, engine.rank, rank)
    transport = engine.channels.transport_to(rank, is_between_gpus=channel.is_between_gpus)
    device = channel.source.device if channel.is_between_gpus else CPU
    message = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    answer = torch.empty(1, dtype=torch.uint8, device=device)
    coming = transport.receive(answer, rank, _CHANNEL)
    began = time.perf_counter()
    going = transport.send(message, rank, _CHANNEL)
    _wait(coming, "the answer", rank, engine)
    answer.item()  # on a GPU it is there only now
    seconds = time.perf_counter() - began
    _wait(going, "the end of a message", rank, engine)
    return seconds


def _answer(rank: int, engine: Engine) -> None:
    """The other end of `_link_to`."""
    channel = _between(engine, engine.rank, rank)
    transport = engine.channels.transport_to(rank, is_between_gpus=channel.is_between_gpus)
    device = channel.source.device if channel.is_between_gpus else CPU
    for size_bytes in [_SMALL_BYTES] * _NUM_SMALL + [_LARGE_BYTES] * _NUM_LARGE:
        message = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        _wait(transport.receive(message, rank, _CHANNEL), "a message", rank, engine)
        _wait(transport.send(message[-1:], rank, _CHANNEL), "the end of an answer", rank, engine)


def _wait(work: Work, what: str, rank: int, engine: Engine) -> None:
    late = DeadlineError(
        f"rank {engine.rank}, timing links between hosts, waited {engine.deadline_s:g} s for {what}.",
        why=f"rank {rank} is stopped, very slow, or cannot be reached.",
        hint="look at that rank's log; FARSPAN_DEADLINE=seconds allows longer waits",
    )
    try:
        work.wait(engine.deadline_s)
    except TimeoutError as error:
        raise late from error
    if isinstance(work, DeviceWork):
        engine.channels.device_waits.add(work, lambda: late)
