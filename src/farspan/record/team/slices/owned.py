"""Which parameters lie in slices: each member of their split stage owns its own, with gradient and optimizer state.

    whole       p                      one owner; members get what they use, and send back its gradient
    in slices   p [1 of 2]  p [2 of 2] parameters of the members' own stages, like any other; p itself has no memory

The program sees p alone. While p is in slices, a product reads them where they are, and `p.grad` is made of theirs.
One rank alone may read it: the slices are brought together. What needs it otherwise lets all come home first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farspan.call.infer.entry import intern
from farspan.graph import Meta, Value
from farspan.record.team.slices.gradient import SlicedGradient
from farspan.record.team.slices.layout import Layout
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["OwnedSlices", "slice_names"]


class OwnedSlices:
    """The slices that members own, as one rank knows them; what is noted here is alike on all ranks."""

    def __init__(self) -> None:
        self.layouts: dict[str, Layout] = {}
        """How each parameter lies that is in slices, by name."""
        self.slices: dict[str, tuple[Placed, ...]] = {}
        """Its slices, one for each member."""
        self.whole_names: dict[str, str] = {}
        """The parameter of each slice there is, or was: a backward may still come to one."""
        self.used: dict[str, Layout | None] = {}
        """In which layout each parameter was used since its optimizer last stepped; None if not in one alone."""
        self.come_home: Callable[[str], None] = lambda reason: None
        """Lets all parameters be whole again; all ranks call it."""
        self.note_written: Callable[[Iterable[str]], None] = lambda names: None
        """To be called on all ranks when the program has written into parameters, which are whole."""
        self.is_looked_at = False
        """Whether this rank's program has looked at what lies in slices otherwise than its loop does."""
        self._values: dict[str, Value] = {}

    def note(self, placed: Placed, layout: Layout | None) -> None:
        """A parameter is used in slices; None: in another way than one for each member."""
        if self.used.setdefault(placed.name, layout) != layout:
            self.used[placed.name] = None

    def need_whole(self, placed: Placed, what: str) -> None:
        """Something is about to be done, on all ranks, to a parameter as a whole."""
        self.used[placed.name] = None
        if placed.name in self.slices:
            self.come_home(f"{placed.name} {what}")

    def own(self, placed: Placed, layout: Layout, member: int, recorder: Recording) -> LazyTensor | None:
        """Returns the slice that a member owns, as a source of the current step; None where the parameter is whole."""
        if placed.name not in self.slices:
            return None
        if self.layouts[placed.name] != layout or not placed.is_trained:
            self.come_home(f"{placed.name} is used otherwise")
            return None
        own = self.slices[placed.name][member]
        value = self._values.get(own.name)
        if value is None:
            value = self._values[own.name] = Value(own.meta, own.stage, name=own.name)
            if own.is_owned:
                with DisableTorchFunction():
                    value.data = own.tensor
        return LazyTensor.make(value, recorder)

    def gradient_of(
        self, recorder: Recording, placed: Placed, parts: Sequence[LazyTensor], known: object
    ) -> LazyTensor:
        """Returns the gradient of a parameter in slices, whose gradients are `parts`; `known`, if it is just that."""
        if type(known) is SlicedGradient and all(map(operator.is_, known._parts, parts)):
            return known
        meta = placed.meta
        meta = intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False))
        return SlicedGradient.of(recorder, placed, self.layouts[placed.name], parts, meta)

    def whole_gradient(self, gradient: Any) -> Any:
        """Returns a gradient that becomes that of another parameter as one recorded tensor, which both are; what is no
        gradient of a parameter in slices, as it is."""
        if type(gradient) is not SlicedGradient:
            return gradient
        self.come_home("the gradient of one parameter is given to another")
        whole = vars(gradient)["_home"] = gradient.whole()
        return whole

    def forget_values(self) -> None:
        """A step has ended, or parameters were written: from now on they are new sources."""
        self._values.clear()

    def spread(self, items: Iterable[Placed]) -> list[Placed]:
        """Returns `items`, with the slices of each that is in slices in its place."""
        return [each for item in items for each in self.slices.get(item.name, (item,))]

    def begin(self, layouts: Mapping[str, Layout], slices: Mapping[str, Sequence[Placed]]) -> None:
        """Parameters are in slices from now on."""
        self.layouts.update(layouts)
        self.slices.update({name: tuple(items) for name, items in slices.items()})
        self.whole_names.update({item.name: name for name, items in slices.items() for item in items})

    def end(self, names: Collection[str]) -> None:
        """Parameters are whole again."""
        for name in names:
            del self.layouts[name], self.slices[name]
        self.is_looked_at = self.is_looked_at and bool(self.slices)
        self._values.clear()


def slice_names(name: str, num_parts: int) -> list[str]:
    """Returns the names by which ranks know the slices of a parameter."""
    return [f"{name} [{number} of {num_parts}]" for number in range(1, num_parts + 1)]
