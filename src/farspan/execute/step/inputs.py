"""Batches that one rank alone has read: one small exchange for each, and no data until a call needs them."""

from __future__ import annotations

import hashlib
import itertools
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from farspan.call.naming import find_where, format_where
from farspan.call.wire.checked import damaged
from farspan.errors import DivergenceError, RecordError
from farspan.execute.agreement.agreement import Agreement
from farspan.execute.agreement.names import agree_on_names
from farspan.execute.step.generator_states import load_generators, save_generators
from farspan.execute.teams import check_rank, stage_of_inputs
from farspan.execute.values import SharedValues
from farspan.graph import Graph, Meta, Value
from farspan.plan import Team
from farspan.record.across_ranks.from_rank import announce, take_in
from farspan.record.recorder import Recorder
from farspan.record.tensor import plain_versions

__all__ = ["Inputs"]

_HEADER = struct.Struct("<I8s")
"""The rank that has the batch, and a digest of the random generators."""


class Inputs:
    """Inputs that single ranks have read for all."""

    def __init__(self, recorder: Recorder, agreement: Agreement, values: SharedValues, teams: list[Team]) -> None:
        self.recorder = recorder
        self.agreement = agreement
        self.values = values
        self.teams = teams
        self._numbers = itertools.count(1)
        self._versions: weakref.WeakKeyDictionary[Value, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        """For this rank's own inputs how often their memory had been written to, and the line that gave them."""

    def from_rank(self, rank: int, batch: Any) -> Any:
        """`farspan.from_rank`; all ranks call it together."""
        side = self.agreement.side
        check_rank(rank, side.world_size, "farspan.from_rank")
        text, data = announce(batch) if rank == side.rank else (b"", [])
        if side.world_size == 1:
            if text.startswith(b"{"):
                take_in(self.recorder, text, data, lambda device: 0, lambda: 0)  # raises
            return batch
        dropped = self.values.dropped_inputs()
        generators = save_generators()
        digest = hashlib.blake2b(generators, digest_size=8).digest()
        parts = self.agreement.gather("a batch", _HEADER.pack(rank, digest) + text)
        if any(len(part) < _HEADER.size for part in parts):
            raise damaged("a batch without a head")
        owners, digests = zip(*[_HEADER.unpack_from(part) for part in parts], strict=True)
        self._check_owners(owners)
        text = parts[rank][_HEADER.size :]
        if not text.startswith(b"{"):
            agree_on_names(self.agreement, text)
        if any(other != digests[rank] for other in digests):  # reading has drawn random numbers, as loaders do
            load_generators(self.agreement.broadcast("generators", generators if rank == side.rank else b"", rank))
        self.values.release(dropped)  # all ranks have come here
        result, values = take_in(
            self.recorder,
            text,
            data,
            lambda device: stage_of_inputs(self.teams, rank, device),
            lambda: next(self._numbers),
        )
        if rank == side.rank:
            self.values.keep_inputs(values)
            where = find_where()
            self._versions.update({value: (plain_versions([value.data]), where) for value in values})
        self.values.advance()
        return result

    def add(self, meta: Meta, stage: int, data: torch.Tensor | None) -> Value:
        """Returns a value that no call has made; all ranks add it together, its owner with the data. It can be asked
        for once `values.advance()` has been called.
        """
        value = Value(meta, stage, index=next(self._numbers))
        if data is not None:
            value.data = data
            self.values.keep_inputs([value])
        return value

    def check(self, graphs: Sequence[Graph]) -> None:
        """Raise if an input that is about to be used has been written to since it was given."""
        for value in [value for graph in graphs for value in graph.sources] if self._versions else ():
            known = self._versions.get(value)
            if known is not None and plain_versions([value.data]) != known[0]:
                raise RecordError(
                    f"a {value.meta} given to farspan.from_rank has been written to since.",
                    why=f"given at {format_where(known[1])}; what uses it runs only now.",
                    hint="give each micro-batch a tensor of its own (batch.clone()), or call farspan.flush() before "
                    "the write",
                )

    def _check_owners(self, owners: Sequence[int]) -> None:
        for rank, owner in enumerate(owners):
            if owner != owners[0]:
                raise DivergenceError(
                    f"ranks 0 and {rank} call farspan.from_rank for different ranks.",
                    why=f"rank 0: from_rank({owners[0]}, ...)\nrank {rank}: from_rank({owner}, ...)\n"
                    f"at {format_where(find_where())}",
                    hint="every rank names the one that has read: farspan.from_rank(0, batch)",
                )
