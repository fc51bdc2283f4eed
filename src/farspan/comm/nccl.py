"""CUDA tensors over NCCL: a group of two ranks for each channel, because NCCL has no tags.

A group made by its first transfer blocks the host until the other end comes to that transfer too. Where receives are
posted ahead, that is a circle in the first step:

    rank 0    posts the receive of B0's gradient       waits for rank 1 to send it
    rank 1    posts the receive of F0's activations    waits for rank 0 to send them, which comes after that post

So all channels of a step are opened before its first message, in one order on all ranks, and something goes through
each of them: NCCL connects two GPUs at their first transfer, not when the group is made. From then on no call blocks
the host. A transfer is waited for by the device: `DeviceWaits` looks after the deadline.

Not yet run on more than one GPU: NCCL refuses two ranks on one.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farspan.comm.transport import TransferError
from farspan.devices import device_types, wait_for_current_stream
from farspan.program.program import Channel
from farspan.torch_private.groups import nccl_group

__all__ = ["NcclTransport", "has_nccl"]

_SENDER, _RECEIVER = 0, 1
"""The ranks of a group of two."""
_NO_LIMIT = timedelta(days=10_000)
"""NCCL's own limit ends the process, and counts from when a receive is posted, not from when its data are wanted."""


def has_nccl() -> bool:
    """Returns whether tensors can go from an accelerator of this process to another one by NCCL."""
    backends = dist.Backend.default_device_backend_map
    return any(backends.get(kind) == "nccl" for kind in device_types()) and dist.is_nccl_available()


class _NcclWork:
    __slots__ = ("began", "flat", "work")

    def __init__(self, work: dist.Work, flat: torch.Tensor) -> None:
        self.work = work
        self.flat: torch.Tensor | None = flat  # NCCL reads or writes its memory until the transfer has ended
        self.began: torch.Event | None = None

    def is_done(self) -> bool:
        return self.work.is_completed()

    def wait(self, deadline_s: float) -> None:
        """Let the current stream of the tensor's device wait, and not the host."""
        assert self.flat is not None
        with torch.accelerator.device_index(self.flat.device.index):
            self.began = torch.Event(self.flat.device)
            self.began.record()
            try:
                self.work.wait()
            except RuntimeError as error:
                raise TransferError(str(error)) from error
        self.flat = None  # whoever takes it from here on does so on that stream

    def has_begun(self) -> bool:
        """Returns whether the device has come to the wait, and computes nothing until the transfer has ended."""
        return self.began is not None and self.began.query()


class NcclTransport:
    """Point-to-point transfers, each channel on a communicator and stream of its own."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.groups: dict[tuple[int, int, int], Any] = {}
        """Process groups by source, destination and number of the channel."""

    def open(self, channel: Channel, deadline_s: float) -> None:
        """Make the communicator of a channel of which this rank is an end, and send something through it.

        Both ends call this, each end for all its channels in the same order as all others: the first channel that is
        not open yet is then the next one of both its ends, so no two wait for each other's next.

        Raises:
            TimeoutError: The other end has not come.
            TransferError: There is no way between the two.
        """
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                self._connect(channel)
            except BaseException as error:
                errors.append(error)

        # NCCL blocks without a limit, so another thread does that, which a late peer may keep for ever.
        thread = threading.Thread(target=connect, name="farspan-nccl-open", daemon=True)
        thread.start()
        thread.join(deadline_s)
        if errors:
            raise TransferError(str(errors[0])) from errors[0]
        if thread.is_alive():
            raise TimeoutError(f"a communicator was not made in {deadline_s:g} s")

    def _connect(self, channel: Channel) -> None:
        src, dst, number = channel.source.rank, channel.target.rank, channel.number
        own = channel.target if self.rank == dst else channel.source
        store = dist.PrefixStore(f"{src} {dst} {number}", self.store)
        with torch.accelerator.device_index(torch.device(own.device).index):
            group = nccl_group(store, _RECEIVER if self.rank == dst else _SENDER, 2, timeout=_NO_LIMIT)
            self.groups[src, dst, number] = group
            first = torch.zeros(1, dtype=torch.uint8, device=own.device)
            work = group.recv([first], _SENDER, 0) if self.rank == dst else group.send([first], _RECEIVER, 0)
            work.wait()
            wait_for_current_stream()

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _NcclWork:
        with torch.accelerator.device_index(flat.device.index):
            return _NcclWork(self.groups[self.rank, dst, channel].send([flat], _RECEIVER, 0), flat)

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _NcclWork:
        with torch.accelerator.device_index(flat.device.index):
            return _NcclWork(self.groups[src, self.rank, channel].recv([flat], _SENDER, 0), flat)

    def checks_sizes(self, src: int) -> bool:
        return False  # NCCL waits for the rest, or takes the beginning

    def abort(self) -> None:
        """End all transfers, from any thread."""
        for group in list(self.groups.values()):
            group.abort()

    def close(self) -> None:
        """End the communicators; a peer may have gone already."""
        self.abort()
        self.groups.clear()
