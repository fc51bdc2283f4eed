"""Exchanges the results of a step between all ranks: its scalars, which parameters have gradients, who was busy how
long, and how that compares with earlier steps.

One small all-gather on the side channel. A step is over when all parts are there: the user's code may have raised an
exception on another rank until then (`abort`).
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from farspan.call.wire.checked import damaged
from farspan.comm.tensor_bytes import raw_bytes
from farspan.control.channel import SideChannel
from farspan.graph import Value
from farspan.torch_private import DisableTorchFunction

__all__ = ["Exchange", "PaceNote"]

_HEADER = struct.Struct("<?dfffII")
_INTERRUPTED = b"\1"
_MOST_PARAMETERS = 1 << 26
"""Limit on the parameters of one rank."""


class PaceNote(NamedTuple):
    """The pace of one rank in one step: how long its tasks took, and usually take.

    Attributes:
        compared_s: Seconds of those tasks of which that is known.
        usual_s: What these usually take; 0 where none is known, negative where something beside the step has slowed
            this rank down.
        span_s: From the begin of its first task to the end of its last one, waiting included.
    """

    compared_s: float = 0.0
    usual_s: float = 0.0
    span_s: float = 0.0


class _Part(NamedTuple):
    """The scalars, the mask of gradients and the busy time that one rank contributes at the end of a step."""

    busy_s: float
    mask: bytes
    scalars: bytes


class Exchange:
    """The exchange at the end of one step. Each rank's part: busy seconds, its pace, the length of its mask, the
    mask (one byte where all are the same), its scalars; or what it reports of an exception.

    Made before the step runs: a scalar with a ticket is kept until it has been broadcast.
    """

    def __init__(
        self, side: SideChannel, key: str, *, scalars: Sequence[Value], owner_of: Sequence[int], deadline_s: float
    ) -> None:
        self.side = side
        self.key = key
        self.deadline_s = deadline_s
        self._parts: list[_Part] | None = None
        self._gathered: list[bytes] | None = None
        self._scalars = [
            (weakref.ref(value), value.meta, owner) for value, owner in zip(scalars, owner_of, strict=True)
        ]
        for value in scalars:
            value.ticket = self

    def contribute(self, mine: Sequence[Value], *, mask: bytes, busy_s: float, pace: PaceNote | None = None) -> None:
        """Send this rank's part."""
        data = _bytes_of([value.data.detach() for value in mine])
        for value in mine:
            value.ticket = None
        packed = mask[:1] if mask == mask[:1] * len(mask) else mask
        self.side.contribute(
            self.key, _HEADER.pack(False, busy_s, *(pace or PaceNote()), len(mask), len(packed)) + packed + data
        )

    def report(self, report: bytes) -> None:
        """Send this rank's part of a step that has not run to its end."""
        self.side.contribute(self.key, _INTERRUPTED + report)

    def reports(self) -> list[bytes]:
        """Wait for all parts. Where some are reports, these, by rank, with b"" for a rank that has none; else []."""
        parts = self._gathered = self.side.gathered(self.key, self.deadline_s)
        found = [part[1:] if part.startswith(_INTERRUPTED) else b"" for part in parts]
        is_interrupted = any(part.startswith(_INTERRUPTED) for part in parts)
        return found if is_interrupted else []

    def drop(self) -> None:
        """The step has not run to its end: nothing of it is to be known."""
        for reference, _, _ in self._scalars:
            value = reference()
            if value is not None and value.ticket is self:
                value.ticket = None
        self._scalars = []

    def paces(self) -> list[PaceNote]:
        """Returns the notes of all ranks, by rank, as each was sent: in single precision. All parts must be there, and
        must not have been resolved."""
        assert self._gathered is not None
        return [PaceNote(*_header_of(part)[2:5]) for part in self._gathered]

    def resolve(self) -> None:
        """Wait for all parts, and put the scalars of other ranks into their values."""
        if self._parts is not None:
            return
        if self._gathered is None:
            self._gathered = self.side.gathered(self.key, self.deadline_s)
        self._parts = [_parsed(part) for part in self._gathered]
        self._gathered = None
        begins = [0] * len(self._parts)
        for reference, meta, owner in self._scalars:
            begin = begins[owner]
            begins[owner] += meta.dtype.itemsize
            value = reference()
            if value is not None and value.ticket is self:
                raw = bytearray(self._parts[owner].scalars[begin : begins[owner]])
                if len(raw) != meta.dtype.itemsize:
                    raise damaged("the end of a step, without all of its scalars")
                with DisableTorchFunction():
                    value.data = torch.frombuffer(raw, dtype=meta.dtype).reshape(meta.shape)
                value.ticket = None
        self._scalars = []

    def masks(self) -> list[bytes]:
        """Returns for each rank a byte for each of its parameters: whether it has a gradient."""
        self.resolve()
        assert self._parts is not None
        return [part.mask for part in self._parts]

    def busy_s(self) -> list[float]:
        """Returns for each rank the seconds it computed in this step."""
        if self._gathered is not None:  # and nobody has asked for more of it
            return [_header_of(part)[1] for part in self._gathered]
        self.resolve()
        assert self._parts is not None
        return [part.busy_s for part in self._parts]

    def __del__(self) -> None:
        self.side.forget_later(self.key)


def _bytes_of(scalars: Sequence[torch.Tensor]) -> bytes:
    """Returns the data of scalars; the host waits once for those that accelerators have computed."""
    away = next((scalar.device for scalar in scalars if scalar.device.type != "cpu"), None)
    if away is None:
        return b"".join([bytes(raw_bytes(scalar).numpy()) for scalar in scalars])
    return bytes(torch.cat([raw_bytes(scalar.to(away, non_blocking=True)) for scalar in scalars]).cpu().numpy())


def _header_of(part: bytes) -> tuple[Any, ...]:
    if len(part) < _HEADER.size:
        raise damaged("the end of a step, without its head")
    return _HEADER.unpack_from(part)


def _parsed(part: bytes) -> _Part:
    _, busy_s, _, _, _, num_parameters, mask_size = _header_of(part)
    end = _HEADER.size + mask_size
    mask = part[_HEADER.size : end]
    if mask_size == 1 and num_parameters < _MOST_PARAMETERS:
        mask *= num_parameters
    if len(mask) != num_parameters or len(part) < end:
        raise damaged("the end of a step, without its parts")
    return _Part(busy_s, mask, part[end:])
