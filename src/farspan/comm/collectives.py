"""Reductions and broadcasts among a few ranks, by gloo in a group that the program does not see, or by other means."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from farspan.comm.gloo import GlooTransport
from farspan.comm.transport import TransferError
from farspan.devices import is_accelerator

__all__ = ["Collectives", "GlooCollectives", "HostCollectives", "Pending"]

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Pending(Protocol):
    """A collective that is under way."""

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once."""
        ...

    def wait(self, deadline_s: float) -> None:
        """Return when its result is here.

        Raises:
            TimeoutError: It is not in time.
            TransferError: It cannot come any more.
        """
        ...


class Collectives(Protocol):
    """Operations that several ranks do together, each the same ones in the same order.

    Attributes:
        rank: Of this process in the group.
        size: Of the group.
    """

    rank: int
    size: int

    def sum(self, flat: torch.Tensor) -> Pending:
        """Begin to add up a tensor over the ranks, in place; the result has the same bits on all of them."""
        ...

    def maximum(self, flat: torch.Tensor) -> Pending:
        """Begin to find each element's largest value over the ranks, in place."""
        ...

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        """Begin to give all ranks what rank `source` has, in place."""
        ...

    def abort(self) -> None:
        """End what is under way; from any thread."""
        ...

    def close(self) -> None:
        """End the group: nothing is reduced afterwards."""
        ...


class _GlooPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def is_done(self) -> bool:
        return self._work.is_completed()

    def wait(self, deadline_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise TimeoutError(str(error)) from error
            raise TransferError(str(error)) from error


class GlooCollectives:
    """Collectives over gloo.

    Args:
        store: Where the ranks find each other; of this group alone.
        rank: Of this process in the group.
        size: Of the group.
        address: Of this host, at which the others reach it.
        deadline_s: The longest wait for another rank.
        forming_s: The longest wait for all to find each other, where that is another one.
    """

    def __init__(
        self, store: Any, rank: int, size: int, address: str, deadline_s: float, *, forming_s: float | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._deadline = None if forming_s is None else timedelta(seconds=deadline_s)
        """Of each operation, where the group has another one."""
        self._transport = GlooTransport(store, rank, size, address, deadline_s if forming_s is None else forming_s)

    def sum(self, flat: torch.Tensor) -> Pending:
        return self._reduce(flat, _SUM)

    def maximum(self, flat: torch.Tensor) -> Pending:
        return self._reduce(flat, _MAX)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        if self._deadline is not None:
            options.timeout = self._deadline
        return self._begin(lambda group: group.broadcast([flat], options))

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def _reduce(self, flat: torch.Tensor, operation: Any) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        if self._deadline is not None:
            options.timeout = self._deadline
        return self._begin(lambda group: group.allreduce([flat], options))

    def _begin(self, call: Any) -> Pending:
        try:
            return _GlooPending(call(self._transport.group))
        except RuntimeError as error:
            raise TransferError(str(error)) from error


class HostCollectives:
    """Collectives over others that know the host's memory alone: what is on a device goes through a copy there.

    Args:
        inner: What knows it.
    """

    def __init__(self, inner: Collectives) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner

    def sum(self, flat: torch.Tensor) -> Pending:
        return _through_host(flat, self._inner.sum)

    def maximum(self, flat: torch.Tensor) -> Pending:
        return _through_host(flat, self._inner.maximum)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return _through_host(flat, lambda copy: self._inner.broadcast(copy, source))

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


class _CopyPending:
    """A collective of a copy, from which the result goes back when somebody waits for it."""

    def __init__(self, work: Pending, copy: torch.Tensor, flat: torch.Tensor) -> None:
        self._work = work
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = copy, flat

    def is_done(self) -> bool:
        return self._work.is_done()

    def wait(self, deadline_s: float) -> None:
        self._work.wait(deadline_s)
        ends, self._ends = self._ends, None
        if ends is not None:
            with torch.no_grad():
                ends[1].copy_(ends[0])


def _through_host(flat: torch.Tensor, begin: Callable[[torch.Tensor], Pending]) -> Pending:
    if not is_accelerator(flat.device):
        return begin(flat)
    copy = flat.detach().cpu()
    return _CopyPending(begin(copy), copy, flat)
