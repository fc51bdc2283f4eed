"""CUDA tensors over NCCL: a group of two ranks for each channel, because NCCL has no tags.

Not yet run on more than one GPU: NCCL refuses two ranks on one.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farspan.comm.transport import TransferError
from farspan.torch_private.groups import nccl_group

__all__ = ["NcclTransport"]

_SENDER, _RECEIVER = 0, 1
"""The ranks of a group of two."""


class _NcclWork:
    __slots__ = ("flat", "work")

    def __init__(self, work: dist.Work, flat: torch.Tensor) -> None:
        self.work = work
        self.flat = flat  # NCCL reads or writes its memory until the transfer has ended

    def is_done(self) -> bool:
        return self.work.is_completed()

    def wait(self, deadline_s: float) -> None:
        """Let the current stream wait; a transfer past the group's time-out is ended by NCCL's own watchdog."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransferError(str(error)) from error


class NcclTransport:
    """Point-to-point transfers, each channel on a communicator and stream of its own."""

    def __init__(self, store: Any, rank: int, deadline_s: float) -> None:
        self.store = store
        self.rank = rank
        self.deadline_s = deadline_s
        self.groups: dict[tuple[int, int, int], Any] = {}

    def prepare(self, channels: Iterable[tuple[int, int, int]]) -> None:
        """Make the communicators of (source, destination, channel) that are new; all ranks go through them in order."""
        for key in sorted(channels):
            src, dst, _ = key
            if key in self.groups or self.rank not in (src, dst):
                continue
            store = dist.PrefixStore("{} {} {}".format(*key), self.store)
            end = _RECEIVER if self.rank == dst else _SENDER
            self.groups[key] = nccl_group(store, end, 2, timeout=timedelta(seconds=self.deadline_s))

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _NcclWork:
        return _NcclWork(self.groups[self.rank, dst, channel].send([flat], _RECEIVER, 0), flat)

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _NcclWork:
        return _NcclWork(self.groups[src, self.rank, channel].recv([flat], _SENDER, 0), flat)

    def checks_sizes(self, src: int) -> bool:
        return False  # NCCL waits for the rest, or takes the beginning

    def abort(self) -> None:
        """End all transfers, from any thread."""
        for group in self.groups.values():
            group.abort()

    def close(self) -> None:
        """End the communicators; a peer may have gone already."""
        self.abort()
        self.groups.clear()
