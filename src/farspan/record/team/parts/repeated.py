"""An operation that a member of a split stage does part by part, recorded again with other tensors.

What the arguments are is found once: the next time, tensors with the same metadata in the same places are the same
kind of call, and it is appended without taking arguments apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from farspan.call.infer.entry import meta_of
from farspan.call.pytree.template import rebuild, shape_of_call
from farspan.graph import Value

if TYPE_CHECKING:
    from farspan.call.infer.entry import Entry
    from farspan.call.modes import Modes
    from farspan.graph import Template
    from farspan.record.recording import Recording

__all__ = ["Repeated"]


class Repeated:
    """What one member does.

    Args:
        function: Which it calls; it draws nothing.
        template: Of its arguments.
        modes: Under which it is recorded.
    """

    __slots__ = ("_function", "_known", "_modes", "_template")

    def __init__(self, function: Any, template: Template, modes: Modes) -> None:
        self._function = function
        self._template = template
        self._modes = modes
        self._known: tuple[tuple[int, ...], Template, Entry] | None = None
        """Numbers of the tensors' metadata, and what the recorder knows of such a call."""

    def record(self, recorder: Recording, tensors: list[Any], stage: int) -> Any:
        """Records it on a stage; returns what it gives."""
        recorder.number = -1
        known = self._known
        if known is not None and (len(tensors) == 1 or len(set(map(id, tensors))) == len(tensors)):
            arguments = [recorder.argument(tensor) for tensor in tensors]
            if _numbers_of(arguments) == known[0]:
                _, template, entry = known
                return recorder.append(self._function, template, arguments, entry, stage, self._modes, tensors)
        args, kwargs = rebuild(self._template, tensors)
        result = recorder.record_call(self._function, args, kwargs, stage)
        self._known = self._found(recorder, args, kwargs)
        return result

    def _found(
        self, recorder: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, ...], Template, Entry] | None:
        """Returns what the recorder knows of a call that it has just recorded, if it goes by metadata alone."""
        tensors: list[Any] = []
        shape = shape_of_call(args, kwargs, tensors)
        if shape is None:
            return None
        numbers = _numbers_of([recorder.argument(tensor) for tensor in tensors])
        found = recorder.cache.known.get((self._function, shape, numbers, self._modes, None))
        return None if found is None or found[1].mutated else (numbers, *found)


def _numbers_of(arguments: Sequence[Any]) -> tuple[int, ...]:
    return tuple([(item.meta if isinstance(item, Value) else meta_of(item)).number for item in arguments])
