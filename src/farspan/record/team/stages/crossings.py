"""Operations run on the stage of their module, and tensors of other stages come to its members.

stage 0   rank:0&rank:1    x0  x1        each has all of x, or its part
                            |   |
stage 1   rank:2&rank:3    x0  x1        a copy, once in each micro-batch; its gradient comes back once

Between modules data go on from where the latest are. What is written, or of which the result is a view, stays where it
is: a copy would not show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from farspan.call.infer.entry import Unknown
from farspan.call.modes import current_modes
from farspan.call.pytree.template import flatten_arguments, map_tensors
from farspan.graph import Call, Value
from farspan.record.ops.op_placement import latest_stage
from farspan.record.team.rules.protocol import Rules
from farspan.record.team.team_tensor import SplitStage, TeamTensor, used, whole_of
from farspan.record.tensor import LazyTensor

__all__ = ["Crossings"]


class Crossings:
    """What members of split stages have of tensors from elsewhere, in the current micro-batch.

    Args:
        splitting: Records the operations of split stages.
    """

    def __init__(self, splitting: Rules) -> None:
        self.splitting = splitting
        self.are_possible = False
        """True if there are several stages, so that tensors may have to cross."""
        self._stages: dict[int, SplitStage] = {}
        """The split stage that a stage of the recorder belongs to."""
        self._copies: dict[tuple[tuple[Any, ...], int, bool], TeamTensor] = {}
        """By the values, the stage, and whether they are parts that each member puts together."""

    def add(self, splits: Iterable[SplitStage], plain: Iterable[int]) -> None:
        """Take note of split stages, and of the numbers of those that one member runs alone."""
        known = list(dict.fromkeys(splits))
        for split in known:
            for number in (split.home, *split.members):
                self._stages.setdefault(number, split)
        for split in known:
            for number in split.owners:
                self._stages.setdefault(number, split)
        self.are_possible |= len(set(self._stages.values())) > 1 or any(number not in self._stages for number in plain)

    def clear(self) -> None:
        """The micro-batch that has been recorded ends."""
        self._copies.clear()

    def has_copy(self, tensor: Any) -> bool:
        """Returns whether a tensor is what members have of one from elsewhere."""
        return any(tensor is copy for copy in self._copies.values())

    def everywhere(self, x: Any, split: SplitStage) -> TeamTensor:
        """Returns `x` as each member has it: a copy of its own, whose gradient comes back once."""
        if type(x) is TeamTensor and (x._dim is None or x.is_by_positions):
            near = self.moved(x, split)
            return near if near._dim is None else self._gathered(near)
        whole = x.join() if type(x) is TeamTensor else x
        return self._copied([whole] * len(split.members), split, None)

    def moved(self, x: TeamTensor, split: SplitStage) -> TeamTensor:
        """Returns `x` as the members of a split stage have it: all of it, or the parts that it has."""
        if x._split == split:
            return x
        if len(split.members) != len(x._parts):
            return self.everywhere(self.splitting.join(x, "a stage of another number of ranks takes it"), split)
        return self._copied(used(x)._parts, split, x)

    def brought(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Returns the arguments of an operation as the members of the stage have them on which it runs; None where it
        is to run on wholes.

        Args:
            function: Which.
            args: As the program gives them.
            kwargs: By name.
        """
        template, tensors = flatten_arguments(args, kwargs)
        teams = [item for item in tensors if type(item) is TeamTensor]
        if not teams:
            return args, kwargs
        split = self.splitting.current or self._stages.get(latest_stage(self._values(tensors)))
        if split is None:
            return None
        if all(item._split == split for item in teams):
            return args, kwargs
        metas = [self.splitting.meta_of(item) for item in tensors]
        entry = self.splitting.recorder.predict(function, template, metas, current_modes())
        if isinstance(entry, Unknown):
            return None
        staying = [tensors[number] for number in (*entry.mutated, *entry.shares, *entry.same_as) if number >= 0]
        stays = next((item for item in staying if type(item) is TeamTensor), None)
        to = split if stays is None else stays._split
        return map_tensors((args, kwargs), lambda item: self.moved(item, to) if type(item) is TeamTensor else item)

    @contextlib.contextmanager
    def placed(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Lets an operation in the body, which no team's tensor comes to, run on the stage of its module: what it takes
        comes from another."""
        recorder, split = self.splitting.recorder, self.splitting.current
        values = self._values([item for item in tensors if type(item) is LazyTensor])
        is_near = any(self._stages.get(value.stage) == split for value in values)
        if split is None or recorder.here or not values or is_near:
            yield
            return
        recorder.here = (split.home, *split.members, *split.owners)
        try:
            yield
        finally:
            recorder.here = ()

    def _gathered(self, x: TeamTensor) -> TeamTensor:
        """Returns what each member puts together of the parts of all."""
        dim, split, parts = x._dim, x._split, used(x)._parts
        key = (self._arguments(parts), split.home, True)
        found = self._copies.get(key)
        if found is None:
            function, given = (torch.cat, ()) if x._sections == 1 else (whole_of, (x._sections,))
            own = [self.splitting.record(function, (list(parts), dim, *given), stage) for stage in split.members]
            found = self._copies[key] = TeamTensor.of(self.splitting, split, own, None)
        return found

    def _copied(self, parts: Sequence[Any], split: SplitStage, like: TeamTensor | None) -> TeamTensor:
        splitting = self.splitting
        key = (self._arguments(parts), split.home, False)
        found = self._copies.get(key)
        if found is None:
            own = [splitting.record(torch.clone, (part,), at) for part, at in zip(parts, split.members, strict=True)]
            if like is None:
                found = TeamTensor.of(splitting, split, own, None)
            else:
                meta = None if like._dim is None else like._value.meta
                found = TeamTensor.of(splitting, split, own, like._dim, like._weights, meta, like._sections)
            self._copies[key] = found
        return found

    def _arguments(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self.splitting.recorder.argument(part) for part in parts])

    def _values(self, tensors: Sequence[Any]) -> list[Value]:
        """Returns what is recorded of tensors, and of parameters among them."""
        recorder, found = self.splitting.recorder, list[Value]()
        for item in tensors:
            placed = recorder.placed.get(id(item))
            if type(item) is TeamTensor:
                found += [part._value for part in item._parts]
            elif type(item) is LazyTensor:
                found.append(item._value)
            elif placed is not None:
                found.append(recorder.value_of(placed))
        return [value for value in found if value.call is None or type(value.call) is Call]
