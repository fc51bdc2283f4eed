"""Lets parameters lie in slices where they are used, and be whole again: all ranks together, between two steps.

    whole       owner     p, p.grad, state[p]                   slices go out and gradients come in, in each step
    in slices   member    its slice, with gradient and state    a step of the loop moves none of them
                owner     p without memory: who reads it gets the slices from their members

An optimizer that treats each element by itself makes of a slice what it would have made of it in the whole. So after a
step in which each member has used one slice of a parameter, and nobody the whole, the members get theirs to keep. What
is not of the common loop brings all of them home, which is always right: a write into a parameter, its use as a whole
with gradient, what is loaded. A program that does so often stays with whole ones for longer each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from farspan.call.leaf import Leaf, Placed
from farspan.execute.optimizers.kept_state import raw_state
from farspan.execute.optimizers.own import make_own
from farspan.execute.optimizers.states import placed_in
from farspan.execute.slices.moves import Moves
from farspan.execute.slices.parts import joined
from farspan.graph import Graph, Value
from farspan.torch_private import (
    DisableTorchFunction,
    raw_grad,
    set_raw_grad,
    set_version,
)

if TYPE_CHECKING:
    from farspan.execute.running import Running

__all__ = ["SlicesInPlace"]

_OF_EACH_ELEMENT = frozenset(
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ]
)
"""Their steps make what an element becomes of that element, its gradient and what was kept for it. Adafactor and Muon
look at whole matrices.
"""
_LONGEST_WAIT = 1024
"""Steps after which parameters may lie in slices again, however often they have come home."""


@dataclass(slots=True)
class _Patience:
    """How long the parameters of an optimizer stay whole after they have come home.

    Attributes:
        num_quiet: Its steps since they have last come home, or gone into slices.
        wait: For how many they stay whole.
    """

    num_quiet: int = 0
    wait: int = 1

    def put_off(self) -> None:
        """They have come home: let them stay whole for longer than the last time."""
        self.wait, self.num_quiet = min(2 * self.wait, _LONGEST_WAIT), 0


class SlicesInPlace(Moves):
    """The slices that one rank owns, of parameters of its split stages: when they are used, and when not."""

    def __init__(self, engine: Running) -> None:
        super().__init__(engine)
        self.owned.come_home, self.owned.note_written = self.come_home, self.note_written
        engine.masks.owned = self.owned
        engine.values.optimizers.kept_of_slice = self._kept_of_slice
        self._patience: weakref.WeakKeyDictionary[Optimizer, _Patience] = weakref.WeakKeyDictionary()

    # For optimizers.

    def begin_step(self) -> None:
        """An optimizer is about to step; all ranks call it."""
        owned = self.owned
        if owned.slices:
            votes = self.engine.agreement.gather("is anything in slices in use", b"1" if owned.is_looked_at else b"")
            if any(votes):
                self.come_home("the program looks at what lies in slices")

    def has_stepped(self, optimizer: Optimizer, placed: Sequence[Placed], *, is_share: bool) -> None:
        """A step is over; all ranks call it.

        Args:
            optimizer: That has stepped.
            placed: Its parameters.
            is_share: Whether each rank has stepped its own parameters alone.
        """
        engine, owned = self.engine, self.owned
        used = {item.name: layout for item in placed if (layout := owned.used.pop(item.name, None)) is not None}
        self._drop_late(placed)
        patience = self._patience_of(optimizer)
        patience.num_quiet += 1
        if any(item.name in owned.slices for item in placed):
            if patience.num_quiet > patience.wait:
                patience.wait = 1
            return
        if not is_share or patience.num_quiet < patience.wait or type(optimizer) not in _OF_EACH_ELEMENT:
            return
        if not used or engine.groups.num_groups > 1 or engine.recorder.hooks.are_there:
            return
        layouts = {item.name: used[item.name] for item in placed if item.name in used and self._may_lie(item)}
        if not layouts:
            return
        items = self._kept_alone(optimizer, [item for item in placed if item.name in layouts])
        if self.divide(optimizer, items, layouts):
            patience.num_quiet = 0
        else:
            patience.put_off()

    def spread(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what this rank steps of the parameters in a group of an optimizer."""
        placed, found = self.engine.recorder.placed, list[torch.Tensor]()
        for item in [placed[id(tensor)] for tensor in tensors]:
            found += [each.tensor for each in self.owned.slices.get(item.name, (item,)) if each.is_owned]
        return found

    def states(self) -> dict[torch.Tensor, Any]:
        """Returns what optimizers keep for this rank's slices, by slice."""
        return {self.engine.parameters[name].tensor: kept for name, kept in self._kept.items()}

    def keeps(self, optimizer: Optimizer, item: Placed) -> bool:
        """Returns whether members keep what an optimizer keeps for a parameter."""
        known, state = self._optimizers.get(item.name, (None, None))
        return known is not None and known() is optimizer and raw_state(optimizer) is state

    def has_given_away(self, optimizer: Optimizer, item: Placed) -> bool:
        """Returns whether this rank owns a parameter, and members have what an optimizer keeps for it."""
        return item.is_owned and item.name not in self._shown and self.keeps(optimizer, item)

    def look(self, optimizer: Optimizer) -> None:
        """The program may look at what an optimizer keeps, and change it: its parameters' owners have all of it."""
        for name in self.owned.slices:
            item = self.engine.parameters[name]
            if self.keeps(optimizer, item):
                self.owned.is_looked_at = True
                if item.is_owned and item.name not in self._shown:
                    raw_state(optimizer)[item.tensor].update(self.kept_of(optimizer, item))
                    self._shown.add(item.name)

    def kept_of(self, optimizer: Optimizer, item: Placed) -> dict[str, torch.Tensor | None]:
        """Returns what an optimizer keeps for a parameter in slices, as a whole, for this rank alone."""
        number, parts = self.engine.values.optimizers.number_of(optimizer), list[Any]()
        with torch.inference_mode(False):  # it may be kept
            for each in self.owned.slices[item.name]:
                own = self._kept.get(each.name)
                device = item.meta.device
                if own is None:
                    own = self.engine.values.pull_state(self._rank_of(each), number, each.name, device)
                parts.append(own)
            nothing = self._nothing[item.name]
            return {
                key: None if key in nothing else make_own(self._joined(item, [part[key] for part in parts]))
                for key in self._keys[item.name]
            }

    def _kept_of_slice(self, name: str) -> Any:
        """Returns what is kept here for a slice, or for a parameter in slices; None for other parameters."""
        if name not in self.owned.slices:
            return self._kept.get(name)
        optimizer = self._optimizers[name][0]()
        if optimizer is None or name in self._shown:
            return None
        return self.kept_of(optimizer, self.engine.parameters[name])

    # For what reads parameters.

    def before_run(self, graphs: Sequence[Graph]) -> None:
        """`graphs` are about to run: what they use as a whole, with gradient, or write into, comes home."""
        slices, used = self.owned.slices, self.owned.used
        if not (slices or used or self._late):
            return
        self._freeze()
        values = [value for graph in graphs for value in graph.sources if value.name and type(value.name) is str]
        used.update(dict.fromkeys([value.name for value in values]))
        for graph in graphs:
            for call in graph.calls:
                if type(call.target) is Leaf:
                    used.update(dict.fromkeys(call.target.parameter_names))
        in_slices = [value for value in values if value.name in slices]
        if not any(name in used and used[name] is None for name in slices):
            self.note_written(_written_names(graphs) if self._late else ())
            return
        name = _needed_whole(graphs, slices)
        if name:
            self._unite_all(f"{name} is used as a whole")
        if self._late:
            self.note_written(_written_names(graphs))
        for value in in_slices:
            item = self.engine.parameters[value.name]
            if item.is_owned and name:
                with DisableTorchFunction():  # nothing of this is the program's
                    value.data = item.tensor if value.meta.is_parameter else item.tensor.detach()
            elif item.is_owned:  # none of the members goes on before this rank has begun
                value.data = self.fetch([value.name])[value.name]

    def bring_late(self) -> None:
        """Backwards of what was recorded before parameters came home have run: their gradients come home, too."""
        engine = self.engine
        late = {name: entry for name, entry in self._late.items() if any(map(engine.masks.has_gradient, entry[1]))}
        if not late:
            return
        with (
            self._moving(),
            self._offering(
                {
                    f"{each.name}: gradient": gradient
                    for _, items in late.values()
                    for each in items
                    if each.is_owned and (gradient := raw_grad(each.tensor)) is not None
                }
            ),
        ):
            for name, (layout, items) in late.items():
                whole = engine.parameters[name]
                if whole.is_owned:
                    parts = [
                        self._pulled(each, "gradient")
                        if engine.masks.has_gradient(each)
                        else torch.zeros(each.meta.shape, dtype=each.meta.dtype, device=each.meta.device)
                        for each in items
                    ]
                    gradient, before = joined(layout, whole, parts), raw_grad(whole.tensor)
                    set_raw_grad(whole.tensor, gradient if before is None else before.add_(gradient))
        for name, (_, items) in late.items():
            self._set_gradients(items, has_gradient=False)
            engine.masks.set(engine.parameters[name], has_gradient=True)

    # Going into slices, and coming home.

    def come_home(self, reason: str) -> None:
        """Let all parameters be whole again; all ranks call it.

        Args:
            reason: Why, for people.
        """
        if self.owned.slices:
            self.engine.recorder.flush_before_change(reason)
            self._unite_all(reason)

    def bring_home(self, optimizer: Optimizer, placed: Sequence[Placed]) -> None:
        """The parameters of an optimizer that is about to step as it has not before are whole; all ranks call it."""
        names = [item.name for item in placed if item.name in self.owned.slices]
        if names:
            reason = "an optimizer steps otherwise"
            self.engine.recorder.flush_before_change(reason)
            self.unite(reason, names)
            self._patience_of(optimizer).put_off()

    def _unite_all(self, reason: str) -> None:
        optimizers = [item[0]() for item in self._optimizers.values()]
        self.unite(reason, list(self.owned.slices))
        for optimizer in dict.fromkeys(optimizers):
            if optimizer is not None:
                self._patience_of(optimizer).put_off()

    def _patience_of(self, optimizer: Optimizer) -> _Patience:
        return self._patience.setdefault(optimizer, _Patience())

    def _may_lie(self, item: Placed) -> bool:
        """Returns whether a parameter may lie in slices, by what all ranks know."""
        is_ordinary = item.kind is nn.Parameter and item.meta.dtype.is_floating_point and item.is_trained
        return (
            is_ordinary
            and not (item.is_shared or item.is_written)
            and item.name not in self.engine.recorder.hooks.hooked
        )

    def _freeze(self) -> None:
        """Let slices be trained as their parameters are: what the program has frozen since the forward gets no gradient
        there either."""
        of_late = [(name, items) for name, (_, items) in self._late.items()]
        with DisableTorchFunction():
            for name, items in (*self.owned.slices.items(), *of_late):
                is_trained = self.engine.parameters[name].tensor.requires_grad
                for tensor in [each.tensor for each in items if each.is_owned]:
                    if tensor.requires_grad != is_trained:
                        tensor.requires_grad_(is_trained)

    def _kept_alone(self, optimizer: Optimizer, items: Sequence[Placed]) -> list[Placed]:
        """Returns those of `items` of which an optimizer, by what this rank knows, keeps what can go with their slices,
        and no other one keeps anything. When other optimizers are released is not alike on all ranks.
        """
        optimizers = self.engine.values.optimizers
        if optimizer in optimizers.held:
            return []  # its state may be looked at whenever the program likes
        of_others = {
            item.name
            for _, other in optimizers.numbered()
            if other is not optimizer
            for item in placed_in(other, self.engine.recorder.placed)
        }
        state = raw_state(optimizer)
        return [item for item in items if item.name not in of_others and _may_keep(item, state.get(item.tensor) or {})]

    def note_written(self, names: Iterable[str]) -> None:
        """Something has been written into whole parameters: a backward that needs what their slices were is an error of
        autograd, as it is where it needs the whole ones."""
        for name in names:
            for each in self._late[name][1] if name in self._late else ():
                if each.is_owned:
                    set_version(each.tensor, each.tensor._version + 1)

    def _drop_late(self, placed: Sequence[Placed]) -> None:
        """An optimizer has stepped `placed`: no backward brings gradients of their slices any more."""
        names = [item.name for item in placed if item.name in self._late]
        if names:
            self.note_written(names)
            self.engine.masks.resolve()
        for name in names:
            for each in self._late.pop(name)[1]:
                self.engine.parameters.pop(each.name, None)


