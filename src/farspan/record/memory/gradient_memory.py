"""Gradients that the program has set to memory which it goes on using by other names: both are one, as in torch.

    flat = torch.zeros(9)     p.grad = flat[:3]      q.grad = flat[3:]
    loss.backward()           adds to p.grad and q.grad, each where its parameter is
    flat.norm()               both are copied into flat first
    flat.mul_(2)
    optimizer.step()          both are copied from flat first

So each such gradient has memory of its own, and is a pair with a part of other memory. Of a pair one may be newer than
the other, until that one is used. Both are only if a backward has added to both, and that is refused.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from farspan.call.infer.entry import intern
from farspan.call.pytree.template import flatten
from farspan.graph import Meta, Value
from farspan.record.memory.exchanged import become_plain, can_be_recorded, exchange
from farspan.record.memory.parameter_copies import plain_in
from farspan.record.memory.twins import main_of, put_value, twins_of
from farspan.record.ops.views import is_shared, root_of, taken
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction, is_wrapped, storage_at

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["GradientMemory", "Way", "become_gradient", "is_copied", "plain_gradient", "way_of"]


class Way(enum.Enum):
    """What a tensor is to the parameter whose gradient the program sets to it."""

    ALONE = "it gives its numbers, and no more"
    ITSELF = "it is the gradient from now on"
    PART = "it is memory that is used by other names: the gradient is a pair with it"


def way_of(recorder: Recording, placed: Placed, given: Any) -> Way:
    """Returns what `given` is to be to a parameter: alike on every rank."""
    if type(given) not in (LazyTensor, torch.Tensor):
        return Way.ALONE
    meta = placed.meta
    is_like = (given.shape, given.dtype, given.device, given.layout) == (
        meta.shape,
        meta.dtype,
        meta.device,
        torch.strided,
    )
    if not is_like or given.requires_grad or id(given) in recorder.placed:
        return Way.ALONE
    if type(given) is torch.Tensor:
        return Way.ITSELF if can_be_recorded(recorder, given) else Way.PART
    main: Any = main_of(given)
    root = main if main._view is None else root_of(main)
    if type(root) is not LazyTensor or root._alias_of is not None or root._is_torn:
        return Way.ALONE
    is_gradient = root._is_gradient and recorder.engine.is_present_gradient(root._value)
    return Way.PART if is_gradient or is_shared(main) or root._parts_of_gradients is not None else Way.ITSELF


def is_copied(given: LazyTensor, placed: Placed, way: Way) -> bool:
    """Returns whether the gradient of a parameter cannot lie in the memory of the tensor that it is set to."""
    value = given._value
    return way is Way.PART or value.stage != placed.stage or value.gradient_of not in ("", placed.name)


def become_gradient(recorder: Recording, placed: Placed, given: Any) -> LazyTensor:
    """Let `given`, which nobody knows by another name, be the gradient that a parameter has got; returns it."""
    meta = placed.meta
    value = Value(intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False)), placed.stage)
    known = given
    if type(known) is torch.Tensor:
        exchange(recorder, known, LazyTensor.make(value, recorder), value)
    main: LazyTensor = main_of(given)
    recorder.engine.show_gradient(placed, value)
    put_value(main, value)
    for each in (main, *twins_of(main)):
        each._is_gradient = True
    return main


def plain_gradient(given: Any) -> torch.Tensor:
    """Returns what every rank has as the gradient of a tensor outside the model, which the program sets to `given`: it
    is that from now on, too."""
    recorder, main, data = given._recorder, main_of(given), given.read()
    is_alone = main is given and main._view is None and not twins_of(main) and not is_shared(main)
    if given.requires_grad or main._alias_of is not None or main._is_torn:
        return data
    if main._is_gradient and recorder.engine.is_present_gradient(main._value):
        placed, plain = recorder.engine.parameters[main._value.gradient_of], data.clone()
        recorder.gradients.memory.add(placed, main, plain)
        return plain
    if is_alone and main._parts_of_gradients is None:
        plain = data.clone()
        become_plain(recorder, given, plain)
        return given
    return data


class _Pair:
    """A gradient, and the part of other memory that it is in the program.

    Attributes:
        name: Of the parameter.
        gradient: As the program has it.
        links: How it is taken from a recorded tensor, step by step.
        part: The part itself, of a plain tensor; None when the gradient is the parameter's no more.
        first, last: The elements of the memory that it lies between.
        is_ahead: Whether the gradient has been written into since both were the same.
        is_behind: Whether the other memory has.
        held: A recorded tensor that it is a part of, for as long as that is another gradient or has what this one has
            not, whether or not the program has it.
    """

    def __init__(self, name: str, gradient: LazyTensor, memory: _Memory, links: Any, part: torch.Tensor) -> None:
        self.name, self.gradient, self.links = name, gradient, links
        self._memory = weakref.ref(memory)
        self.part: torch.Tensor | None = part
        self.shape, self.stride, self.first = part.shape, part.stride(), part.storage_offset()
        self.last = self.first + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        self.is_ahead = self.is_behind = False
        self.held: LazyTensor | None = None

    @property
    def memory(self) -> _Memory | None:
        """What it is a part of; None if the program has that no more."""
        return self._memory()

    def overlaps(self, other: _Pair) -> bool:
        return self.first <= other.last and other.first <= self.last


class _Memory:
    """What gradients are parts of: a recorded tensor, or the memory of plain ones, which every rank has."""

    def __init__(self, root: LazyTensor | None, storage: StorageWeakRef | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self.storage = storage
        self.version = 0
        """Of the memory of plain tensors: when it was last looked at."""
        self.pairs: list[_Pair] = []

    @property
    def root(self) -> LazyTensor | None:
        return None if self._root is None else self._root()

    def is_gone(self) -> bool:
        """Returns whether the program has the plain tensors no more."""
        return self.storage is not None and self.storage.expired()

    def look(self) -> None:
        """Let the gradients know of it if the memory of plain tensors has been written into."""
        part = next((pair.part for pair in self.pairs if pair.part is not None and self.storage is not None), None)
        if part is not None and part._version != self.version:
            self.version = part._version
            self.has_been_written()

    def has_been_written(self) -> None:
        for pair in self.pairs:
            pair.is_behind, pair.held = True, self.root


class GradientMemory:
    """The gradients of one program that are parts of other memory."""

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self.pairs: dict[str, list[_Pair]] = {}
        """By parameter; empty in most programs."""
        self._is_copying = False

    # What becomes such a gradient.

    def add(self, placed: Placed, gradient: LazyTensor, given: torch.Tensor) -> None:
        """`gradient` has been made from `given`, whose memory the program may use by other names."""
        if type(given) is LazyTensor:
            main = main_of(given)
            root, links = (main, ()) if main._view is None else (main._view.root, main._view.links)
            meta = root._value.meta
            part = taken(links, torch.empty_strided(meta.shape, meta.stride, device="meta"))
            memory = root._parts_of_gradients
            if memory is None:
                memory = vars(root)["_parts_of_gradients"] = _Memory(root, None)
        else:
            storage = given.untyped_storage()
            plain = self._recorder.copies.of_gradients
            links, part, memory = None, given.detach(), plain.get(storage._cdata)
            if memory is None or memory.is_gone():
                memory = plain[storage._cdata] = _Memory(None, StorageWeakRef(storage))
                memory.version = part._version
        pair = _Pair(placed.name, gradient, memory, links, part)
        pair.held = self._held_by(memory)
        memory.pairs.append(pair)
        self.pairs.setdefault(placed.name, []).append(pair)

    def release(self, name: str) -> None:
        """The gradient is its parameter's no more. What the other memory does not have of it, it gets when it is
        used."""
        for other in self._all():
            if other.held is not None and not other.is_behind and other.held._value.gradient_of == name:
                other.held = None
        for pair in self.pairs.pop(name, ()):
            if (memory := pair.memory) is not None:
                memory.look()
                if not pair.is_ahead or pair.is_behind:
                    memory.pairs.remove(pair)
            pair.part = None
        plain = self._recorder.copies.of_gradients
        for key in [key for key, memory in plain.items() if memory.is_gone() or not memory.pairs]:
            del plain[key]

    # What happens to them.

    def note_written(self, lazy: LazyTensor) -> None:
        """The program has written into a recorded tensor, or into a view of it."""
        if not self._is_copying:
            for pair in self._all():
                if main_of(pair.gradient) is lazy:
                    pair.is_ahead = True
            if lazy._parts_of_gradients is not None:
                lazy._parts_of_gradients.has_been_written()

    def begin_backward(self) -> None:
        """A backward has been recorded, which may add to all gradients."""
        pairs = self._all()
        for pair in pairs:
            if not (pair.is_ahead and pair.is_behind):  # that is said when one of both is used
                self._bring(pair)
        for pair in pairs:
            pair.is_ahead = True
            if pair.memory is not None and self._held_by(pair.memory) is not None:
                pair.is_behind = True

    def _all(self) -> list[_Pair]:
        return [pair for pairs in self.pairs.values() for pair in pairs]

    # Before they are used.

    def bring(self, items: Iterable[Placed]) -> None:
        """Let the gradients of parameters be what has been written into the memory that they are parts of."""
        for item in items:
            for pair in self.pairs.get(item.name, ()):
                self._bring(pair)

    def _bring(self, pair: _Pair) -> None:
        memory = pair.memory
        if memory is None or self._is_copying:
            return
        memory.look()
        root = memory.root
        if root is not None and root._is_gradient:
            self._recorder.argument(root)  # a part of other memory itself, or old
        for other in list(memory.pairs):
            if other is not pair and other.is_ahead and other.overlaps(pair):
                self._put(memory, other)
        if not pair.is_behind:
            return
        self._check(pair, pair.is_ahead)
        pair.is_behind, pair.held = False, self._held_by(memory)
        if root is None:
            assert pair.part is not None
            self._copy(pair.gradient, pair.part.clone())
        else:
            self._copy(pair.gradient, self._take(root, pair.links))
        for other in self.pairs[pair.name]:
            other.is_ahead |= other is not pair

    def put_all(self, memory: _Memory) -> None:
        """A tensor of other memory is about to be used: let it be what its gradients have become."""
        if self._is_copying:
            return
        memory.look()
        for pair in list(memory.pairs):
            if pair.is_ahead:
                self._put(memory, pair)

    def before(self, args: Any, kwargs: Any) -> None:
        """A function is about to run on plain tensors."""
        for tensor in plain_in((args, kwargs)):
            if tensor.layout is torch.strided and not is_wrapped(tensor):
                memory = self._recorder.copies.of_gradients.get(tensor.untyped_storage()._cdata)
                if memory is not None:
                    self.put_all(memory)

    def _put(self, memory: _Memory, pair: _Pair) -> None:
        others = [other for other in memory.pairs if other is not pair and other.overlaps(pair)]
        self._check(pair, pair.is_behind or any(other.is_ahead for other in others))
        pair.is_ahead = False
        root = memory.root
        if root is not None:
            self._copy(self._take(root, pair.links), pair.gradient)
        elif memory.storage is not None and not memory.storage.expired():
            self._put_plain(memory, pair, memory.storage)
        for other in others:
            other.is_behind = True
        if pair.part is None:
            memory.pairs.remove(pair)

    def _put_plain(self, memory: _Memory, pair: _Pair, storage: StorageWeakRef) -> None:
        data, part = pair.gradient.read(), pair.part
        with torch.no_grad(), DisableTorchFunction():
            if part is None:
                part = torch.empty(0, dtype=data.dtype, device=data.device)
                part.set_(storage_at(storage.cdata), pair.first, pair.shape, pair.stride)
            part.copy_(data)
        memory.version = part._version

    def _held_by(self, memory: _Memory) -> LazyTensor | None:
        """Returns the recorded tensor that is this memory, if it is the gradient of a parameter."""
        root = memory.root
        if root is None or not root._is_gradient:
            return None
        return root if self._recorder.engine.is_present_gradient(root._value) else None

    def _take(self, root: LazyTensor, links: Any) -> Any:
        """Returns the part of a recorded tensor that `links` lead to."""
        self._is_copying = True
        try:
            part: Any = root
            for function, template, result in links:
                if root._is_gradient:
                    part = self._recorder.record(function, template, [part], None)
                else:  # other ranks may not use it now
                    part = self._recorder.deferred.take(function, template, part)
                part = flatten(part)[1][result]
            return part
        finally:
            self._is_copying = False

    def _copy(self, target: Any, source: Any) -> None:
        self._is_copying = True
        try:
            with torch.no_grad():
                self._recorder.dispatch(torch.Tensor.copy_, (target, source), {})
        finally:
            self._is_copying = False

    def _check(self, pair: _Pair, are_both_new: bool) -> None:
        if are_both_new:
            self._recorder.refuse(
                f"{pair.name}.grad is memory of another gradient, and a backward has added to both",
                why="each lies where its parameter is: what comes to one is not in the other while a backward runs.",
                hint="give each parameter its own gradient: parameter.grad = gradient.clone(), or clear them\n"
                "before the backward: optimizer.zero_grad()",
            )
