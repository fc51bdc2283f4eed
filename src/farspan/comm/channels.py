"""Messages over the transports: one channel per (source, destination, direction), first in first out.

Sender and receiver agree on every byte beforehand: sizes from the metadata, order from the program. Small tensors of a
message travel in one transfer, large ones alone. That transfer begins with the strides of them all: what a kernel adds
up in which order depends on strides, and those a run on fakes foretells are not always those of the real run.
Between GPUs the foretold strides are used, since the receiver's program does not wait for the data there.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

import torch

from farspan.comm.device_waits import DeviceWaits
from farspan.comm.router import Carrier, Router
from farspan.comm.transport import Transport, Work
from farspan.control.channel import SideChannel
from farspan.errors import DeadlineError, FarspanError
from farspan.graph import Meta
from farspan.program.program import Channel, Message

__all__ = ["Channels"]

_ALONE_BYTES = 64 * 1024
_ALIGNMENT = 16
_HOST = torch.device("cpu")
_PERIOD_S = 100e-6


class Channels:
    """One rank's sends and receives.

    Args:
        transport: What carries them; None where there is one rank.
        rank: Of this process.
        deadline_s: The longest wait.
        side: Knows where the program of a late rank is, and gets to know of every wait.
    """

    def __init__(self, transport: Carrier | None, rank: int, deadline_s: float, side: SideChannel) -> None:
        self._transport = transport
        self._ways: dict[tuple[int, bool], Transport] = {}
        """What carries tensors to a rank or from it, in memory or between GPUs; the router is asked once."""
        self.side = side
        self.rank = rank
        self.deadline_s = deadline_s
        self._checks_sizes: bool | None = None
        self.agree: Callable[[], None] | None = None
        """Returns once all ranks have begun the step with one program; None where that is so."""
        self.sending: deque[Work] = deque()
        self.device_waits = DeviceWaits(deadline_s, self._device_is_late)
        self._open: dict[tuple[int, int, int], Channel] = {}
        """The channels between GPUs, by source, destination and number."""
        self.allocate: Callable[..., torch.Tensor] = torch.empty
        """Makes receive buffers; tests count them here."""

    def open(self, channels: Collection[Channel]) -> None:
        """Open those channels between GPUs that are new; all ranks call it with the same, before a step's messages.

        Raises:
            DeadlineError: Another rank did not come in time.
        """
        known = {(channel.source.rank, channel.target.rank, channel.number): channel for channel in channels}
        new = [channel for key, channel in sorted(known.items(), key=itemgetter(0)) if self._open.get(key) != channel]
        self._open.update(known)
        if not new or not isinstance(self._transport, Router):
            return
        self._agree()  # a rank that fails, or differs, would not come
        for channel in [channel for channel in new if self.rank in (channel.source.rank, channel.target.rank)]:
            peer = channel.source.rank if self.rank == channel.target.rank else channel.target.rank
            name = f"a channel of {'gradients' if channel.is_gradient else 'activations'}"
            with self.side.waits.until(lambda name=name: f"to open {name}", {"rank": peer}):
                try:
                    self._transport.open(channel, self.deadline_s)
                except TimeoutError as error:
                    raise self._late(f"rank {self.rank}, before the first task,", name, peer) from error

    def post(self, message: Message, metas: Sequence[Meta], device: torch.device) -> None:
        """Begin to receive `message`."""
        transport = self.transport_to(message.src, is_between_gpus=message.is_between_gpus)
        if self.agree is not None and not transport.checks_sizes(message.src):
            self._agree()
        parts = _Parts(metas, has_strides=not message.is_between_gpus)
        device = device if message.is_between_gpus else _HOST
        message.tensors = [None] * len(metas)
        if parts.packed_size:
            allocate = self.allocate if parts.packed else torch.empty
            buffer = allocate(parts.packed_size, dtype=torch.uint8, device=device)
            message.works.append(transport.receive(buffer, message.src, message.channel.number))
            message.strides = buffer[: parts.strides_size]
            for number, offset in parts.packed.items():
                message.tensors[number] = buffer[offset : offset + metas[number].size_bytes].view(metas[number].dtype)
        for number in parts.alone:
            flat = self.allocate(metas[number].numel, dtype=metas[number].dtype, device=device)
            message.works.append(transport.receive(flat, message.src, message.channel.number))
            message.tensors[number] = flat

    def wait(self, message: Message, metas: Sequence[Meta], waiting: Callable[[], str]) -> None:
        """Return when `message` has arrived.

        Raises:
            DeadlineError: It did not arrive in time; `waiting()` says who waits, at which task.
        """
        for work in message.works:
            with self.side.waits.until(lambda: f"to send {message.describe()}", {"rank": message.src}):
                try:
                    work.wait(self.deadline_s)
                except TimeoutError as error:
                    raise self._late(waiting(), message.describe(), message.src) from error
            if message.is_between_gpus:
                self.device_waits.add(work, lambda: self._late(waiting(), message.describe(), message.src))
        message.works.clear()
        layouts = list(map(_layout, metas)) if message.is_between_gpus else _read_strides(message.strides, metas)
        message.strides = None  # a view of the common transfer: it would keep all of it
        for number, (meta, layout) in enumerate(zip(metas, layouts, strict=True)):  # each gives its buffer back
            dense = message.tensors[number].as_strided(meta.shape, _dense(meta.shape, layout))
            message.tensors[number] = self._with_strides(dense, layout)

    def has_arrived(self, message: Message) -> bool:
        """Returns whether `wait` would return at once; between GPUs it always would."""
        return message.is_between_gpus or all(work.is_done() for work in message.works)

    def wait_any(self, groups: Sequence[Sequence[Message]], waiting: Callable[[], str]) -> None:
        """Return when all messages of one of `groups` have arrived.

        Raises:
            DeadlineError: None has in time; `waiting()` says who waits, at which task.
        """
        missing = (message for group in groups for message in group if not self.has_arrived(message))
        first = next(missing, None)
        if first is None:
            return
        end = time.monotonic() + self.deadline_s
        with self.side.waits.until(lambda: f"to send {first.describe()}", {"rank": first.src}):
            while not any(all(map(self.has_arrived, group)) for group in groups):
                if time.monotonic() > end:
                    raise self._late(waiting(), first.describe(), first.src)
                time.sleep(_PERIOD_S)  # each transport has a way of its own to wait: none waits for the others too

    def transport_to(self, peer: int, *, is_between_gpus: bool) -> Transport:
        """Returns what carries tensors to a rank, and from it."""
        way = self._ways.get((peer, is_between_gpus))
        if way is None:
            way = self._transport
            assert way is not None
            if isinstance(way, Router):
                way = way.transport_to(peer, is_between_gpus=is_between_gpus)
            self._ways[peer, is_between_gpus] = way
        return way

    def checks_sizes(self, num_ranks: int) -> bool:
        """Returns whether all other ranks may be received from before it is known that they run the same program.

        Args:
            num_ranks: How many there are.
        """
        if self._checks_sizes is None:
            self._checks_sizes = self._transport is not None and all(
                self.transport_to(other, is_between_gpus=between_gpus).checks_sizes(other)
                for other in range(num_ranks)
                if other != self.rank
                for between_gpus in (False, True)
            )
        return self._checks_sizes

    def _agree(self) -> None:
        if self.agree is not None:
            self.agree()
            self.agree = None

    def _device_is_late(self, error: FarspanError) -> None:
        """A device has waited too long (called in a thread of its own): all ranks hear of it, and transfers end."""
        self.side.fail(error)
        self.side.on_failure(error)

    def _late(self, waiting: str, what: str, peer: int) -> DeadlineError:
        """Returns the error of a wait for `what`; it names the rank that keeps the others."""
        chain, why = self.side.late.behind(peer)
        return DeadlineError(
            f"{waiting} waited {self.deadline_s:g} s for {what} from rank {peer}{chain}.",
            why=why,
            hint="look at that rank's log; FARSPAN_DEADLINE=seconds allows longer waits",
        )

    def _with_strides(self, dense: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor that has arrived, as it was where it comes from: a slice of something larger, with gaps, or
        one element that stands for many. (Where elements overlap in another way it stays dense.)
        """
        if dense.stride() == strides or not dense.numel():
            return dense
        parts = dense
        span = 1
        for stride, size, dim in sorted(zip(strides, dense.shape, range(dense.dim()), strict=True)):
            if stride == 0:
                parts = parts.narrow(dim, 0, 1)
            elif size > 1 and stride < span:
                return dense
            else:
                span += stride * (size - 1)
        result = self.allocate(span, dtype=dense.dtype, device=dense.device).as_strided(parts.shape, strides)
        return result.copy_(parts).expand(dense.shape)

    def send(self, message: Message, tensors: Sequence[torch.Tensor], metas: Sequence[Meta]) -> None:
        """Begin to send; `tensors` must not be written to any more."""
        transport = self.transport_to(message.dst, is_between_gpus=message.is_between_gpus)
        channel = message.channel.number
        if not message.is_between_gpus:
            tensors = [tensor.to(_HOST) for tensor in tensors]
        parts = _Parts(metas, has_strides=not message.is_between_gpus)
        if message.is_between_gpus:
            strides = [meta.stride for meta in metas]
        else:
            strides = [tensor.stride() for tensor in tensors]
        layouts = [_dense(meta.shape, stride) for meta, stride in zip(metas, strides, strict=True)]
        if parts.packed_size:
            device = _HOST if not parts.packed else tensors[next(iter(parts.packed))].device
            buffer = torch.empty(parts.packed_size, dtype=torch.uint8, device=device)
            if parts.strides_size:
                numbers = struct.pack(f"{parts.strides_size // 8}q", *itertools.chain.from_iterable(strides))
                buffer[: parts.strides_size].copy_(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
            for number, offset in parts.packed.items():
                flat = buffer[offset : offset + metas[number].size_bytes].view(metas[number].dtype)
                flat.as_strided(metas[number].shape, layouts[number]).copy_(tensors[number])
            self.sending.append(transport.send(buffer, message.dst, channel))
        for number in parts.alone:
            self.sending.append(transport.send(_flattened(tensors[number], layouts[number]), message.dst, channel))
        self.reap()

    def reap(self) -> None:
        """Release what has been sent; raise what broke it."""
        while self.sending and self.sending[0].is_done():
            self.sending.popleft().wait(0.0)

    def drain(self) -> None:
        """Wait until all has been sent."""
        end = time.monotonic() + self.deadline_s
        while self.sending:
            self.sending.popleft().wait(max(0.001, end - time.monotonic()))


class _Parts:
    """The parts in which the tensors of a message travel; empty tensors take no bytes."""

    __slots__ = ("alone", "packed", "packed_size", "strides_size")

    def __init__(self, metas: Sequence[Meta], *, has_strides: bool) -> None:
        sizes = [meta.size_bytes for meta in metas]
        self.strides_size = 8 * sum(len(meta.shape) for meta in metas) if has_strides else 0
        small = [number for number, size in enumerate(sizes) if size <= _ALONE_BYTES]
        if len(small) == 1 and sizes[small[0]] and not self.strides_size:
            small = []
        self.packed: dict[int, int] = {}
        """For each tensor in the common transfer, by its number, where it begins there."""
        end = self.strides_size
        for number in small:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            self.packed[number] = begin
            end = begin + sizes[number]
        self.packed_size = end
        self.alone = [number for number in range(len(metas)) if number not in self.packed]


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides a tensor has on the wire: its own if it is dense, else those of a copy, which keeps the order
    of dimensions (a slice of channels of an image that is stored channels last is stored channels last).
    """
    if len(strides) != len(shape):  # sparse
        return torch.empty(shape, device="meta").stride()
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
        expected *= size
    return strides


def _layout(meta: Meta) -> tuple[int, ...]:
    return _dense(meta.shape, meta.stride)


def _read_strides(message: torch.Tensor | None, metas: Sequence[Meta]) -> list[tuple[int, ...]]:
    """Returns the strides of each tensor, out of the bytes that came before them."""
    if message is None or not message.numel():
        return [()] * len(metas)
    strides = iter(struct.unpack(f"{message.numel() // 8}q", message.numpy().tobytes()))
    return [tuple(itertools.islice(strides, len(meta.shape))) for meta in metas]


def _flattened(tensor: torch.Tensor, layout: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() != layout or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty_strided(tensor.shape, layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
