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
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from farspan.call.infer.entry import intern
from farspan.call.pytree.template import flatten
from farspan.graph import Meta, Value
from farspan.record.memory.exchanged import become_plain, can_be_recorded, exchange
from farspan.record.memory.of_gradients.gradient_pairs import Memory, Pair
from farspan.record.memory.parameter_copies import plain_in
from farspan.record.memory.twins import main_of, put_value, twins_of
from farspan.record.ops.views import is_shared, root_of, taken
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction, is_wrapped, raw_grad, storage_at

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["GradientMemory", "Way", "become_gradient", "is_copied", "plain_gradient", "way_of"]


_GIVES_MEMORY = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.share_memory_}
"""What gives the memory of a plain tensor to another library."""


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


class GradientMemory:
    """The gradients of one program that are parts of other memory."""

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self.pairs: dict[str, list[Pair]] = {}
        """The pairs of each gradient, by the name of its parameter; empty in most programs."""
        self._is_copying = False
        self._of_gradients: dict[str, Memory] = {}
        """The memory of gradients of which other gradients are parts, by the name of the parameter."""
        self._most_plain = 16
        """How many memories of plain tensors are known before those that are gone are forgotten."""
        self._is_any_outside = False
        """Whether another library may use the memory of some plain tensors."""
        self._in_step: list[tuple[Placed, torch.Tensor | None, int]] = []
        """In an optimizer's step: the gradients, and how often they had been written into before it."""

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
                memory = vars(root)["_parts_of_gradients"] = Memory(root, None)
            if root._is_gradient:
                self._of_gradients[root._value.gradient_of] = memory
        else:
            storage = given.untyped_storage()
            plain = self._recorder.copies.of_gradients
            links, part, memory = None, given.detach(), plain.get(storage._cdata)
            if memory is None or memory.is_gone():
                memory = plain[storage._cdata] = Memory(None, StorageWeakRef(storage))
            if len(plain) > self._most_plain:
                for key in [key for key, known in plain.items() if known.is_gone()]:
                    del plain[key]
                self._most_plain = 2 * len(plain) + 16
        pair = Pair(placed.name, gradient, memory, links, part)
        memory.add(pair)
        self._is_any_outside |= memory.is_outside
        for each in (pair, *pair.others):
            each.held = self._held_by(each, memory)
        self.pairs.setdefault(placed.name, []).append(pair)

    def release(self, name: str) -> None:
        """The gradient is its parameter's no more. What the other memory does not have of it, it gets when it is
        used."""
        if (memory := self._of_gradients.pop(name, None)) is not None:
            for other in memory.pairs:
                is_needed = other.is_behind or other.others
                if other.held is not None and not is_needed and other.held._value.gradient_of == name:
                    other.held = None
        plain = self._recorder.copies.of_gradients
        for pair in self.pairs.pop(name, ()):
            if (memory := pair.memory) is not None:
                memory.look()
                memory.release(pair)
                if not pair.is_ahead or pair.is_behind:
                    memory.remove(pair)
                if memory.storage is not None and not memory.pairs:
                    plain.pop(memory.storage.cdata, None)
            pair.part = None

    # What happens to them.

    def note_written(self, lazy: LazyTensor) -> None:
        """The program has written into a recorded tensor, or into a view of it."""
        if not self._is_copying:
            for pair in self.pairs.get(lazy._value.gradient_of, ()):
                if main_of(pair.gradient) is lazy:
                    pair.is_ahead = True
            if lazy._parts_of_gradients is not None:
                lazy._parts_of_gradients.has_been_written()
            self.put_outside()

    def begin_backward(self) -> None:
        """A backward has been recorded, which may add to all gradients."""
        pairs = self._all()
        for pair in pairs:
            if not (pair.is_torn or any(other.is_torn for other in pair.others)):  # that is said when it is used
                self._bring(pair)
        for pair in pairs:
            pair.is_ahead = True
            if pair.memory is not None and self._is_gradient(pair.memory.root):
                pair.is_behind = True

    def put_outside(self) -> None:
        """Gradients are written into, or a backward has been recorded: memory that another library may read at any
        time gets that now."""
        if self._is_any_outside:
            outside = [memory for memory in self._recorder.copies.of_gradients.values() if memory.is_outside]
            self._is_any_outside = bool(outside)
            for memory in outside:
                self.put_all(memory)

    @contextmanager
    def before_step(self, items: Collection[Placed]) -> Iterator[None]:
        """What is recorded runs in the context, and an optimizer steps the parameters after it."""
        self.bring(items)
        yield
        self._in_step = []
        roots = {root._value.gradient_of for pair in self._all() if (root := self._other(pair)) is not None}
        for item in items:
            if item.name in self.pairs or item.name in roots:
                gradient = raw_grad(item.tensor) if item.is_owned else None
                self._in_step.append((item, gradient, 0 if gradient is None else gradient._version))

    def end_step(self) -> None:
        """An optimizer has stepped: who owns a gradient that it has written into tells the others."""
        in_step, self._in_step = self._in_step, []
        if not in_step:
            return
        own = [
            gradient is not None and raw_grad(item.tensor) is gradient and gradient._version != version
            for item, gradient, version in in_step
        ]
        blobs = self._recorder.engine.gather("gradients that a step has written into", bytes(own))
        for (item, _, _), *written in zip(in_step, *blobs, strict=True):
            if any(written):
                self._note_written_in_step(item.name)

    def _note_written_in_step(self, name: str) -> None:
        pairs = self.pairs.get(name, [])
        roots = [
            (pair.name, root._value.gradient_of) for pair in self._all() if (root := self._other(pair)) is not None
        ]
        if any(name in each for each in roots) or any(pair.others for pair in pairs):
            self._recorder.refuse(
                f"the optimizer has written into {name}.grad, which is memory of another gradient",
                why="each lies where its parameter is: what a step writes into one is not in the other in that step.",
                hint="give each parameter its own gradient: parameter.grad = gradient.clone()",
            )
        for pair in pairs:
            pair.is_ahead = True

    def _all(self) -> list[Pair]:
        return [pair for pairs in self.pairs.values() for pair in pairs]

    # Before they are used.

    def bring(self, items: Iterable[Placed]) -> None:
        """Let the gradients of parameters be what has been written into the memory that they are parts of."""
        for item in items:
            for pair in self.pairs.get(item.name, ()):
                self._bring(pair)

    def _bring(self, pair: Pair) -> None:
        memory = pair.memory
        if memory is None or self._is_copying:
            return
        memory.look()
        root = memory.root
        if root is not None and root._is_gradient:
            self._recorder.argument(root)  # a part of other memory itself, or old
        for other in list(pair.others):
            if other.is_ahead:
                self._put(memory, other)
        if not pair.is_behind:
            return
        self._check(pair, pair.is_ahead)
        pair.is_behind, pair.held = False, self._held_by(pair, memory)
        if root is None:
            assert pair.part is not None
            self._copy(pair.gradient, pair.part.clone())
        else:
            self._copy(pair.gradient, self._take(root, pair.links))
        for other in self.pairs[pair.name]:
            other.is_ahead |= other is not pair
        if (parts := main_of(pair.gradient)._parts_of_gradients) is not None:
            parts.has_been_written()

    def put_all(self, memory: Memory) -> None:
        """A tensor of other memory is about to be used: let it be what its gradients have become."""
        if self._is_copying:
            return
        memory.look()
        for pair in list(memory.pairs):
            if (parts := main_of(pair.gradient)._parts_of_gradients) is not None:
                self.put_all(parts)
            if pair.is_ahead:
                self._put(memory, pair)

    def before(self, function: Any, args: Any, kwargs: Any, written: Any) -> None:
        """A function is about to run on plain tensors, and to write into those among `written`."""
        for tensor in plain_in((args, kwargs)):
            if (memory := self._memory_of(tensor)) is not None:
                self.put_all(memory)
                if function in _GIVES_MEMORY:
                    memory.become_outside()
                    self._is_any_outside = True
        for tensor in plain_in(written):
            if (memory := self._memory_of(tensor)) is not None:
                memory.has_been_written()

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        if tensor.layout is not torch.strided or is_wrapped(tensor):
            return None
        return self._recorder.copies.of_gradients.get(tensor.untyped_storage()._cdata)

    def _put(self, memory: Memory, pair: Pair) -> None:
        others = list(pair.others)
        self._check(pair, pair.is_torn)
        pair.is_ahead = False
        root = memory.root
        if root is not None:
            self._copy(self._take(root, pair.links), pair.gradient)
            for other in self.pairs.get(root._value.gradient_of, ()):
                other.is_ahead |= main_of(other.gradient) is root
        elif memory.storage is not None and not memory.storage.expired():
            self._put_plain(memory, pair, memory.storage)
        for other in others:
            other.is_behind = True
        if pair.part is None:
            memory.remove(pair)

    def _put_plain(self, memory: Memory, pair: Pair, storage: StorageWeakRef) -> None:
        data, part = pair.gradient.read(), pair.part
        with torch.no_grad(), DisableTorchFunction():
            if part is None:
                part = torch.empty(0, dtype=data.dtype, device=data.device)
                part.set_(storage_at(storage.cdata), pair.first, pair.shape, pair.stride)
            part.copy_(data)
        memory.note_versions()
        if pair.seen is not None:
            pair.seen = data.clone()

    def _held_by(self, pair: Pair, memory: Memory) -> LazyTensor | None:
        """Returns the recorded tensor that is this memory, if it is another gradient, or other pairs share it."""
        return memory.root if pair.others or self._is_gradient(memory.root) else None

    def _other(self, pair: Pair) -> LazyTensor | None:
        """Returns the gradient of another parameter that a pair is a part of."""
        root = None if pair.memory is None else pair.memory.root
        return root if self._is_gradient(root) else None

    def _is_gradient(self, root: LazyTensor | None) -> bool:
        """Returns whether a tensor is the gradient of a parameter now."""
        return root is not None and root._is_gradient and self._recorder.engine.is_present_gradient(root._value)

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

    def _check(self, pair: Pair, are_both_new: bool) -> None:
        if are_both_new:
            self._recorder.refuse(
                f"{pair.name}.grad is memory of another gradient, and a backward has added to both",
                why="each lies where its parameter is: what comes to one is not in the other while a backward runs.",
                hint="give each parameter its own gradient: parameter.grad = gradient.clone(), or clear them\n"
                "before the backward: optimizer.zero_grad()",
            )
