"""A unit of remat: a part of a forward whose saved activations are released, and made again when a backward first asks
for one.

    forward     autograd saves s0 s1 s2      each goes into a slot; when the piece has run the slots are emptied
    backward    the engine wants s2          the piece runs again and fills all slots that still have a node
                a node is done               its slot goes, and what is in it

The autograd graph itself is that of the forward, so that gradients are summed in the same order, hooks run once, and
whoever differentiates (a whole backward, a part of one, one that keeps the graph) need not know.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from farspan.call.draws.scope import active
from farspan.call.infer.watch import storage_id
from farspan.errors import RecordError

__all__ = ["Unit", "as_packed", "unpacks_again"]


class Unit:
    """One part of one forward that is computed again in the backward.

    Args:
        name: For people.
        fixed: The tensors it runs from (inputs, parameters). They are there anyway, so what is saved of their memory
            is kept; where the piece writes into one of them it cannot be run again, and all is kept.
    """

    def __init__(self, name: str, fixed: Sequence[torch.Tensor]) -> None:
        self.name = name
        self._fixed = list(fixed)
        self._versions = [_version_of(tensor) for tensor in fixed]
        self._memory = set(map(storage_id, fixed))
        self._slots: list[weakref.ref[_Slot] | None] = []
        """The slots of what autograd saves, in order; None for what is kept."""
        self._again: Callable[[], Any] | None = None
        self._inputs: list[tuple[torch.Tensor, int]] = []
        """What it runs again from, each with the version that it has to have."""
        self._position = 0

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Run the piece in the body."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def release(self, again: Callable[[], Any], inputs: Sequence[torch.Tensor] = ()) -> None:
        """The piece has run; `again` runs it once more from `inputs`, and draws and reads the same. It changes nothing
        else."""
        is_as_it_was = self._versions == [_version_of(tensor) for tensor in self._fixed]
        self._fixed, self._memory = [], set()
        slots = self._alive()
        if is_as_it_was and slots:
            self._again, self._inputs = again, [(tensor, _version_of(tensor)) for tensor in inputs]
            for slot in slots:
                slot.tensor = None

    @property
    def is_waiting(self) -> bool:
        """Returns whether something may still ask for what was released."""
        return self._again is not None and bool(self._alive())

    def run_again(self) -> None:
        """Fill the slots."""
        again, self._again = self._again, None
        assert again is not None, f"{self.name} has been computed again, and something is still missing"
        wanted = len(self._alive())
        inputs, self._inputs = self._inputs, []
        if any(_version_of(tensor) != version for tensor, version in inputs):
            raise RecordError(
                f"an input of {self.name} has been written to before it was computed again for the backward.",
                why="what it saves would be computed from other numbers.",
                hint="write out of place (x = x + 1), or leave it out: farspan.distribute(model, remat=[names])",
            )

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal wanted
            reference = self._slots[self._position] if self._position < len(self._slots) else None
            self._position += 1
            slot = None if reference is None else reference()
            if slot is not None:
                slot.fill(tensor, self.name)
                wanted -= 1
            if wanted == 0:
                raise _EnoughError
            return tensor.detach()

        outer, active.units = active.units, None  # a forward that differentiates may be on its way
        try:
            with contextlib.suppress(_EnoughError), saved_tensors_hooks(pack, lambda tensor: tensor):
                again()
        finally:
            active.units = outer
        if wanted:
            raise _other_than_before(self.name)

    def _pack(self, tensor: torch.Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        is_kept = storage_id(tensor) in self._memory or (tensor.is_leaf and tensor.requires_grad)
        self._slots.append(None if is_kept else weakref.ref(slot))
        return slot

    def _alive(self) -> list[_Slot]:
        slots = [reference() for reference in self._slots if reference is not None]
        return [slot for slot in slots if slot is not None]


class _EnoughError(BaseException):
    """Ends a second run once nothing more of it is needed. Not an `Exception`: the user's code must not catch it."""


class _Slot:
    """A slot in which a node of autograd finds what it has saved. The node owns it."""

    __slots__ = ("__weakref__", "meta", "tensor", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.meta = _meta_of(tensor)
        self.tensor: torch.Tensor | None = tensor.detach()  # without its node: that may be the one that owns the slot
        self.version = _version_of(tensor)

    def fill(self, tensor: torch.Tensor, name: str) -> None:
        if _meta_of(tensor) != self.meta:
            raise _other_than_before(name)
        self.tensor = tensor.detach()
        self.version = _version_of(tensor)


def _unpack(slot: _Slot) -> torch.Tensor:
    if slot.tensor is None:
        slot.unit.run_again()
        assert slot.tensor is not None
    if _version_of(slot.tensor) != slot.version:  # torch's own check does not see behind hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{slot.tensor.type()} {list(slot.tensor.shape)}], in {slot.unit.name}, is at version "
            f"{_version_of(slot.tensor)}; expected version {slot.version} instead."
        )
    return slot.tensor


def unpacks_again(hook: Any) -> bool:
    """Returns whether an unpack hook of saved tensors gives the same tensor as often as it is asked: that of a unit
    does."""
    return hook in (_unpack, as_packed)


def as_packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an unpack hook that does nothing, for those who only want to see what is saved."""
    return tensor


def _meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _other_than_before(name: str) -> RecordError:
    return RecordError(
        f"{name} did something else when it was computed again for the backward.",
        why="it depends on something outside itself that has changed since its forward.",
        hint="leave it out: farspan.distribute(model, remat=[names of other modules])",
    )
