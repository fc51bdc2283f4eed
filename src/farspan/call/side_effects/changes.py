"""Describes what a module does to the lists, dictionaries and objects it is given, as part of its result.

The module runs on one rank, on a copy of its arguments; the caller's own objects are on every rank. So whatever the
call changed in a copy is described in the language of templates, its tensors are further outputs of the call, and
every rank makes the same changes to its caller's objects:

    cache.append(k)      result: template of what was returned
                         changes: ((number of the list, its new contents: what was there, and output 1), ...)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farspan.call.pytree.template import Flattener, Rebuilder

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = [
    "ATTRIBUTES",
    "Changes",
    "Described",
    "MutableArguments",
    "apply_result",
    "describe_result",
    "objects_given",
    "rebuild_arguments",
]

ATTRIBUTES = -1
"""The number of the dictionary of attributes of the leaf's modules."""
Changes = tuple[tuple[int, Any], ...]
"""(number of an argument object, template of its new contents)"""


class MutableArguments:
    """The mutable objects among a call's arguments, as they were before the call."""

    def __init__(self, objects: Mapping[int, Any]) -> None:
        self.objects = objects
        self._flattener = Flattener(_numbers(objects))
        self._before = self._describe()

    def changed(self) -> list[int]:
        """Returns the numbers of the objects that hold something else now."""
        after = self._describe()
        return [number for number, contents in after.items() if contents != self._before[number]]

    def _describe(self) -> dict[int, Any]:
        return {number: self._flattener.contents(item, -1) for number, item in self.objects.items()}


class Described(NamedTuple):
    """A call's result, and what it did to its arguments."""

    template: Template
    """The template of the result."""
    changes: Changes
    tensors: list[torch.Tensor]
    """The tensors of result and changes, in order of first appearance."""
    names_arguments: bool
    """True if the result or a change refers to an argument object."""


def describe_result(result: Any, objects: Mapping[int, Any], changed: Collection[int]) -> Described:
    """Describe a call's result and the new contents of the objects it changed."""
    flattener = Flattener(_numbers(objects))
    template = flattener.walk(result)
    changes = tuple([(number, flattener.contents(objects[number], -1)) for number in changed])
    return Described(template, changes, flattener.tensors, flattener.names_given)


def apply_result(template: Template, changes: Changes, tensors: Sequence[Any], objects: Mapping[int, Any]) -> Any:
    """Build the result, and change the caller's `objects` as the call did."""
    rebuilder = Rebuilder(tensors, objects)
    result = rebuilder.build(template)
    for number, contents in changes:
        rebuilder.refill(objects[number], contents)
    return result


def rebuild_arguments(
    template: Template, tensors: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any], MutableArguments]:
    """Copies of a leaf's arguments: positional ones, those by keyword, its modules' attributes; and what to watch."""
    rebuilder = Rebuilder(tensors)
    args, kwargs, *rest = rebuilder.build(template)
    attributes = rest[0] if rest else {}
    objects = {number: item for number, item in rebuilder.made.items() if item is not attributes and item is not kwargs}
    return args, kwargs, attributes, MutableArguments({**objects, ATTRIBUTES: attributes})


def objects_given(given: Sequence[Any]) -> dict[int, Any]:
    """Returns the caller's own objects, by the numbers the call's copies have.

    Args:
        given: Positional arguments, those by keyword, and perhaps the attributes of the leaf's modules.
    """
    flattener = Flattener()
    flattener.walk(tuple(given))
    objects = dict(flattener.seen.values())
    objects[ATTRIBUTES] = given[2] if len(given) > 2 else {}
    return objects


def _numbers(objects: Mapping[int, Any]) -> dict[int, int]:
    return {id(item): number for number, item in objects.items()}
