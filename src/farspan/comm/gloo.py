"""CPU tensors over torch.distributed's gloo backend: one tag for each channel."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farspan.comm.transport import TransferError
from farspan.torch_private.groups import gloo_group

__all__ = ["GlooTransport"]

_ABORT_TAG = 1 << 30
_CLOSING_S = 0.1
_NO_LIMIT = timedelta(days=10_000)


class _Transfer:
    """gloo says only to who waits that a transfer has ended: where that is asked, a thread waits."""

    __slots__ = ("error", "flat", "has_ended", "work")

    def __init__(self, work: dist.Work, flat: torch.Tensor) -> None:
        self.work: dist.Work | None = work
        self.flat: torch.Tensor | None = flat  # gloo reads or writes its memory until the transfer has ended
        self.has_ended = threading.Event()
        self.error: RuntimeError | None = None

    def is_done(self) -> bool:
        return self.has_ended.is_set()

    def wait(self, deadline_s: float) -> None:
        if not self.has_ended.wait(deadline_s):
            raise TimeoutError(f"a transfer has not ended in {deadline_s:g} s")
        if self.error is not None:
            raise TransferError(str(self.error)) from self.error

    def see_it_end(self) -> None:
        """Return when it has: `GlooTransport.abort` ends it at the latest."""
        assert self.work is not None
        try:
            self.work.wait(_NO_LIMIT)
        except RuntimeError as error:
            self.error = error
        self.work = self.flat = None
        self.has_ended.set()


class _Receiving(_Transfer):
    """A receive that no thread waits for until somebody asks whether it has ended."""

    __slots__ = ("watch",)

    def __init__(self, work: dist.Work, flat: torch.Tensor, watch: Callable[[_Transfer], None]) -> None:
        super().__init__(work, flat)
        self.watch: Callable[[_Transfer], None] | None = watch

    def is_done(self) -> bool:
        if self.watch is not None:
            self.watch(self)
            self.watch = None
        return super().is_done()

    def wait(self, deadline_s: float) -> None:
        if self.watch is None:
            super().wait(deadline_s)
            return
        assert self.work is not None
        try:
            self.work.wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise TimeoutError(str(error)) from error
            raise TransferError(str(error)) from error


class _Watcher:
    """A thread that sees transfers end, one after the other."""

    def __init__(self, name: str) -> None:
        self.transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"farspan-gloo-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (transfer := self.transfers.get()) is not None:
            transfer.see_it_end()


class GlooTransport:
    """Point-to-point transfers in a group of its own, which the program does not see.

    Args:
        store: Where the ranks find each other; of this transport alone.
        rank: Of this process.
        world_size: Number of processes.
        address: Of this host, at which the others reach it; GLOO_SOCKET_IFNAME names an interface instead.
        deadline_s: The longest wait for another rank.
    """

    name = "gloo"

    def __init__(self, store: Any, rank: int, world_size: int, address: str, deadline_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        self.group: Any = gloo_group(
            store, rank, world_size, address=address, interfaces=interfaces, timeout=timedelta(seconds=deadline_s)
        )
        self._sends = _Watcher("sends")
        self._receives: dict[tuple[int, int], _Watcher] = {}
        """Receives by source and channel, for those of which it was asked whether they have ended."""

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _Transfer:
        try:
            sending = _Transfer(self.group.send([flat], dst, channel), flat)
        except RuntimeError as error:
            raise TransferError(str(error)) from error
        self._sends.transfers.put(sending)
        return sending

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _Receiving:
        def watch(transfer: _Transfer) -> None:
            if (src, channel) not in self._receives:
                self._receives[src, channel] = _Watcher(f"receives-{src}-{channel}")
            self._receives[src, channel].transfers.put(transfer)

        try:
            return _Receiving(self.group.recv([flat], src, channel), flat, watch)
        except RuntimeError as error:
            raise TransferError(str(error)) from error

    def checks_sizes(self, src: int) -> bool:
        return False  # gloo's own thread raises, which ends the process

    def abort(self) -> None:
        """gloo has no way to interrupt a wait but a time-out, which ends all transfers of the group."""
        peer, group = (self.rank + 1) % self.world_size, self.group
        if group is None:
            return  # closed: nothing is under way
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # as wanted: this wait has timed out, or the connection was broken already

    def close(self) -> None:
        """End the group and what is under way in it: a group that outlives the interpreter aborts the process."""
        if self.group is None:
            return
        watchers = [self._sends, *self._receives.values()]
        for watcher in watchers:
            watcher.transfers.put(None)
        for watcher in watchers:
            watcher.thread.join(_CLOSING_S)
        while any(watcher.thread.is_alive() for watcher in watchers):  # what nobody sends or receives any more
            self.abort()
            for watcher in watchers:
                watcher.thread.join(_CLOSING_S)
        self.group = None
