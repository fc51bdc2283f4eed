"""CPU tensors over torch.distributed's gloo backend: one tag for each channel."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["GlooMedium"]

_ABORT_TAG = 99


class _GlooWork:
    __slots__ = ("flat", "work")

    def __init__(self, work: dist.Work, flat: torch.Tensor) -> None:
        self.work = work
        self.flat = flat  # gloo reads or writes its memory until the transfer has ended

    def is_done(self) -> bool:
        return self.work.is_completed()

    def wait(self, deadline_s: float) -> None:
        try:
            self.work.wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise TimeoutError(str(error)) from error
            raise


class GlooMedium:
    """Point-to-point transfers in a group of its own, so that breaking it breaks nothing else."""

    def __init__(self, rank: int, world_size: int, deadline_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> _GlooWork:
        return _GlooWork(self.group.send([flat], dst, channel), flat)

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> _GlooWork:
        return _GlooWork(self.group.recv([flat], src, channel), flat)

    def abort(self) -> None:
        """gloo has no way to interrupt a wait but a time-out, which ends all transfers of the group."""
        peer = (self.rank + 1) % self.world_size
        try:
            self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # as wanted: this wait has timed out, or the connection was broken already
