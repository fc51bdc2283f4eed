"""Objects that leaves hold (counters, dictionaries, histories), and what their code names (globals, variables around
functions, classes), which the program and other leaves may change as well.

A leaf's call sees what they were when it was recorded, though it runs later:

    s.log.append(1)    model(x) is recorded    s.log.append(2)    opt.step(): model runs, and sees [1]
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.leaf import LeakError
from farspan.call.pytree.template import flatten
from farspan.call.side_effects.attributes import OwnObjects
from farspan.call.side_effects.reachable import State
from farspan.call.surroundings.around import Surroundings
from farspan.call.surroundings.code import kinds_of
from farspan.call.surroundings.moments import Moments
from farspan.record.memory.parameter_copies import plain_in, what_is_written
from farspan.record.tensor import LazyTensor, memory_of, plain_versions
from farspan.torch_private import innermost

if TYPE_CHECKING:
    from farspan.call.function_call import FunctionCall
    from farspan.call.leaf import Leaf
    from farspan.record.recording import Recording

__all__ = ["HeldObjects"]

_FORGETS_AFTER = 64
"""New surroundings, of which some may be those of functions that a program has made for one batch."""
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class HeldObjects:
    """The leaves that hold some and have been recorded since the last flush."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._leaves: dict[Leaf, None] = {}
        self._surroundings: dict[Any, Surroundings] = {}
        """The surroundings of the code of leaves and autograd functions, by this code."""
        self._num_new = 0
        """How many surroundings have been added since some were last forgotten."""
        self.moments = Moments()
        self._memory: set[int] = set()
        """Memory of plain tensors that what has been recorded since the last flush uses."""
        self._run_with: set[int] = set()
        """Such memory of what has run since the last step of an optimizer: a backward that waits may need it as it is.
        By number, for a weak reference would keep the tensor from becoming a recorded one."""
        self.given: dict[int, torch.Tensor] = {}
        """By memory: plain tensors that calls recorded since the last flush have been given."""
        self._saved: list[weakref.ref[torch.Tensor]] = []
        """Plain tensors that calls have been given that have run: a backward that waits may need them as they are."""
        self.are_marked = False
        """True if the program has set an attribute of its own on a recorded tensor."""

    def see_function(self, call: FunctionCall) -> None:
        """Captures what the code of an autograd function reads: its calls will see it as it is now."""
        around = self._surroundings_of((call.function,), ())
        self._see_around(around)
        call.around = around.snapshot.number

    def _surroundings_of(self, kinds: tuple[type, ...], own: tuple[types.FunctionType, ...]) -> Surroundings:
        around = self._surroundings.get((kinds, own))
        if around is None:
            around = self._surroundings[kinds, own] = Surroundings(kinds, own)
            self._num_new += 1
        return around

    def _see_around(self, around: Surroundings) -> None:
        if not around.is_empty:
            self.moments.see(around)
            if around.snapshot.memory:
                self._memory.update(around.snapshot.memory)

    def _see_around_leaf(self, leaf: Leaf) -> None:
        around = leaf.surroundings
        if around is None:
            around = self._surroundings_of(*kinds_of(leaf.modules))
            leaf.surroundings = around
        self._see_around(around)
        if leaf.around != around.snapshot.number:
            leaf.around, leaf.state = around.snapshot.number, None

    def see(self, leaf: Leaf, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes what others have changed in the objects that `leaf` holds an argument of its calls from now on.

        Args:
            leaf: What is about to be called.
            args: What it is given.
            kwargs: And by name.

        Raises:
            LeakError: It holds a module of the model that is not below it, and so sees what that one is by now. Or it
                holds a function that knows an object which has changed. Or a recorded tensor that it is given has
                attributes of the program's own.
        """
        recorder = self.recorder
        if self.are_marked and any(type(item) is LazyTensor and item.is_marked for item in flatten((args, kwargs))[1]):
            raise LeakError("it is given a tensor on which the program has set an attribute")
        if leaf.surroundings is None or not leaf.surroundings.is_empty:
            self._see_around_leaf(leaf)
        if leaf.own_objects is not None and not leaf.own_objects.is_empty and leaf.own_objects.has_changed():
            is_behind = leaf.own_objects.has_changed_behind_callable()
            recorder.flush_before_change(f"an object that {leaf} holds has been changed")
            if is_behind:
                leaf.own_objects = None
                raise LeakError("it holds a bound method or a partial function of an object that the program changes")
            if leaf.own_objects is not None:
                leaf.attributes.update(dict.fromkeys(leaf.own_objects.changed()))
                leaf.own_objects = None
        if leaf.own_objects is None:
            if any(other.own_objects is not None and other.own_objects.has_changed() for other in self._leaves):
                recorder.flush_before_change("an object that modules hold has been changed")
            is_foreign = functools.partial(self._is_foreign, leaf)
            leaf.own_objects = OwnObjects(leaf.modules, leaf.attributes, is_foreign)
            if leaf.own_objects.recorded:
                leaf.attributes.update(dict.fromkeys(leaf.own_objects.recorded))
                leaf.own_objects = OwnObjects(leaf.modules, leaf.attributes, is_foreign)
            leaf.state = None
            self._check_foreign(leaf)
        if leaf.own_objects.memory:
            self._memory.update(leaf.own_objects.memory)
            leaf.versions = plain_versions(leaf.own_objects.tensors)
        if not leaf.own_objects.is_empty:
            self._leaves[leaf] = None

    def _forget_surroundings(self) -> None:
        """Drop those of functions that modules no longer hold: a program may give them a new one for each batch."""
        self._num_new = 0
        leaves = (*self.recorder.leaves.values(), *self.recorder.variants.values())
        used = {leaf.surroundings for leaf in leaves}
        gone = {key: around for key, around in self._surroundings.items() if key[1] and around not in used}
        for key in gone:
            del self._surroundings[key]
        self.moments.forget(set(gone.values()))

    def before_freezing(self, tensor: torch.Tensor) -> None:
        """`requires_grad` of a tensor is about to be set."""
        recorder = self.recorder
        is_placed = type(tensor) is LazyTensor or id(tensor) in recorder.placed
        if is_placed or id(tensor) in self._memory or recorder.outside.is_used:  # a backward may still come to it
            recorder.flush_before_change("requires_grad is changed")
        recorder.forget_states()

    def _keep_given(self, written: Sequence[torch.Tensor]) -> None:
        """Plain tensors are about to be written: recorded calls get copies of those that they have been given."""
        memory = {key for key in map(memory_of, map(innermost, written)) if self.given.pop(key, None) is not None}
        if not memory:
            return
        copies: dict[int, torch.Tensor] = {}
        for graph in (*self.recorder.pending, self.recorder.current):
            for call in graph.calls:
                if call.versions and call.arguments is not None and not call.entry.mutated:
                    kept = [_kept(item, memory, copies) for item in call.arguments]
                    is_other = any(one is not other for one, other in zip(kept, call.arguments, strict=True))
                    if is_other and plain_versions(call.arguments) == call.versions:
                        call.arguments, call.versions = kept, plain_versions(kept)

    def _keep(self, written: Iterable[torch.Tensor]) -> None:
        tensors = list(written)
        self._keep_given(tensors)
        if self._saved and self.recorder.has_pending():
            saved = {memory_of(item) for reference in self._saved if (item := reference()) is not None}
            if not saved.isdisjoint(map(memory_of, map(innermost, tensors))):
                self.recorder.flush_before_change("a tensor is written into that a backward needs")

    def before_write(self, function: Any, args: Any, kwargs: Any) -> None:
        """A function is about to run on plain tensors: what is recorded needs those that modules hold as they are."""
        if self.given or self._saved:
            self._keep(plain_in(args[:1] if function == _SET_DATA else what_is_written(function, args, kwargs)))
        if self._memory or (self._run_with and self.recorder.has_pending()):
            memory = self._memory | self._run_with
            is_exchange = function == _SET_DATA
            for tensor in plain_in(args[:1] if is_exchange else what_is_written(function, args, kwargs)):
                is_known = id(tensor) in memory
                if is_known or (tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memory):
                    self.recorder.flush_before_change("a tensor that a module reads is written into")
                    break

    def end_step(self) -> None:
        """An optimizer's step is over."""
        self._run_with.clear()

    def _is_foreign(self, leaf: Leaf, key: int) -> bool | None:
        """Returns whether a parameter or buffer, given by its id, is none that the leaf's owner has for it; None where
        it is neither."""
        placed = self.recorder.placed.get(key)
        return None if placed is None else placed.stage != leaf.stage or placed not in leaf.placed

    def _check_foreign(self, leaf: Leaf) -> None:
        if not leaf.own_objects.foreign:
            return
        known = {*self.recorder.leaf_parts, *map(id, self.recorder.outermost.modules())}
        for module in leaf.own_objects.foreign:
            if id(module) in known:
                leaf.own_objects = None
                raise LeakError(f"it holds a {type(module).__name__} that is not below it")

    @contextlib.contextmanager
    def as_recorded(self) -> Iterator[None]:
        """Run the body, calls of leaves, on objects as they were when these calls were recorded."""
        present = self.moments.see_all()
        leaves, self._leaves = self._leaves, {}
        given = {id(item): item for tensor in self.given.values() for item in (tensor, tensor._base)}
        given |= {id(item): item for reference in self._saved if (item := reference()) is not None}
        self._saved = [weakref.ref(item) for item in given.values() if item is not None]
        self._run_with |= self._memory
        self._memory, self.given = set(), {}
        changed = [leaf for leaf in leaves if leaf.own_objects is not None and leaf.own_objects.has_changed()]
        meanwhile: list[State] = []
        for leaf in changed:
            leaf.attributes.update(dict.fromkeys(leaf.own_objects.changed()))
            meanwhile.append(leaf.own_objects.put_back())
        try:
            yield
        finally:
            for state in reversed(meanwhile):
                state.put_back(state.changed())
            present.go_to()
            if self._num_new >= _FORGETS_AFTER:
                self._forget_surroundings()
            for leaf in leaves:
                if leaf in changed or (leaf.own_objects is not None and leaf.own_objects.has_changed()):
                    leaf.own_objects = None


def _kept(item: Any, memory: set[int], copies: dict[int, torch.Tensor]) -> Any:
    """Returns an argument, or a copy of it, the same for all calls, if its memory is about to be written."""
    if type(item) is not torch.Tensor or item.requires_grad or memory_of(item) not in memory:
        return item
    if id(item) not in copies:
        copies[id(item)] = item.detach().clone()
    return copies[id(item)]
