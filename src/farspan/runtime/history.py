"""What a rank tells of a flush where another rank's was not the same: its calls, and the data given to them, in order.

Ranks must record the same calls. They must also be given the same plain tensors (batches, masks), or parts of different
batches would be mixed without a word: that is compared in the first steps, and now and then.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from farspan.graph import Call, Graph
from farspan.lazy import format_where, plain_of

__all__ = ["History"]

_BACKWARD, _END = 1, 2
_FIRST_FLUSHES, _EVERY = 4, 100
"""Flushes whose data are compared: the first ones, and each one after so many."""
_MOST_ELEMENTS = 1 << 16
"""Of a larger tensor as many are compared, evenly spread."""
_DIGITS = 3
"""To which the mean size of floating-point numbers is compared, and their mean beside it: processors differ in the last
bits."""

Entry = tuple[int, str]
"""A number that is equal on all ranks that did the same, and words for it."""


class History:
    """What this rank does in the present flush or meeting."""

    def __init__(self) -> None:
        self._graphs: Sequence[Graph] = ()
        self._data: dict[Call, list[Entry]] = {}
        self._end: Entry = (_END, "")
        self._num_flushes = 0

    def begin_flush(self, graphs: Sequence[Graph], reason: str) -> int:
        """`graphs` are about to run; the number that must be equal on all ranks."""
        self._graphs, self._end = graphs, (_END, f"end of the step: {reason}")
        self._data = {}
        if self._num_flushes < _FIRST_FLUSHES or self._num_flushes % _EVERY == 0:
            self._data = {call: found for graph in graphs for call in graph.calls if (found := _data_of(call))}
        self._num_flushes += 1
        data = [digest for entries in self._data.values() for digest, _ in entries]
        return hash((*[graph.digest for graph in graphs], *data))

    def begin_meeting(self, what: str, digest: int) -> None:
        """All ranks wait for each other here."""
        self._graphs, self._data, self._end = (), {}, (digest, what)

    def end(self) -> None:
        """The flush is over."""
        self._graphs, self._data = (), {}

    def entries(self, step: int) -> list[Entry]:
        """All of it, for people, and for the comparison with other ranks."""
        entries: list[Entry] = []
        for graph in self._graphs:
            for call in graph.calls:
                entries += self._data.get(call, ())
                entries.append((hash((call.entry.digest, call.stage, call.path or ())), call.describe()))
            entries += [(_BACKWARD, f"backward() at {format_where(item.where)}") for item in graph.backwards]
        return [*entries, self._end]


def _data_of(call: Call) -> list[Entry]:
    """The plain tensors among a call's arguments."""
    found: list[Entry] = []
    if call.target is torch.clone:  # how a plain tensor becomes a recorded one, to be written into: it may be empty yet
        return found
    for argument in call.arguments or ():
        item = plain_of(argument)
        if isinstance(item, torch.Tensor) and item.layout is torch.strided and item.device.type != "meta":
            digest = _digest(item)
            shape = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
            found.append((digest, f"{shape} with the checksum {digest:08x}, given to {call.describe()}"))
    return found


def _digest(tensor: torch.Tensor) -> int:
    """Equal where the data are: of whole numbers all bits, of others their size and their lean to one side."""
    with torch.no_grad():
        data = tensor.detach().reshape(-1)
        data = data[:: max(1, len(data) // _MOST_ELEMENTS)].cpu()
        if not data.is_floating_point() and not data.is_complex():
            return zlib.crc32(data.numpy().tobytes())
        data = torch.view_as_real(data.resolve_conj()) if data.is_complex() else data
        data = data.double().nan_to_num()
        size = data.abs().mean().item() if data.numel() else 0.0
        lean = data.mean().item() / size if size else 0.0
        return zlib.crc32(f"{size:.{_DIGITS}e} {lean:.{_DIGITS}f}".encode())
