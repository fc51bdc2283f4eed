"""Chooses a tensor's transport: NCCL between GPUs, memory to memory on one host, else gloo or MPI."""

from __future__ import annotations

from typing import Protocol

from farspan.comm.nccl import NcclTransport
from farspan.comm.same_host.copies import SameHostTransport
from farspan.comm.transport import Transport
from farspan.program.program import Channel

__all__ = ["Router", "Carrier", "HostTransport"]


class HostTransport(Transport, Protocol):
    """What reaches every rank, from memory to memory.

    Attributes:
        name: For people.
    """

    @property
    def name(self) -> str: ...

    def close(self) -> None:
        """Free what outlives no interpreter; nothing is sent afterwards."""
        ...


class Router:
    """A transport made of several: which one is decided by the two ends and their devices, so both decide alike."""

    def __init__(
        self, host: HostTransport, device: NcclTransport | None, near: SameHostTransport | None = None
    ) -> None:
        self.host = host
        self.device = device
        self.near = near

    def open(self, channel: Channel, deadline_s: float) -> None:
        """Connect the two devices at the ends of a channel by NCCL; see `NcclTransport.open`."""
        assert self.device is not None, "both ends have told that they have NCCL"
        self.device.open(channel, deadline_s)

    def transport_to(self, peer: int, *, is_between_gpus: bool) -> Transport:
        """Returns what carries the tensors of a channel to a rank, or from it."""
        if is_between_gpus and self.device is not None:
            return self.device
        if self.near is not None and self.near.reaches(peer):
            return self.near
        return self.host

    def wait_ended(self, rank: int, deadline_s: float) -> None:
        """Return when the process of a rank has ended, if this one can see it, or after the deadline."""
        if self.near is not None:
            self.near.wait_ended(rank, deadline_s)

    def abort(self) -> None:
        for transport in (self.host, self.device, self.near):
            if transport is not None:
                transport.abort()

    def resume(self) -> None:
        """Let the ranks of this host go on whose processes are stopped."""
        if self.near is not None:
            self.near.resume()

    def close(self) -> None:
        """Free what outlives no interpreter; nothing is sent afterwards."""
        for transport in (self.near, self.host, self.device):
            if transport is not None:
                transport.close()

    def describe(self, rank: int, num_ranks: int) -> str:
        """Returns for each other rank how tensors in memory go there."""
        others = [other for other in range(num_ranks) if other != rank]
        return ", ".join(f"rank {other}: {self._name(other)}" for other in others)

    def _name(self, peer: int) -> str:
        return "memory to memory" if self.near is not None and self.near.reaches(peer) else self.host.name


Carrier = Transport | Router
"""What a rank sends with."""
