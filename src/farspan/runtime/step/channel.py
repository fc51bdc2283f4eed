"""Bundles of tensors over media: one channel per (source, destination, direction), first in first out.

Sender and receiver agree on every byte beforehand: sizes from the metadata, order from the program, strides from the
metadata where they are dense (else contiguous). Small tensors of a bundle travel in one message, large ones alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from farspan.errors import DeadlineError
from farspan.graph import Meta
from farspan.runtime.media import Medium, Roads, Work
from farspan.runtime.step.program import Bundle

__all__ = ["Channels"]

_ALONE_BYTES = 64 * 1024
_ALIGNMENT = 16
_HOST = torch.device("cpu")


class Channels:
    """One rank's sends and receives."""

    def __init__(self, medium: Medium | None, rank: int, deadline_s: float) -> None:
        self.medium = medium
        self.rank = rank
        self.deadline_s = deadline_s
        self.sending: deque[Work] = deque()
        self.allocate: Callable[..., torch.Tensor] = torch.empty
        """Makes receive buffers; tests count them here."""

    def prepare(self, gpu_channels: Collection[tuple[int, int, int]]) -> None:
        """Make what the GPU channels of a step need; all ranks call it with the same channels."""
        if isinstance(self.medium, Roads):
            self.medium.prepare(gpu_channels)

    def post(self, bundle: Bundle, metas: Sequence[Meta], device: torch.device) -> None:
        """Begin to receive `bundle`."""
        assert self.medium is not None
        packed, alone = _split(metas)
        device = device if bundle.is_between_gpus else _HOST
        bundle.tensors = [None] * len(metas)
        if packed:
            buffer = self.allocate(_packed_size(metas, packed), dtype=torch.uint8, device=device)
            bundle.works.append(self.medium.receive(buffer, bundle.src, int(bundle.is_gradient)))
            for number, offset in zip(packed, _offsets(metas, packed), strict=True):
                flat = buffer[offset : offset + _size(metas[number])].view(metas[number].dtype)
                bundle.tensors[number] = _shaped(flat, metas[number])
        for number in alone:
            flat = self.allocate(metas[number].numel, dtype=metas[number].dtype, device=device)
            bundle.works.append(self.medium.receive(flat, bundle.src, int(bundle.is_gradient)))
            bundle.tensors[number] = _shaped(flat, metas[number])

    def wait(self, bundle: Bundle, waiting: Callable[[], str]) -> None:
        """Return when `bundle` has arrived.

        Raises:
            DeadlineError: It did not arrive in time; `waiting()` says who waits, at which task.
        """
        for work in bundle.works:
            try:
                work.wait(self.deadline_s)
            except TimeoutError as error:
                raise DeadlineError(
                    f"{waiting()} waited {self.deadline_s:g} s for {bundle.describe()} from rank {bundle.src}.",
                    why=f"rank {bundle.src} did not send it: it is stopped, very slow, or cannot be reached.",
                    hint="look at that rank's log; FARSPAN_DEADLINE=seconds allows longer waits",
                ) from error
        bundle.works.clear()

    def send(self, bundle: Bundle, tensors: Sequence[torch.Tensor], metas: Sequence[Meta]) -> None:
        """Begin to send; `tensors` must not be written to any more."""
        assert self.medium is not None
        channel = int(bundle.is_gradient)
        if not bundle.is_between_gpus:
            tensors = [tensor.to(_HOST) for tensor in tensors]
        packed, alone = _split(metas)
        if packed:
            buffer = torch.empty(_packed_size(metas, packed), dtype=torch.uint8, device=tensors[packed[0]].device)
            for number, offset in zip(packed, _offsets(metas, packed), strict=True):
                flat = buffer[offset : offset + _size(metas[number])].view(metas[number].dtype)
                _shaped(flat, metas[number]).copy_(tensors[number])
            self.sending.append(self.medium.send(buffer, bundle.dst, channel))
        for number in alone:
            self.sending.append(self.medium.send(_flattened(tensors[number], metas[number]), bundle.dst, channel))
        self.reap()

    def reap(self) -> None:
        """Let go of what has been sent."""
        while self.sending and self.sending[0].is_done():
            self.sending.popleft()

    def drain(self) -> None:
        """Wait until all has been sent."""
        end = time.monotonic() + self.deadline_s
        while self.sending:
            self.sending.popleft().wait(max(0.001, end - time.monotonic()))


def _size(meta: Meta) -> int:
    return meta.numel * meta.dtype.itemsize


def _split(metas: Sequence[Meta]) -> tuple[list[int], list[int]]:
    """Which tensors travel together, and which alone. Empty ones do not travel."""
    sizes = [_size(meta) for meta in metas]
    small = [number for number, size in enumerate(sizes) if size <= _ALONE_BYTES]
    if len(small) == 1 and sizes[small[0]]:
        small = []
    return small, [number for number in range(len(metas)) if number not in set(small)]


def _offsets(metas: Sequence[Meta], packed: Sequence[int]) -> list[int]:
    offsets: list[int] = []
    end = 0
    for number in packed:
        offsets.append(end)
        end += -(-_size(metas[number]) // _ALIGNMENT) * _ALIGNMENT
    return offsets


def _packed_size(metas: Sequence[Meta], packed: Sequence[int]) -> int:
    return _offsets(metas, packed)[-1] + _size(metas[packed[-1]])


def _layout(meta: Meta) -> tuple[int, ...]:
    """The strides a tensor has on the wire: its own if it is dense, else contiguous."""
    expected = 1
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=False)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(meta.shape, device="meta").stride()
        expected *= size
    return meta.stride


def _shaped(flat: torch.Tensor, meta: Meta) -> torch.Tensor:
    return flat.as_strided(meta.shape, _layout(meta))


def _flattened(tensor: torch.Tensor, meta: Meta) -> torch.Tensor:
    layout = _layout(meta)
    if tensor.stride() != layout or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty_strided(meta.shape, layout, dtype=meta.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((meta.numel,), (1,))
