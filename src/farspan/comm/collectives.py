"""Reductions and broadcasts among a few ranks, by gloo in a group that the program does not see, or by other means."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from farspan.comm.gloo import GlooTransport
from farspan.comm.transport import TransferError

__all__ = ["Collectives", "GlooCollectives", "Pending"]

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
