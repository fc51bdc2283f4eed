"""The optimizers of a program, and what they keep for their parameters, as other ranks ask for it."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.call.infer.entry import meta_of  # fmt: skip
from farspan.call.leaf import Placed  # fmt: skip
from farspan.call.pytree.template import flatten, map_tensors, rebuild  # fmt: skip
from farspan.call.wire.checked import damaged  # fmt: skip
from farspan.call.wire.structure import structure_from_json, structure_to_json  # fmt: skip
from farspan.comm.pulls.answers import Answer  # fmt: skip
from farspan.errors import RecordError
from farspan.execute.optimizers.kept_state import find_kept, raw_state, tensors_in
from farspan.graph import Meta
from farspan.record.tensor import LazyTensor  # fmt: skip

__all__ = ["GivenState", "OptimizerStates", "as_laid_out", "for_this_rank", "placed_in"]


class GivenState(dict[str, Any]):
    """A state dictionary without the data of other ranks' parameters, in whose place are tensors without memory. Hooks
    that may change what is loaded do not see it: neither have those that may change what is saved.

    Attributes:
        given: By parameter what it stands for: tensors laid out as at their owner, of which the data do not matter.
    """

    given: Mapping[str, Any]


class OptimizerStates:
    """The optimizers of one rank that have stepped or been loaded: numbered in that order, the same on every rank."""

    def __init__(self, parameters: Mapping[str, Placed]) -> None:
        self.parameters = parameters
        self.depth = 0
        """Number of steps that are running, one inside the other."""
        self.view: Any = None
        """The view that steps have, once there has been one."""
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers whose tensors are as a step sees them, since the program has not asked for them."""
        self.held: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers whose state the program has asked for, and may look at whenever it likes."""
        self.shares: Any = None
        """Which steps can be each rank's share, once there has been one."""
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._states: dict[int, Any] = {}
        """What each optimizer keeps, by number: also of those that the program has released, while another rank may ask
        for it."""
        self._gone: list[int] = []
        """Numbers of those that the program has released since this rank last went on."""
        self.waits_for_groups = False
        """Whether ranks of other groups may ask for what was, too: it is forgotten when they have come here."""
        self._in_hooks: weakref.WeakValueDictionary[str, Optimizer] = weakref.WeakValueDictionary()
        """For a parameter of this rank, the optimizers that step in a gradient hook, which no other rank sees."""
        self.shown: dict[tuple[int, str], list[torch.Tensor | None]] = {}
        """What optimizers kept beside their state when their last step ended, by number and name of the place: the
        program may have changed its lists before a slower rank asks for what it saw in them.
        """
        self.elsewhere: Callable[[int, Any, str], Any] | None = None
        """Where state is divided over groups: finds what another group keeps for a parameter of this rank, by
        parameter; None where this rank has it. It is given an optimizer's number and what that keeps here."""
        self.kept_of_slice: Callable[[str], Any] = lambda name: None
        """Returns what members keep for their slice of a parameter, or for all of them; None for other parameters."""
        self._next = itertools.count()

    def number_of(self, optimizer: Optimizer) -> int | None:
        """Returns the number of an optimizer; None for one that has not stepped: what it keeps is what every rank has
        made alike."""
        return self._numbers.get(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Adds an optimizer that all ranks step or load."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = next(self._next)
            self._optimizers[number] = optimizer
            weakref.finalize(optimizer, self._gone.append, number)
        self._states[number] = SimpleNamespace(state=raw_state(optimizer), param_groups=optimizer.param_groups)

    def keeps(self, number: int) -> bool:
        """Returns whether another rank may ask for what optimizer `number` keeps, or has kept."""
        return number in self._states

    def num_users(self, optimizer: Optimizer) -> int:
        """Returns how many references to an optimizer's state are held here, to answer what other ranks ask."""
        state = raw_state(optimizer)
        return sum(kept.state is state for kept in self._states.values())

    def advance(self) -> None:
        """Forgets what was before: this rank's program has gone on, and none of its group can ask for it any more."""
        if not self.waits_for_groups:
            self.forget()

    def forget(self) -> None:
        """Forgets what was before: no rank can ask for it any more."""
        while self._gone:
            number = self._gone.pop()
            self._states.pop(number, None)
            for key in [key for key in self.shown if key[0] == number]:
                del self.shown[key]

    def add_in_hook(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        """Adds an optimizer that this rank alone steps, in a gradient hook of one of its parameters."""
        self._in_hooks.update(dict.fromkeys(names, optimizer))

    def numbered(self) -> list[tuple[int, Optimizer]]:
        """Returns the optimizers that all ranks step, with their numbers."""
        return sorted(self._optimizers.items())

    def answer(self, number: int | None, name: str, places: Sequence[int] | None = None) -> Answer:
        """Returns what optimizer `number`, or the one that steps in a hook, keeps for a parameter of this rank; a list
        of its tensors at `places`, if these are given."""
        if number is None:
            in_hook = self._in_hooks.get(name)
            states = {} if in_hook is None else raw_state(in_hook)
        elif number in self._states:
            kept = self._states[number].state
            states = None if self.elsewhere is None else self.elsewhere(number, kept, name)
            states = kept if states is None else states
            if (in_slices := self.kept_of_slice(name)) is not None:
                states = {self.parameters[name].tensor: in_slices}
        else:
            raise RecordError(
                f"the optimizer of {name} is no more on the rank that owns it.",
                why="its program has released the optimizer.",
                hint="keep the optimizer on every rank until its state has been read",
            )
        parameter = self.parameters[name].tensor
        kept = states.get(parameter)
        if places is not None:
            tensors = tensors_in(kept)
            kept = [tensors[place] for place in places]
        return self.pack(kept, parameter.device)

    @staticmethod
    def pack(state: Any, device: torch.device) -> Answer:
        """Packs what an optimizer keeps for a parameter on `device`."""
        template, tensors = flatten(state)
        tensors = [tensor._value.data if type(tensor) is LazyTensor else tensor for tensor in tensors]
        header = {
            "structure": structure_to_json(template, [meta_of(tensor.detach().cpu()) for tensor in tensors]).decode(),
            "is_beside": [tensor.device == device for tensor in tensors],
        }
        return header, tensors

    def kept(self, number: int, name: str, places: Sequence[int]) -> list[torch.Tensor | None]:
        """Returns tensors that optimizer `number` keeps here; None for one that it keeps no more."""
        shown = self.shown.get((number, name))
        if shown is not None:
            return [shown[place] if place < len(shown) else None for place in places]
        optimizer: Any = self._optimizers.get(number)
        if optimizer is None:
            optimizer = self._states.get(number, SimpleNamespace(state={}, param_groups=[]))
        if self.elsewhere is not None:
            states = self.elsewhere(number, raw_state(optimizer), name)
            if states is not None:
                optimizer = SimpleNamespace(state=states, param_groups=[])
        if (in_slices := self.kept_of_slice(name)) is not None:
            optimizer = SimpleNamespace(state={self.parameters[name].tensor: in_slices}, param_groups=[])
        return find_kept(optimizer, {id(item.tensor): item for item in self.parameters.values()}, name, places)

    @staticmethod
    def unpack(header: dict[str, Any], found: Sequence[torch.Tensor], device: torch.device | None = None) -> Any:
        """Unpacks what `answer` has given: a dictionary, or None where the parameter has not been trained yet.

        What lay on the parameter's device comes to `device`, if one is given.
        """
        structure, beside = header.get("structure"), header.get("is_beside")
        if not isinstance(structure, str) or not isinstance(beside, list):
            raise damaged("what an optimizer keeps, without its parts")
        template, metas = structure_from_json(structure.encode(errors="replace"))
        if not len(metas) == len(found) == len(beside):
            raise damaged("what an optimizer keeps, with other tensors than its structure has")
        tensors: list[torch.Tensor] = []
        for data, meta, is_beside in zip(found, metas, beside, strict=True):
            if tuple(data.shape) != meta.shape or data.dtype != meta.dtype:
                raise damaged("what an optimizer keeps, with another shape than it says")
            tensor = as_laid_out(meta).copy_(data)
            tensors.append(tensor.to(device) if device is not None and is_beside else tensor)
        state = rebuild(template, tensors)
        if type(state) is dict:  # names as the optimizer has them, once: a file of the state has each once
            state = {sys.intern(name) if type(name) is str else name: item for name, item in state.items()}
        return state


def as_laid_out(meta: Meta) -> torch.Tensor:
    """Memory for a tensor: in its own order if that has no gaps, else in that of its shape."""
    expected, is_dense = 1, len(meta.stride) == len(meta.shape)
    for step, size in sorted(zip(meta.stride, meta.shape, strict=False)):
        is_dense &= size == 1 or step == expected
        expected *= size
    if not is_dense:
        return torch.empty(meta.shape, dtype=meta.dtype)
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)


def placed_in(optimizer: Optimizer, placed: Mapping[int, Placed]) -> list[Placed]:
    """Returns the parameters of distributed models that `optimizer` has, in its order."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return [placed[id(tensor)] for tensor in tensors if id(tensor) in placed]


def for_this_rank(
    optimizer: Optimizer, state: Mapping[str, Any], placed: Mapping[int, Placed]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Divides a state dictionary that every rank loads.

    Returns:
        What it has for each parameter of a distributed model, by name, and the dictionary with tensors that need no
        memory in the place of those for other ranks' parameters.
    """
    given = dict(getattr(state, "given", ())) or dict(_given_for(optimizer, state, placed))
    return given, _without_others(optimizer, state, placed)


def _given_for(
    optimizer: Optimizer, state: Mapping[str, Any], placed: Mapping[int, Placed]
) -> Iterator[tuple[str, Any]]:
    """Yields the name of each parameter of a distributed model, and what a whole state dictionary has for it."""
    names = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    tensors = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, tensor in zip(names, tensors, strict=False):  # the optimizer itself complains of other numbers
        if id(tensor) in placed:
            yield placed[id(tensor)].name, state["state"].get(name, {})


def _without_others(optimizer: Optimizer, state: Mapping[str, Any], placed: Mapping[int, Placed]) -> dict[str, Any]:
    """Returns a whole state dictionary, with tensors that need no memory in the place of those for other ranks'
    parameters."""
    names = itertools.chain.from_iterable(group["params"] for group in state["param_groups"])
    tensors = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    elsewhere = {
        name: placed[id(tensor)]
        for name, tensor in zip(names, tensors, strict=False)  # the optimizer itself complains of other numbers
        if id(tensor) in placed and not placed[id(tensor)].is_owned
    }

    def placeholder(tensor: torch.Tensor, most: int) -> torch.Tensor:
        is_small = tensor.dim() == 0 or tensor.numel() > most
        return tensor if is_small else torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)

    kept = {
        name: map_tensors(item, lambda tensor, most=elsewhere[name].meta.numel: placeholder(tensor, most))
        if name in elsewhere
        else item
        for name, item in state["state"].items()
    }
    return {**state, "state": defaultdict(dict, kept) if isinstance(state["state"], defaultdict) else kept}
