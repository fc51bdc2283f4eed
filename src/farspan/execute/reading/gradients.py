"""The gradients that other ranks may ask this one for: the present ones, and those that the program has replaced.

    p.grad              number 0 of p
    p.grad = other      number 1; number 0 is kept for slower ranks, and for as long as the program holds it

Ranks count alike, for what replaces a gradient is done on all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from farspan.call.leaf import Placed
from farspan.graph import Value
from farspan.torch_private import raw_grad, set_raw_grad

__all__ = ["SharedGradients"]

Key = tuple[str, int]
"""The name of a parameter, and how many gradients it had before."""


class SharedGradients:
    """The gradients of one rank's parameters, by name and number."""

    def __init__(self, parameters: Mapping[str, Placed], progressed: threading.Condition, *, has_others: bool) -> None:
        self._parameters = parameters
        self._has_others = has_others
        """Whether there are other ranks; if not, nothing is kept for them."""
        self._progressed = progressed
        """The condition of this rank's logical clock, held where other ranks are answered."""
        self._num_before: defaultdict[str, int] = defaultdict(int)
        """By parameter how many gradients it had before its present one."""
        self._replaced: dict[Key, torch.Tensor] = {}
        self._shown: set[str] = set()
        """The parameters whose present gradient the program has got since the last step; slow ranks may read it."""
        self._values: defaultdict[Key, weakref.WeakSet[Value]] = defaultdict(weakref.WeakSet)
        """The values through which the program holds gradients."""

    def key_of(self, placed: Placed) -> Key:
        """Returns the name and number of its present gradient."""
        return placed.name, self._num_before[placed.name]

    def show(self, placed: Placed, value: Value) -> None:
        """The program gets `value` as the present gradient."""
        value.gradient_of, value.gradient_number = key = self.key_of(placed)
        if placed.is_owned:
            value.data = raw_grad(placed.tensor)
            if self._has_others:
                self._values[key].add(value)
                self._shown.add(placed.name)

    def may_be_read(self) -> bool:
        """Returns whether a slower rank may still read a present gradient as it is now."""
        return bool(self._shown)

    def is_present(self, value: Value) -> bool:
        """Returns whether `value`, which the program has got as a gradient, still is the parameter's."""
        return value.gradient_number == self._num_before.get(value.gradient_of, 0)

    def keep(self, placed: Placed) -> None:
        """This rank's parameter loses its gradient, which slower ranks may still read."""
        gradient = raw_grad(placed.tensor) if self._has_others else None
        if gradient is not None:
            self._replaced.setdefault(self.key_of(placed), gradient)

    def replace(self, items: Iterable[Placed], gradient: torch.Tensor | None) -> None:
        """The program puts another gradient in the place of each one's, or none; only its owner has it."""
        with self._progressed:
            for placed in items:
                if placed.is_owned:
                    self.keep(placed)
                    set_raw_grad(placed.tensor, gradient)
                    self._shown.discard(placed.name)
                self._num_before[placed.name] += 1
            self._progressed.notify_all()

    def written_into(self, placed: Placed) -> torch.Tensor:
        """Returns the gradient itself for the program, which may write into it; others get it as it is now."""
        gradient = raw_grad(placed.tensor)
        assert gradient is not None
        if self.key_of(placed) not in self._replaced:
            self._replaced[self.key_of(placed)] = gradient.detach().clone()
        return gradient

    def has_come(self, name: str, number: int) -> bool:
        """Returns whether this rank's program has got to the gradient that another one asks for."""
        return self._num_before.get(name, 0) >= number

    def find(self, name: str, number: int) -> torch.Tensor | None:
        """Returns what another rank asks for; None if it is here no more."""
        kept = self._replaced.get((name, number))
        if kept is not None:
            return kept
        return raw_grad(self._parameters[name].tensor) if self._num_before.get(name, 0) == number else None

    def keeps_released(self) -> bool:
        """Returns whether there are gradients here that the program has released: other ranks may be slower."""
        return bool(self._replaced)

    def release(self) -> None:
        """A step is over: no rank is where it could ask for what the program had released before."""
        self._shown.clear()
        present = {key for key, values in self._values.items() if any(value.is_readable for value in values)}
        for key in [key for key in self._replaced if key not in present or key == (key[0], self._num_before[key[0]])]:
            del self._replaced[key]
        for key in [key for key in self._values if key not in present]:
            del self._values[key]
