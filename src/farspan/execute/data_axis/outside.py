"""Trained tensors outside the model, in groups: a learned weight of the loss, a module that stays whole.

Every rank has them. Their gradients are averaged over the groups where those of the model are, so they stay the same
in all groups. Which they are is found where the program uses them as such: a parameter whose `.grad` it reads or that
an optimizer steps, and whatever an optimizer steps beside parameters of the model. All groups find them in the same
order. Another tensor that requires grad is an input, and the group's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import meta_of
from farspan.execute.data_axis.gradient_buckets import Bucket, Trained, bucket_layout
from farspan.execute.data_axis.window import Additions, Groups, Window
from farspan.torch_private import DisableTorchFunction, raw_grad

if TYPE_CHECKING:
    from farspan.comm.collectives import Collectives, Pending
    from farspan.graph import Meta

__all__ = ["TrainedOutside"]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A trained tensor outside the model.

    Attributes:
        name: For a person.
        meta: Of the tensor.
        alive: Gives the tensor, as long as the program has it.
    """

    name: str
    meta: Meta
    alive: Any

    @property
    def tensor(self) -> torch.Tensor:
        """Returns it; where the program has released it, one like it that has no gradient."""
        tensor = self.alive()
        return (
            torch.zeros(self.meta.shape, dtype=self.meta.dtype, device=self.meta.device) if tensor is None else tensor
        )


class TrainedOutside:
    """The trained tensors outside the model, on one rank; to a `Window` it is what averages.

    Args:
        groups: The rank's data axis.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._items: list[_Tensor] = []
        self._numbers: dict[int, int] = {}
        """The number of each, by id."""
        self._hooks: dict[str, Any] = {}
        """What says of each that autograd has added to its gradient."""
        self._touched: dict[str, None] = {}
        self._buckets: list[Bucket] = []
        """The buckets in which the gradients of the latest window are averaged."""
        self._compared: set[str] = set()
        """Those that have been compared between the groups."""

    @property
    def is_due(self) -> bool:
        """Returns whether something has been added to their gradients since they were averaged."""
        return bool(self._touched)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """The program trains these; those that it is known to train already are left out."""
        with DisableTorchFunction():
            for tensor in tensors:
                number = self._numbers.get(id(tensor))
                is_known = number is not None and self._items[number].alive() is tensor
                if not is_known and tensor.requires_grad and tensor.is_leaf:
                    self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        number, meta = len(self._items), meta_of(tensor)
        name = f"trained tensor {number} outside of the model ({meta})"
        self._items.append(_Tensor(name, meta, weakref.ref(tensor)))
        self._numbers[id(tensor)] = number
        if raw_grad(tensor) is not None:
            self._touched[name] = None
        self._hooks[name] = tensor.register_post_accumulate_grad_hook(lambda _: self._touched.update({name: None}))

    def discard(self, tensors: Iterable[torch.Tensor]) -> None:
        """These become parameters of a model that is distributed: nothing here refers to them any more."""
        for tensor in tensors:
            number = self._numbers.pop(id(tensor), None)
            if number is not None and self._items[number].alive() is tensor:
                item = self._items[number]
                self._items[number] = _Tensor(item.name, item.meta, lambda: None)
                self._hooks.pop(item.name).remove()
                self._touched.pop(item.name, None)

    def touch(self, tensor: torch.Tensor) -> None:
        """The program has set the gradient of one that it is known to train."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            self._touched[self._items[number].name] = None

    def window(self, number: int) -> Window:
        """Begins to average what has been added; all ranks of all groups call it."""
        return Window(number, self._items, self._touched, Additions(), self)

    def end(self) -> None:
        """A window is over: all groups have the mean."""
        self._touched.clear()

    def to_compare(self, *, compares_all: bool) -> list[_Tensor]:
        """Returns those of the latest window that are to be compared between the groups.

        Args:
            compares_all: Whether those too that have been compared before.
        """
        items = [item for bucket in self._buckets for item in bucket.members if isinstance(item, _Tensor)]
        items = [item for item in items if compares_all or item.name not in self._compared]
        self._compared.update([item.name for item in items])
        return items

    # What a window asks for.

    @property
    def num_groups(self) -> int:
        return self._groups.num_groups

    @property
    def peers(self) -> Collectives:
        return self._groups.peers

    @property
    def outlives_losses(self) -> bool:
        return self._groups.outlives_losses

    def buckets_of(self, own: Sequence[Trained], mask: bytes) -> list[Bucket]:
        """Returns how the gradients are laid out of those that take part."""
        self._buckets = bucket_layout([item for item, is_in in zip(own, mask, strict=True) if is_in])
        return self._buckets

    def watch(self, placed: Trained) -> None:
        """Nothing to watch: all has been added by now."""

    def wait(self, work: Pending) -> None:
        self._groups.wait(work)
