"""What optimizers keep for parameters that go to another rank: which of it goes along.

    the owner's, with memory of its own              goes along
    the owner's, and something else sees its memory  stays there: the state of another parameter, an attribute,
                                                     the program; all go on seeing one tensor
    another rank's                                   stays there
    every rank's                                     need not go

A step works with tensors of any rank, so what stays is right where it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.call.infer.entry import meta_of
from farspan.call.leaf import Placed
from farspan.execute.engine import Engine
from farspan.execute.optimizers.kept_state import change_tensors, parts_of, raw_state, tensors_in
from farspan.execute.optimizers.own import is_own, make_known_as, make_own
from farspan.execute.optimizers.shown import show_to_all
from farspan.execute.optimizers.states import placed_in
from farspan.graph import Meta, Value
from farspan.record.tensor import LazyTensor
from farspan.torch_private import has_memory_of_its_own

__all__ = ["MovedStates"]


class MovedStates:
    """What the optimizers of one rank keep for parameters that are about to move."""

    def __init__(self, engine: Engine, owners: Mapping[str, int]) -> None:
        """All ranks make one, before anything moves.

        Args:
            engine: This rank's.
            owners: The ranks that have the parameters that move, by name.
        """
        self._engine = engine
        self._owners = owners
        self._items: list[tuple[int, Optimizer, Placed]] = [
            (number, optimizer, item)
            for number, optimizer in engine.values.optimizers.numbered()
            for item in placed_in(optimizer, engine.recorder.placed)
            if item.name in owners and item.tensor in raw_state(optimizer)
        ]
        for _, optimizer, item in self._items:
            _change(optimizer, item, self._as_stepped)
        staying = [json.loads(blob) for blob in engine.agreement.gather("what stays", self._staying())]
        self._staying_places = {(number, name): set(places) for each in staying for number, name, places in each}
        shares = engine.values.optimizers.shares
        if shares is not None:
            for optimizer in self._with_staying():  # no rank can step its own parameters alone
                shares.has_loaded(engine, optimizer)
        self._coming: dict[tuple[int, str], dict[int, torch.Tensor]] = {}

    def fetch(self, item: Placed, device: torch.device) -> None:
        """Gets what is kept for a parameter that comes to `device` of this rank."""
        for number, optimizer, other in self._items:
            if other is item:
                kept = tensors_in(raw_state(optimizer)[item.tensor])
                places = [place for place, each in enumerate(kept) if self._goes(number, item, place, each)]
                owner = self._owners[item.name]
                data = self._engine.values.pull_state(owner, number, item.name, device, places) if places else []
                self._coming[number, item.name] = dict(zip(places, data, strict=True))

    def settle(self) -> None:
        """The parameters have their new places."""
        for number, optimizer, item in self._items:
            place = -1

            def change(tensor: torch.Tensor, number: int = number, item: Placed = item) -> torch.Tensor:
                nonlocal place
                place += 1
                return self._settled(number, item, place, tensor)

            _change(optimizer, item, change)
        steps = self._engine.values.optimizers
        for number, optimizer in {number: optimizer for number, optimizer, _ in self._items}.items():
            if optimizer not in steps.stepped or optimizer in steps.held:
                steps.stepped.discard(optimizer)  # the program may look at it
                show_to_all(self._engine, optimizer, number)

    def _with_staying(self) -> list[Optimizer]:
        """Returns the optimizers of which something stays that is kept for a parameter that goes."""
        numbers = {number for (number, _), places in self._staying_places.items() if places}
        return list({id(optimizer): optimizer for number, optimizer, _ in self._items if number in numbers}.values())

    def _as_stepped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns, in the place of a recorded tensor that the program may have got, one as steps have: who else holds
        the recorded one then holds it by himself."""
        value = tensor._value if type(tensor) is LazyTensor else None
        if value is None or (value.call is None and value.state_of is None and value.data is None):
            return tensor
        if value.data is not None and self._home_of(tensor) == self._engine.rank:
            return make_known_as(make_own(value.data.detach()), value)
        return make_known_as(self._known_only(value.meta, value.stage), value)

    def _known_only(self, meta: Meta, stage: int) -> LazyTensor:
        return LazyTensor.make(Value(meta, stage), self._engine.recorder)

    def _staying(self) -> bytes:
        """Returns the places of what this rank keeps, alone, for parameters that go, and what is to stay here."""
        engine = self._engine
        engine.values.keep(())  # all ranks are here: none asks for what the program has released
        num_users = Counter(
            _memory_of(each)
            for _, optimizer in engine.values.optimizers.numbered()
            for each in _tensors_of(optimizer, engine.recorder.placed)
            if type(each) is LazyTensor or is_own(each)
        )
        found: list[tuple[int, str, list[int]]] = []
        for number, optimizer, item in self._items:
            if self._owners[item.name] == engine.rank:
                kept = tensors_in(raw_state(optimizer)[item.tensor])
                places = [
                    place
                    for place, each in enumerate(kept)
                    if is_own(each) and (num_users[_memory_of(each)] > 1 or not _is_alone(each))
                ]
                found.append((number, item.name, places))
        return json.dumps(found).encode()

    def _goes(self, number: int, item: Placed, place: int, tensor: torch.Tensor) -> bool:
        return self._home_of(tensor) == self._owners[item.name] and place not in self._staying_places.get(
            (number, item.name), ()
        )

    def _home_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the rank that has it; None if every rank does."""
        if type(tensor) is LazyTensor:
            return self._engine.teams[tensor._value.stage].leader.rank
        return self._engine.rank if is_own(tensor) else None

    def _settled(self, number: int, item: Placed, place: int, tensor: torch.Tensor) -> torch.Tensor:
        if not self._goes(number, item, place, tensor):
            return tensor
        coming = self._coming.get((number, item.name))
        if item.is_owned:
            return tensor if coming is None else make_own(coming[place])
        meta = tensor._value.meta if type(tensor) is LazyTensor else meta_of(tensor.detach())
        return self._known_only(meta, item.stage)


def _change(optimizer: Optimizer, item: Placed, change: Any) -> None:
    state = raw_state(optimizer)
    state[item.tensor] = change_tensors(state[item.tensor], change)


def _tensors_of(optimizer: Optimizer, placed: Mapping[int, Placed]) -> Iterable[torch.Tensor]:
    found: list[torch.Tensor] = []
    for _, _, part in parts_of(optimizer, placed):
        part.change(lambda tensor: found.append(tensor) or tensor)
    return found


def _memory_of(tensor: torch.Tensor) -> int:
    """Returns a number of its memory; of what has none here, or none that can be shared, one of the tensor."""
    data = tensor._value.data if type(tensor) is LazyTensor else tensor
    if data is None or data.layout is not torch.strided or data.untyped_storage().nbytes() == 0:
        return id(tensor)
    return data.untyped_storage().data_ptr()


def _is_alone(tensor: torch.Tensor) -> bool:
    """Returns whether nothing else uses its memory."""
    return tensor.layout is not torch.strided or has_memory_of_its_own(tensor)
