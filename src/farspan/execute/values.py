"""Values that other ranks ask for: what this rank keeps for them, and how it asks the others.

A rank that asks has got to a certain point of the program; the owner answers when it has got there too. It cannot be
a whole step ahead, for a step ends only when all ranks have begun it: so what the program could read when the step
began is kept until the next one ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from farspan.call.leaf import Placed
from farspan.call.wire.checked import damaged
from farspan.comm.pulls.answers import Answer
from farspan.comm.pulls.pulls import Pulls
from farspan.comm.tensor_bytes import sparse_tensor
from farspan.control.channel import SideChannel
from farspan.errors import RecordError
from farspan.execute.abort.halts import Halts
from farspan.execute.optimizers.states import OptimizerStates
from farspan.execute.reading.ahead import ParametersAhead
from farspan.execute.reading.gradients import SharedGradients
from farspan.graph import Meta, Value
from farspan.plan import Team
from farspan.record.parameters.away import real_of

__all__ = ["ValueSlice", "SharedValues"]

ValueSlice = tuple[Sequence[int], Sequence[int], int]
"""A view of a tensor: its size, its strides and its offset."""


class SharedValues:
    """The values that ranks share: one rank's as the others see them, and theirs as it sees them."""

    def __init__(self, side: SideChannel, parameters: Mapping[str, Placed], deadline_s: float) -> None:
        self.side = side
        self.parameters = parameters
        self.deadline_s = deadline_s
        self.optimizers = OptimizerStates(parameters)
        self.offered: Mapping[str, torch.Tensor] = {}
        """By name, what this rank gives all others between two barriers."""
        self._kept: dict[tuple[int, int, int], Value] = {}
        self.ahead = ParametersAhead(self._pull_parameters)
        self.copies: Callable[..., list[torch.Tensor]] = lambda *names: []
        """Returns what another rank keeps copies of: parameters and buffers, gradients, values of the latest step."""
        self.halts = Halts(side, deadline_s)
        self._progress = 0
        self._is_over = False
        self._progressed = threading.Condition()
        self.gradients = SharedGradients(parameters, self._progressed, has_others=side.world_size > 1)
        self._serve(side)

    def join(self, side: SideChannel) -> None:
        """Goes on in another world."""
        self._is_over = False
        self.side = side
        self.halts.join(side)
        self.ahead.forget()
        self._serve(side)

    def _serve(self, side: SideChannel) -> None:
        self.pulls = Pulls(side, self._answer, self.deadline_s)
        side.serve(lambda request: self.pulls.listen() if "listen" in request else self.halts.answer(request))

    def advance(self) -> None:
        """Moves this rank's logical clock on: its program has got past a step, an optimizer step, a load."""
        self.ahead.forget()
        with self._progressed:
            self._progress += 1
            self.optimizers.advance()
            self._progressed.notify_all()

    def close(self) -> None:
        """Ends this rank's logical clock, or its world: who waits for it gets an error."""
        with self._progressed:
            self._is_over = True
            self._progressed.notify_all()

    def keep(self, values: Iterable[Value]) -> None:
        """A step is over: keep what the program still holds of it, release what it has dropped since the last one."""
        for key in [key for key, value in self._kept.items() if not value.is_readable]:
            self._kept.pop(key).is_kept = False
        for value in values:
            if value.is_readable:
                value.is_kept = True
                self._kept[value.key] = value
        self.gradients.release()

    def keep_inputs(self, values: Iterable[Value]) -> None:
        """Keeps a batch that this rank has read."""
        self._kept.update((value.key, value) for value in values)

    def dropped_inputs(self) -> list[Value]:
        """Returns the inputs that the program no longer holds; other ranks may still be at a point where it does."""
        return [value for value in self._kept.values() if value.call is None and not value.is_readable]

    def release(self, values: Iterable[Value]) -> None:
        """Releases `values`: all ranks have come to a point where none of them can be read."""
        for value in values:
            self._kept.pop(value.key, None)

    def sparse_gradient(self, placed: Placed, rank: int) -> torch.Tensor:
        """Returns a gradient for the program, which may write into it: the own gradient itself, or a copy of that of
        `rank`."""
        if placed.is_owned:
            return self.gradients.written_into(placed)
        indices, values, is_coalesced = self._ask(rank, "sparse", self.gradients.key_of(placed))[1]
        meta = placed.meta
        return sparse_tensor(indices, values, meta.shape, bool(is_coalesced)).to(meta.device)

    def pull(self, rank: int, kind: str, what: Any) -> torch.Tensor:
        """Ask `rank` for what is "offered" by name, or a "gradient" by name and number."""
        return self._ask(rank, kind, what)[1][0]

    def pull_value(self, rank: int, value: Value, part: ValueSlice | None = None) -> torch.Tensor:
        """Ask `rank` for a value that it has, or for part of one that a call has made."""
        if value.state_of is not None:
            number, name, place = value.state_of
            return self.pull_kept(rank, number, name, [place])[0]
        if part is not None:
            return self._ask(rank, "part", [list(value.key), *map(list, part[:2]), part[2]])[1][0]
        if value.is_gradient:
            return self.pull(rank, "gradient", [value.gradient_of, value.gradient_number])
        return self._ask(rank, "value", list(value.key))[1][0]

    def fetch(self, values: Iterable[tuple[Value, int]]) -> dict[Value, torch.Tensor]:
        """Returns the data of values, each with its owner: one request to each of these."""
        by_rank: dict[int, list[Value]] = {}
        for value, rank in values:
            by_rank.setdefault(rank, []).append(value)
        found: dict[Value, torch.Tensor] = {}
        for rank, theirs in by_rank.items():
            data = self._ask(rank, "values", [list(value.key) for value in theirs])[1]
            found.update(zip(theirs, data, strict=True))
        return found

    def pull_copies(self, rank: int, *names: Any) -> list[torch.Tensor]:
        """Ask `rank` for what `copies` returns there for these names."""
        return self._ask(rank, "copies", names)[1]

    def pull_slice(self, rank: int, name: str) -> torch.Tensor:
        """Ask `rank` for a slice of a parameter that it owns, by name."""
        return self._pull_parameters(rank, [name])[0]

    def _pull_parameters(self, rank: int, names: Sequence[str]) -> list[torch.Tensor]:
        return self._ask(rank, "parameters", list(names))[1]

    def read_parameter(self, placed: Placed, teams: Sequence[Team], memory: torch.Tensor | None) -> torch.Tensor:
        """Another rank's parameter; in `memory`, if it is given."""
        if placed.is_owned:
            return placed.tensor.detach()
        owner = teams[placed.stage].leader.rank
        if memory is not None:
            return self._ask(owner, "parameters", [placed.name], memory)[1][0]
        owned = (item for item in self.parameters.values() if teams[item.stage].leader.rank == owner)
        return self.ahead.read(placed, owner, owned)

    def pull_kept(
        self, rank: int, number: int, name: str, places: Sequence[int], memory: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Ask `rank` for tensors that optimizer `number` keeps under `name`; for one of them, into `memory`."""
        return self._ask(rank, "kept", [number, name, list(places)], memory)[1]

    def pull_state(
        self,
        rank: int,
        number: int | None,
        name: str,
        device: torch.device | None = None,
        places: Sequence[int] | None = None,
    ) -> Any:
        """Ask `rank` what optimizer `number`, or the one that steps in a hook, keeps for one of its parameters; for
        a parameter on `device`, if one is given; of that, a list of the tensors at `places`, if these are given.
        """
        what = [number, name] if places is None else [number, name, list(places)]
        return self.optimizers.unpack(*self._ask(rank, "state", what), device)

    def _ask(
        self, rank: int, kind: str, what: Any, memory: torch.Tensor | None = None
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        with torch.inference_mode(False), torch.no_grad():  # it stands for what was there before
            return self.pulls.pull(rank, {kind: what, "progress": self._progress}, memory)

    def _answer(self, request: dict[str, Any]) -> Answer:
        """Answers another rank's question; called in a worker thread."""
        wanted, gradient = request["progress"], request.get("sparse", request.get("gradient"))

        def has_come() -> bool:
            return self._progress >= wanted and (gradient is None or self.gradients.has_come(*gradient))

        with self._progressed:
            if not self._progressed.wait_for(lambda: self._is_over or has_come(), self.deadline_s):
                raise TimeoutError(f"rank {self.side.rank} has not got as far as the program that asks")
            if not has_come():
                raise RecordError(
                    f"rank {self.side.rank} has ended before it got as far as the program that asks.",
                    why="its program is over, or has failed, while another one reads a value of it.",
                    hint="look at that rank's log",
                )
            if self._progress > wanted:
                raise RecordError(
                    f"rank {self.side.rank} has gone on since; what it has now is newer than what was asked for.",
                    why="a parameter changed after the reading, before all ranks' programs had come as far.",
                    hint="read it on every rank, or right after optimizer.step()",
                )
        if "state" in request:
            return self.optimizers.answer(*request["state"])
        return {}, self._tensors(request)

    def _tensors(self, request: dict[str, Any]) -> list[torch.Tensor]:
        if "parameters" in request:
            return [real_of(self.parameters[name].tensor) for name in request["parameters"]]
        if "copies" in request:
            return self.copies(*request["copies"])
        if "offered" in request:
            return [self.offered[request["offered"]]]
        if "kept" in request:
            kept = self.optimizers.kept(*request["kept"])
            found = [tensor for tensor in kept if tensor is not None]
            if len(found) < len(kept):
                raise self._gone("what an optimizer kept")
            return found
        of_gradient = request.get("sparse", request.get("gradient"))
        if of_gradient is not None:
            gradient = self.gradients.find(*of_gradient)
            if gradient is None:
                raise self._gone(f"the gradient of {of_gradient[0]}")
            if "sparse" in request:
                return [gradient._indices(), gradient._values(), torch.tensor(gradient.is_coalesced())]
            return [gradient]
        if "values" in request:
            return [self._data_of(self._kept.get(tuple(key))) for key in request["values"]]
        key, *part = request["part"] if "part" in request else [request["value"]]
        value = self._kept.get(tuple(key))
        data = self._data_of(value)
        if not part or value is None:
            return [data]
        meta, (size, stride, offset) = value.meta, part
        _check_part(meta, size, stride, offset)
        if data.stride() != meta.stride:
            data = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=data.device).copy_(data)
        return [data.as_strided(size, stride, data.storage_offset() + offset)]

    def _data_of(self, value: Value | None) -> torch.Tensor:
        if value is None or value.data is None:
            raise self._gone("the value that was asked for")
        return value.data.detach()

    def _gone(self, what: str) -> RecordError:
        return RecordError(
            f"rank {self.side.rank} no longer holds {what}.",
            why="its program has released the tensor.",
            hint="keep a reference to the tensor on every rank until it has been read",
        )


def _check_part(meta: Meta, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
    """Raise if another rank asks for what does not lie within a tensor of `meta`."""
    numbers = [*size, *stride, offset]
    if len(size) != len(stride) or not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise damaged("a question for part of a tensor")
    last = offset + sum((each - 1) * step for each, step in zip(size, stride, strict=True))
    inside = sum((each - 1) * step for each, step in zip(meta.shape, meta.stride, strict=True))
    if 0 not in size and (0 in meta.shape or last > inside):
        raise damaged("a question for more of a tensor than there is")
