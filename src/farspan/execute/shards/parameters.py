"""The parameters of one rank whose data other groups hold: got when an operation needs them, and kept as briefly.

    home          a plain parameter, which its optimizer steps
    elsewhere     an `AwayParameter`; of what has come the latest are kept, up to a limit

Which one an operation needs is known when it runs. What follows it followed it before, too, as a rule: so the next ones
of the same home come with it, and those behind them in a thread, while operations run.

    operations      w0  w1 | w2  w3 | w4  w5
    asked for       w0  w1,  w2  w3: when w1 has come

Who writes into parameters, other than an optimizer's step, does so in all groups: there all get all data first, agree
that they have, and write into them; then each home has the result, and the others drop theirs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from farspan.call.leaf import Placed
from farspan.comm.pulls.answers import Answer
from farspan.record.parameters.away import AwayParameter
from farspan.record.saving.parameters import laid_out
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.comm.pulls.pulls import Pulling
    from farspan.execute.data_axis.reduction import Reduction
    from farspan.execute.shards.homes import ShardHomes
    from farspan.execute.shards.peer_pulls import PeerPulls

__all__ = ["AwayParameters"]

_SHARE = 8
"""Of the bytes that are away, the part that may be here at a time."""


@dataclass(frozen=True)
class _Batch:
    """Parameters of one home that are asked for together.

    Attributes:
        items: The parameters.
        names: Of them.
        num_bytes: Of their data.
        pulling: The question.
    """

    items: Sequence[Placed]
    names: frozenset[str]
    num_bytes: int
    pulling: Pulling


class AwayParameters:
    """Gets and drops the data of those parameters of one rank that other groups hold.

    Args:
        groups: The data axis of this rank.
        homes: Which group holds what.
        peers: Asks other groups.
    """

    def __init__(self, groups: Reduction, homes: ShardHomes, peers: PeerPulls) -> None:
        self.may_write = False
        self._groups = groups
        self._homes = homes
        self._peers = peers
        self._items: dict[str, Placed] = {}
        """The parameters whose data other groups hold, by name."""
        self._held: dict[str, Placed] = {}
        """The parameters whose data this rank holds for other groups, by name."""
        self._here: OrderedDict[str, torch.Tensor] = OrderedDict()
        """Data that have come, those used last at the end."""
        self._here_bytes = 0
        self._most_bytes = 0
        self._lock = threading.RLock()
        self._order: list[str] = []
        """The parameters in the order in which they are needed, since the last change."""
        self._order_before: list[str] = []
        self._place = 0
        """Where in that order the operations are."""
        self._ahead: _Batch | None = None
        """What comes before anything needs it."""
        self._settled_at: int | None = None
        """The count of steps and writes up to which nothing is asked for in advance."""
        peers.answer_with({"weights": self._weights})

    def is_away(self, item: Placed) -> bool:
        return item.name in self._items

    def is_divided(self, item: Placed) -> bool:
        """Returns whether one group alone holds it."""
        return item.name in self._items or item.name in self._held

    def release(self, items: Sequence[Placed]) -> None:
        """Let those of `items` go that are not at home here: their values are those of all groups."""
        for item in items:
            if not (item.is_owned and item.is_parameter and _can_go(item)):
                continue
            if self._homes.is_here(item):
                self._held[item.name] = item
                continue
            tensor, away = item.tensor, AwayParameter.make(item.name, self, item.meta)
            away.requires_grad_(tensor.requires_grad)
            away._is_param = True
            torch.utils.swap_tensors(tensor, away)
            vars(tensor).update(vars(away))  # what the program has written on the parameter
            self._items[item.name] = item
        sizes = [item.meta.size_bytes for item in self._items.values()]
        self._most_bytes = max([*(2 * size for size in sizes), sum(sizes) // _SHARE], default=0)

    def fetch(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns the data of parameters that are away."""
        with self._lock, DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            found = {name: self._fetched(name) for name in names}
            coming_bytes = 0 if self._ahead is None else self._ahead.num_bytes
            while self._here_bytes + coming_bytes > self._most_bytes and not self.may_write:
                name, data = next(iter(self._here.items()))
                if name in found:
                    break
                del self._here[name]
                self._here_bytes -= data.numel() * data.element_size()
            return found

    def note_gathering(self, duration_ns: int) -> None:
        """Operations have waited so long for data, and sought which they need."""
        self._groups.engine.executor.waited_ns += duration_ns

    def begin_write(self, what: str, names: Sequence[str] | None = None) -> None:
        """All groups are about to write into parameters; all ranks of all groups call it.

        Args:
            what: Writes into them.
            names: Those that are written; None: all may be.
        """
        self.settle()
        with self._lock:
            self.may_write = True
            self.fetch([name for name in self._items if names is None or name in names])
        self._groups.agree(what)

    def settle(self) -> None:
        """All groups are about to go on to the next count of steps and writes: what has been asked for comes first."""
        with self._lock:
            self._settled_at = self._peers.clock
            if self._ahead is not None:
                self._take(self._ahead)

    def end_write(self) -> None:
        """All has been written."""
        self.changed()
        self._peers.advance()

    def changed(self) -> None:
        """Parameters have other values: what is here is out of date."""
        with self._lock:
            self.may_write = False
            self._here.clear()
            self._here_bytes = 0
            self._order_before, self._order, self._place = self._order, [], 0
        for item in self._items.values():
            torch.autograd.graph.increment_version(item.tensor)

    def _fetched(self, name: str) -> torch.Tensor:
        if not self._order or self._order[-1] != name:
            self._order.append(name)
            self._find_place(name)
        if name not in self._here and self._ahead is not None and name in self._ahead.names:
            self._take(self._ahead)
        if name not in self._here:
            self._take(self._begin(self._with_those_to_come(self._items[name], self._place)))
        if self._ahead is None and self._peers.clock != self._settled_at:
            for place in range(self._place, len(self._order_before)):
                if self._order_before[place] not in self._here:
                    coming = self._with_those_to_come(self._items[self._order_before[place]], place + 1)
                    self._ahead = self._begin(coming)
                    break
        self._here.move_to_end(name)
        return self._here[name]

    def _begin(self, items: list[Placed]) -> _Batch:
        names = [item.name for item in items]
        pulling = self._peers.begin(self._homes.rank_of(items[0]), "weights", names)
        return _Batch(items, frozenset(names), sum([item.meta.size_bytes for item in items]), pulling)

    def _take(self, batch: _Batch) -> None:
        """Waits for what has been asked for, which is here from then on."""
        if batch is self._ahead:
            self._ahead = None
        _, tensors = batch.pulling.wait()
        for item, data in zip(batch.items, tensors, strict=True):
            self._here[item.name] = laid_out(item.meta, data.to(item.meta.device))
        self._here_bytes += batch.num_bytes

    def _find_place(self, name: str) -> None:
        """Notes where in the order of before the operations are."""
        for place in [*range(self._place, len(self._order_before)), *range(self._place)]:
            if self._order_before[place] == name:
                self._place = place + 1
                break

    def _with_those_to_come(self, item: Placed, place: int) -> list[Placed]:
        """Returns a parameter, and others of its home that are likely to be needed next: those from `place` on."""
        items, size_bytes, home = [item], item.meta.size_bytes, self._homes.group_of(item)
        if self.may_write:
            return items
        known = {*self._here, *(() if self._ahead is None else self._ahead.names)}
        for name in self._order_before[place:]:
            other = self._items[name]
            size_bytes += other.meta.size_bytes
            if size_bytes > self._most_bytes // 2:
                break
            if name not in known and other not in items and self._homes.group_of(other) == home:
                items.append(other)
        return items

    def _weights(self, names: list[str]) -> Answer:
        return {}, [self._held[name].tensor.detach() for name in names]


def _can_go(item: Placed) -> bool:
    """Returns whether operations can get the data of a parameter: of ordinary memory and numbers."""
    tensor = item.tensor
    return (
        tensor.layout is torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        and type(tensor) is torch.nn.Parameter
        and (tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)))
    )
