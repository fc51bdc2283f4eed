"""Moves generators through construction: each goes as far as it would have gone, and its state before is kept.

weight.normal_()       of a shape that has been seen: computed (a jump of the Mersenne twister, 1 ms)
                       of another one: drawn once, into memory that is used again each time
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from farspan.call.draws.generators import GENERATORS
from farspan.call.draws.mersenne import advanced, cached_normals, distance, keeps_the_same
from farspan.call.draws.movement import BY_SHAPE
from farspan.place.deferred.memory import RandomState, View, mapped
from farspan.torch_private import Form, without_any_mode

__all__ = ["Draws", "drawing_from"]


class Draws:
    """The distances by which operations on memory that has not been filled move generators."""

    def __init__(self) -> None:
        self._counts: dict[Any, int | None] = {}
        """By operation, shapes and cached normal numbers; None where it is not only a matter of how many."""
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forget_scratch(self) -> None:
        """Free what was drawn into."""
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def is_by_shape(self, form: Form) -> bool:
        """Returns whether an operation moves a generator by a distance that does not depend on data."""
        return form.name in BY_SHAPE

    def before(self, kwargs: dict[str, Any]) -> RandomState:
        """Returns what an operation is going to draw from."""
        given = kwargs.get("generator")
        return RandomState((given or torch.default_generator).get_state(), given)

    def move(self, operation: Any, args: Any, kwargs: dict[str, Any], random: RandomState) -> None:
        """Let the generator be where it is after an operation on memory that holds nothing."""
        generator = random.generator or torch.default_generator
        if generator.device.type != "cpu":
            self._draw(operation, args, kwargs)
            return
        rest = {name: value for name, value in kwargs.items() if name != "generator"}
        key = repr((str(operation), mapped((args, rest), _form), cached_normals(random.state)))
        count = self._counts.get(key)
        if count is not None:
            generator.set_state(advanced(random.state, count))
            return
        self._draw(operation, args, kwargs)
        if key not in self._counts:
            after = generator.get_state()
            is_plain = keeps_the_same(random.state, after)
            self._counts[key] = distance(random.state, after, 1 << 40) if is_plain else None

    def _draw(self, operation: Any, args: Any, kwargs: dict[str, Any]) -> None:
        operation(*mapped(args, self._stand_in), **mapped(kwargs, self._stand_in))

    def _stand_in(self, item: Any) -> Any:
        """Memory to draw into."""
        if type(item) is not View:
            return item
        last = sum((size - 1) * step for size, step in zip(item.shape, item.stride, strict=True))
        size_bytes = (last + 1) * item.dtype.itemsize
        if self._scratch.numel() < size_bytes:
            self.forget_scratch()
            self._scratch = torch.empty(-(-size_bytes // 64) * 64, dtype=torch.uint8)
        usable = self._scratch.numel() // item.dtype.itemsize * item.dtype.itemsize
        return self._scratch[:usable].view(item.dtype).as_strided(item.shape, item.stride)


@contextlib.contextmanager
def drawing_from(
    random: RandomState | None, kwargs: dict[str, Any], *, takes_generator: bool
) -> Iterator[dict[str, Any]]:
    """Let what the body does with the given arguments draw what the program would have drawn."""
    if random is None:
        yield kwargs
        return
    device = "cpu" if random.generator is None else random.generator.device
    if takes_generator:
        with without_any_mode():
            generator = torch.Generator(device)
            generator.set_state(random.state)
        yield {**kwargs, "generator": generator}
        return
    with GENERATORS:
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(random.state)
        try:
            yield kwargs
        finally:
            torch.default_generator.set_state(now)


def _form(item: Any) -> Any:
    if type(item) is View:
        return (str(item.dtype), item.shape, item.stride)
    if isinstance(item, torch.Tensor):
        return (str(item.dtype), tuple(item.shape), item.stride())
    return item