def _may_keep(item: Placed, kept: Mapping[str, Any]) -> bool:
    """Returns whether what an optimizer keeps for a parameter can go with its slices: of its shape, or a number."""
    return all(
        tensor is None or (isinstance(tensor, torch.Tensor) and tensor.shape in (torch.Size(item.meta.shape), ()))
        for tensor in kept.values()
    )


def _written_names(graphs: Sequence[Graph]) -> list[str]:
    """Returns the names of parameters that the program writes into."""
    calls = [call for graph in graphs for call in graph.calls if type(call.target) is not Leaf and call.entry.mutated]
    written = [(call.arguments or ())[number] for call in calls for number in call.entry.mutated]
    return [item.name for item in written if isinstance(item, Value) and type(item.name) is str]


def _needed_whole(graphs: Sequence[Graph], slices: Mapping[str, Any]) -> str:
    """Returns the name of a parameter in slices that is used as a whole, with gradient, or written into; or none."""
    for call in [call for graph in graphs for call in graph.calls]:
        if type(call.target) is Leaf:
            found = [name for name in call.target.parameter_names if name in slices]
        else:
            found = [
                item.name
                for number, item in enumerate(call.arguments or ())
                if isinstance(item, Value) and item.name in slices
                if call.entry.requires_grad or number in call.entry.mutated
            ]
        if found:
            return min(found)
    return ""
