"""Which road a tensor takes: NCCL between GPUs of different ranks, else through the hosts' memory over gloo."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from farspan.runtime.media.medium import Medium, Work
from farspan.runtime.media.nccl import NcclMedium

__all__ = ["Roads"]


class Roads:
    """A medium made of two: which one is decided by the devices at both ends, so both ends decide alike."""

    def __init__(self, host: Medium, device: NcclMedium | None) -> None:
        self.host = host
        self.device = device

    def prepare(self, channels: Iterable[tuple[int, int, int]]) -> None:
        if self.device is not None:
            self.device.prepare(channels)

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> Work:
        return self._road(flat).send(flat, dst, channel)

    def receive(self, flat: torch.Tensor, src: int, channel: int) -> Work:
        return self._road(flat).receive(flat, src, channel)

    def abort(self) -> None:
        self.host.abort()
        if self.device is not None:
            self.device.abort()

    def _road(self, flat: torch.Tensor) -> Medium:
        return self.device if flat.is_cuda and self.device is not None else self.host
