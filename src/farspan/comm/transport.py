"""The interface of a transport: it moves flat contiguous tensors, first in first out per channel, and blocks no
sender."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

__all__ = ["DeviceWork", "Transport", "TransferError", "Work"]


class TransferError(RuntimeError):
    """A transfer that cannot end well: the other rank is gone, or it has sent something else than was agreed."""


class Work(Protocol):
    """A transfer under way."""

    def is_done(self) -> bool:
        """Returns, without waiting, whether it has ended: what was sent is not needed any more, or what was received is
        here.
        """
        ...

    def wait(self, deadline_s: float) -> None:
        """Return when the transfer has ended.

        Raises:
            TimeoutError: It has not in `deadline_s` seconds.
            TransferError: It cannot.
        """
        ...


@runtime_checkable
class DeviceWork(Protocol):
    """A transfer for which a device waits: `wait` returns at once, and the host goes on."""

    def has_begun(self) -> bool:
        """Returns whether the device has done all that was queued before the wait, and stands in it."""
        ...

    def is_done(self) -> bool:
        """Returns, without waiting, whether the transfer has ended, well or not."""
        ...


class Transport(Protocol):
    """One way of moving tensors. A channel is (source rank, destination rank, channel number)."""

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> Work: ...

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> Work: ...

    def checks_sizes(self, src: int) -> bool:
        """Returns whether a message from `src` of another size than is received ends in a TransferError, and not in
        worse."""
        ...

    def abort(self) -> None:
        """Make all transfers under way, and all later ones, fail at once. May be called from any thread."""
        ...
