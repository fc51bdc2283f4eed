"""Moves parameters from one owner to slices at the members that use them, and back: all ranks together.

    whole -> slices     owner sets p aside      may all? --- each member takes its slice ---   p has no memory
    slices -> whole     owner takes all slices  ---------- until all have ----------------     p is real again

With the data go the gradient, if there is one, and what the optimizer keeps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from farspan.call.infer.entry import intern, meta_of
from farspan.call.leaf import Placed
from farspan.errors import RecordError
from farspan.execute.optimizers.kept_state import raw_state
from farspan.execute.optimizers.own import make_own
from farspan.execute.slices.parts import Part, Shares, joined
from farspan.execute.teams import device_of
from farspan.graph import Meta, Value
from farspan.record.parameters.away import AwayParameter
from farspan.record.parameters.parameter_values import renew_aliases_of
from farspan.record.team.slices.layout import Layout
from farspan.record.team.slices.owned import slice_names
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import (
    DisableTorchFunction,
    has_memory_of_its_own,
    has_weak_references,
    raw_grad,
    set_raw_grad,
    swap_referenced,
    tensor_of_class,
)

if TYPE_CHECKING:
    from farspan.execute.running import Running

__all__ = ["Moves"]

_TOGETHER_BYTES = 32 << 20
"""Parameters that move together take so much memory at most, or are one."""


class Moves:
    """The parameters of one rank, and its slices of parameters of all ranks, as they move.

    Args:
        engine: This rank's.
    """

    def __init__(self, engine: Running) -> None:
        self.engine = engine
        self.owned = engine.recorder.splitting.matrices.owned
        self.may_write = False
        """Whether what reads a parameter in slices may write into what it gets: never."""
        self._optimizers: dict[str, tuple[weakref.ref[Optimizer], Any]] = {}
        """By parameter, the optimizer that steps its slices, and the state of that one, with nothing for slices."""
        self._kept: dict[str, dict[str, torch.Tensor | None]] = {}
        """What the optimizer keeps for this rank's slices, by their names."""
        self._keys: dict[str, list[str]] = {}
        """Names of what the optimizer keeps for each parameter."""
        self._nothing: dict[str, frozenset[str]] = {}
        """Names of what an optimizer keeps as None, for each parameter."""
        self._shown: set[str] = set()
        """Parameters for which this rank has what is kept as a whole: its program may look at it, and change it."""
        self._late: dict[str, tuple[Layout, tuple[Placed, ...]]] = {}
        """Of parameters that have come home, the slices that a backward may still bring gradients of, by name."""
        self._offered: Mapping[str, torch.Tensor] = {}

    def note_gathering(self, duration_ns: int) -> None:
        """Operations have waited so long for data, and sought which they need."""
        self.engine.executor.waited_ns += duration_ns

    def fetch(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Returns the data of parameters in slices, for this rank alone."""
        found: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            for name in names:
                item = self.engine.parameters[name]
                parts = [self._read(each) for each in self.owned.slices.get(name, ())]
                found[name] = self._joined(item, parts) if parts else item.tensor.detach()
        return found

    def divide(self, optimizer: Optimizer, items: Sequence[Placed], layouts: Mapping[str, Layout]) -> bool:
        """Let parameters lie in slices, and return True; if all ranks find that the same ones can."""
        self.engine.masks.resolve()
        with self._moving():
            if not self._divided(optimizer, items, layouts):
                return False
        self.engine.recorder.gradients.forget()
        self.engine.parameters_changed()
        return True

    def _divided(self, optimizer: Optimizer, items: Sequence[Placed], layouts: Mapping[str, Layout]) -> bool:
        engine, state = self.engine, raw_state(optimizer)
        aside = self._set_aside(items) if items else None
        vote = b"" if aside is None else "\n".join([item.name for item in items]).encode()
        votes = engine.agreement.gather("may parameters lie in slices", vote)
        if aside is None or any(other != vote for other in votes):
            self._put_back(aside or {})
            return False
        slices = {item.name: self._slices_of(item, layouts[item.name]) for item in items}
        for part in _batches(items):
            self._divide_part(part, state, layouts, slices, aside)
        self._optimizers.update(dict.fromkeys([item.name for item in items], (weakref.ref(optimizer), state)))
        self.owned.begin({item.name: layouts[item.name] for item in items}, slices)
        return True

    def _divide_part(
        self,
        items: Sequence[Placed],
        state: Any,
        layouts: Mapping[str, Layout],
        slices: Mapping[str, Sequence[Placed]],
        aside: dict[str, torch.Tensor],
    ) -> None:
        engine = self.engine
        has_gradient = {item.name: engine.masks.has_gradient(item) for item in items}
        wholes: dict[str, Part] = {}
        for item in [item for item in items if item.is_owned]:
            data = aside.pop(item.name)
            wholes[item.name] = Part(data.detach(), raw_grad(data), state.get(item.tensor) or {})
        with self._offering(Shares(wholes, layouts)) as offered:
            for item in items:
                kept = state.get(item.tensor) or {}
                self._keys[item.name] = list(kept)
                self._nothing[item.name] = frozenset([key for key, tensor in kept.items() if tensor is None])
                for each in [each for each in slices[item.name] if each.is_owned]:
                    self._take(each, item, offered, has_gradient=has_gradient[item.name])
        for item in items:
            kept = (state.get(item.tensor) or {}) if item.is_owned else {}
            for key in [key for key, tensor in kept.items() if tensor is not None]:  # without data, as on other ranks
                kept[key] = LazyTensor.make(Value(meta_of(kept[key]), item.stage), engine.recorder)
            self._set_gradients([item], has_gradient=False)
            engine.parameters.update({each.name: each for each in slices[item.name]})
            for each in slices[item.name]:
                engine.masks.set(each, has_gradient=has_gradient[item.name])

    def _take(self, own: Placed, item: Placed, offered: Mapping[str, torch.Tensor], *, has_gradient: bool) -> None:
        """Takes a slice of this rank from the owner of the whole."""

        def taken(what: str) -> torch.Tensor:
            key = f"{own.name}: {what}"
            if item.is_owned:
                return offered[key].clone()
            return self.engine.values.pull(self._rank_of(item), "offered", key).to(own.meta.device)

        own.tensor = nn.Parameter(taken("data"))
        if has_gradient:
            set_raw_grad(own.tensor, taken("gradient"))
        nothing = self._nothing[item.name]
        self._kept[own.name] = {key: None if key in nothing else taken(f"kept {key}") for key in self._keys[item.name]}

    def unite(self, reason: str, names: Collection[str]) -> None:
        """Let parameters in slices be whole again.

        Args:
            reason: Why, for people.
            names: Of the parameters.
        """
        self.engine.barrier(reason)  # where programs differ, that is said
        self.engine.masks.resolve()
        self.engine.average_gradients(has_passed_barrier=True)  # what has come late, too: gradients are all there
        self.engine.recorder.gradients.take_up(names)
        with self._moving():
            for part in _batches([self.engine.parameters[name] for name in names]):
                self._unite_part(part)
        self.engine.recorder.gradients.come_home(names)
        self.owned.end(names)
        self.engine.parameters_changed()

    def _unite_part(self, items: Sequence[Placed]) -> None:
        owned, engine = self.owned, self.engine
        optimizers = {item.name: self._optimizers.pop(item.name)[0]() for item in items}
        whole: dict[str, Part] = {}
        own = [each for item in items for each in owned.slices[item.name] if each.is_owned]
        offered = {
            f"{each.name}: {what}": tensor for each in own for what, tensor in self._part_of(each).things().items()
        }
        with self._offering(offered):
            for item in [item for item in items if item.is_owned]:
                is_here = optimizers[item.name] is None or item.name in self._shown
                whole[item.name] = self._whole_part(item, [] if is_here else self._keys[item.name])
        for item in items:
            part, slices, has_gradient = whole.get(item.name), owned.slices[item.name], engine.masks.has_gradient(item)
            self._late[item.name] = owned.layouts[item.name], slices
            if part is not None:
                _become_real(item, part.data)
            renew_aliases_of(item)
            optimizer = optimizers[item.name]
            if part is not None and part.kept and optimizer is not None:
                raw_state(optimizer)[item.tensor].update(part.kept)
            self._set_gradients(slices, has_gradient=False)
            self._set_gradients([item], has_gradient=has_gradient, gradient=None if part is None else part.gradient)
            self._shown.discard(item.name)
            for each in slices:
                self._kept.pop(each.name, None)

    def _part_of(self, own: Placed) -> Part:
        return Part(own.tensor.detach(), raw_grad(own.tensor), self._kept[own.name])

    def _whole_part(self, item: Placed, keys: Sequence[str]) -> Part:
        """Returns what goes with a parameter of this rank, from all its members."""

        def whole(what: str) -> torch.Tensor:
            return self._joined(item, [self._pulled(each, what) for each in self.owned.slices[item.name]])

        gradient = whole("gradient") if self.engine.masks.has_gradient(item) else None
        nothing = self._nothing[item.name]
        kept = {key: None if key in nothing else make_own(whole(f"kept {key}")) for key in keys}
        return Part(whole("data"), gradient, kept)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Nothing of what is done in the body is the program's; what comes of it can be trained."""
        with self.engine.executing(), torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            yield

    @contextlib.contextmanager
    def _offering(self, offered: Mapping[str, torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
        """All ranks give what they have, and take what they need, in the body."""
        engine = self.engine
        self._offered = engine.values.offered = offered
        engine.agreement.barrier("slices are there to be taken")
        yield offered
        engine.agreement.barrier("slices have been taken")
        self._offered = engine.values.offered = {}

    def _pulled(self, own: Placed, what: str) -> torch.Tensor:
        """Returns what goes with a slice, from the member that owns it."""
        key = f"{own.name}: {what}"
        return self._offered[key] if own.is_owned else self.engine.values.pull(self._rank_of(own), "offered", key)

    def _read(self, own: Placed) -> torch.Tensor:
        """Returns the data of a slice, for this rank alone."""
        return own.tensor.detach() if own.is_owned else self.engine.values.pull_slice(self._rank_of(own), own.name)

    def _joined(self, item: Placed, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return joined(self.owned.layouts[item.name], item, parts)

    def _rank_of(self, item: Placed) -> int:
        return self.engine.teams[item.stage].leader.rank

    def _set_gradients(
        self, items: Sequence[Placed], *, has_gradient: bool, gradient: torch.Tensor | None = None
    ) -> None:
        """Put a gradient in the place of each parameter's, which its owner alone has."""
        self.engine.values.gradients.replace(items, gradient)
        for item in items:
            self.engine.masks.set(item, has_gradient=has_gradient)

    def _slices_of(self, item: Placed, layout: Layout) -> tuple[Placed, ...]:
        """Returns the slices of a parameter, without data."""
        engine, found = self.engine, list[Placed]()
        size = list(item.meta.shape)
        size[layout.dim] //= len(layout.split.members)
        for name, stage in zip(slice_names(item.name, len(layout.split.members)), layout.split.members, strict=True):
            worker = engine.teams[stage].leader
            like = torch.empty(size, device="meta")
            meta = intern(Meta(tuple(size), like.stride(), item.meta.dtype, device_of(worker), True, is_parameter=True))
            stub = StubParameter.make(name, meta, engine.recorder, is_parameter=True).requires_grad_(True)
            found.append(Placed(name, stage, stub, meta, worker.rank == engine.rank, True, nn.Parameter))
        return tuple(found)

    def _set_aside(self, items: Sequence[Placed]) -> dict[str, torch.Tensor] | None:
        """Takes the memory out of this rank's parameters; None if one of them is in other use."""
        aside: dict[str, torch.Tensor] = {}
        gradients = self.engine.recorder.gradients
        is_free = not any(gradients.is_held(item) for item in items)
        for item in [item for item in items if item.is_owned]:
            tensor = item.tensor
            is_plain = type(tensor) is nn.Parameter and tensor.is_contiguous() and has_memory_of_its_own(tensor)
            if not (is_free and is_plain) or any(alias() is not None for alias in item.aliases):
                self._put_back(aside)
                return None
            away = AwayParameter.make(item.name, self, item.meta)
            away.requires_grad_(tensor.requires_grad)
            away._is_param = True
            try:
                torch.utils.swap_tensors(tensor, away)
            except RuntimeError:  # something holds a weak reference to it
                self._put_back(aside)
                return None
            vars(tensor).update(vars(away))  # what the program has written on the parameter
            aside[item.name] = away
        return aside

    def _put_back(self, aside: Mapping[str, torch.Tensor]) -> None:
        for name, real in aside.items():
            torch.utils.swap_tensors(self.engine.parameters[name].tensor, real)


def _batches(items: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
    """Yields the parameters that move together: until they have, they are there twice."""
    part: list[Placed] = []
    size_bytes = 0
    for item in items:
        item_bytes = item.meta.size_bytes
        if part and size_bytes + item_bytes > _TOGETHER_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(item)
        size_bytes += item_bytes
    if part:
        yield part


def _become_real(item: Placed, data: torch.Tensor) -> None:
    """Let a tensor with data take the place of one without."""
    tensor = item.tensor
    real = tensor_of_class(item.kind, data, requires_grad=tensor.requires_grad)
    written = {name: value for name, value in vars(tensor).items() if name not in _OF_AWAY}
    try:
        swap = swap_referenced if has_weak_references(tensor) else torch.utils.swap_tensors
        swap(tensor, real)
    except RuntimeError as error:
        raise RecordError(
            f"{item.name} cannot be used as a whole again: its slices lie on several ranks.",
            why=f"something in this program uses the tensor itself since: {error}",
            hint="release what has been computed from the parameter, before it is written or used as a whole",
        ) from error
    vars(tensor).update(written)


_OF_AWAY = frozenset([*AwayParameter.__annotations__, "_is_param"])
