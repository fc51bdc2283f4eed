"""What a backward changes in attributes of modules (`self.evaluations += 1` in an adjoint): known to all ranks.

    loss.backward()     goes through code of the program's, so it runs now and not at the step
    owner               evaluations += 1
    all                 gather: which call, which module, its attribute and what that is now; each sets it

If the first backward through a module, or an autograd function, has changed nothing, later ones wait as others do.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.function_call import FunctionCall
from farspan.call.pytree.template import flatten, map_tensors, rebuild
from farspan.call.wire.structure import structure_from_json, structure_to_json
from farspan.graph import Backward, Call, Changes, passed
from farspan.record.memory.parameter_copies import what_is_written
from farspan.record.tensor import LazyTensor, not_given

if TYPE_CHECKING:
    from farspan.call.leaf import Target
    from farspan.record.recording import Recording

__all__ = ["ChangingBackwards"]


class ChangingBackwards:
    """The modules and autograd functions of which a backward may change attributes."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.open: set[Any] = set()
        """The leaves and autograd functions that have had no backward yet, or change attributes in it."""
        self._running: Changes | None = None
        self.latest: dict[Any, weakref.ref[Call]] = {}
        """The latest call of a leaf that has set tensors as attributes: its backward does so again."""
        self._setting: weakref.WeakSet[Call] = weakref.WeakSet()
        """All calls that have set tensors as attributes, and may still have a backward."""
        self.are_there = False
        """Whether a backward has changed attributes."""
        self._quiet: weakref.WeakSet[Any] = weakref.WeakSet()
        """The modules and functions whose first backward has changed no attribute."""
        self._changing: set[Any] = set()
        """The modules and functions of which a backward has changed attributes."""

    def see(self, target: Target) -> None:
        """A module or an autograd function is called, maybe for the first time."""
        if getattr(target, "runs_code_backward", False) and (key := _key_of(target)) not in self._quiet:
            self.open.add(key)

    def note_setting(self, call: Call) -> None:
        """A call of a leaf, whose backward runs code, has set tensors as attributes."""
        self.latest[call.target] = weakref.ref(call)
        self._setting.add(call)

    def begin(self, backward: Backward) -> list[Call]:
        """Returns the calls behind a backward that has been recorded, whose code may change attributes in it.

        Raises:
            RecordError: It would set an attribute to the tensor of another call than the latest one.
        """
        calls: list[Call] = []
        for call in passed(backward):
            if call in self._setting and self.latest[call.target]() is not call:
                self.recorder.refuse(
                    f"{call.target}: its backward changes {call.entry.attributes[0].partition('.')[2]}",
                    why="a checkpoint sets it again, after a later call has set it to another tensor.",
                    hint="return the tensor instead, or go back before the module is called again",
                )
            if _key_of(call.target) in self.open:
                calls.append(call)
        backward.changes = self._running = Changes() if calls else None
        return calls

    def read(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on recorded values, of which one is no argument of what runs; in a backward that may, on the
        data that are here.

        Raises:
            LeakError: It may not, writes into one, or would have to give it gradient.
        """
        running = self._running
        is_write = any(item is not None for item in what_is_written(function, args, kwargs))
        if running is None or not running.is_running or is_write:
            raise not_given()

        def data_of(item: torch.Tensor) -> torch.Tensor:
            if type(item) is not LazyTensor:
                return item
            value = item._value
            if value.data is None or value.meta.requires_grad:
                raise not_given()
            running.has_read = True
            return value.data.detach()

        new_args, new_kwargs = map_tensors((args, kwargs), data_of)
        return function(*new_args, **new_kwargs)

    def end(self, backward: Backward, calls: Sequence[Call]) -> None:
        """Let all ranks know what a backward has changed. They call it together, when it has run."""
        found = self.recorder.engine.gather("attributes that a backward has changed", self._described(backward, calls))
        by_place = {(call.graph.index, call.index): call for call in calls}
        changed: set[Any] = set()
        for graph, number, module, name, is_in_place, structure in [
            entry for part in found for entry in json.loads(part)
        ]:
            target: Any = by_place[graph, number].target
            changed.add(_key_of(target))
            if not name:
                continue
            value = rebuild(structure_from_json(structure.encode())[0], [])
            _put(target.modules[module], name, value, is_in_place=is_in_place)
        self.are_there = self.are_there or bool(changed)
        quiet = {_key_of(call.target) for call in calls} - changed - self._changing
        self._changing |= changed
        self._quiet.update(quiet)
        self.open -= quiet

    def _described(self, backward: Backward, calls: Iterable[Call]) -> bytes:
        """Returns what this rank's part of a backward has changed, and entries without a name where it has read
        recorded values. Its own attributes are what they were, but for lists and dictionaries changed in place."""
        changes = backward.changes or Changes()
        entries = [[call.graph.index, call.index, 0, "", False, ""] for call in calls] if changes.has_read else []
        for call in calls:
            target: Any = call.target
            for number, module in enumerate(target.modules):
                for key in [key for key in changes.old if key[0] is module]:
                    name, old = key[1], changes.old.pop(key)
                    item = module.__dict__[name]
                    structure = structure_to_json(flatten(item)[0], []).decode()
                    entries.append([call.graph.index, call.index, number, name, item is old, structure])
                    module.__dict__[name] = old
        return json.dumps(entries).encode()


def _key_of(target: Target) -> Any:
    return target.function if type(target) is FunctionCall else target


def _put(module: Any, name: str, value: Any, *, is_in_place: bool) -> None:
    """Sets an attribute; a list or dictionary that was changed in place stays the object that the program knows."""
    if not is_in_place:
        setattr(module, name, value)
        return
    old = module.__dict__[name]
    old.clear()
    old.extend(value) if isinstance(old, list) else old.update(value)
