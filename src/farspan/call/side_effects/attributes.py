"""Carries the attributes that a module writes on itself and on the modules below it, as arguments and results of its
calls.

    self.loss = balance(gates)         each call has one more result, and every rank's module gets it as `loss`
    self.state = f(self.state, x)      and one more argument: what `state` was before

Which attributes these are shows when a call changes them for the first time (those that hold functions, say, each rank
has for itself). A rank's modules hold what the program
may read, recorded values; the real ones take their place only while the call runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from farspan.call.function_call import FunctionCall
from farspan.call.infer.watch import storage_id
from farspan.call.leaf import Leaf, LeakError
from farspan.call.pytree.template import can_describe, map_tensors
from farspan.call.side_effects.hidden import copies_of_hidden, hidden_in
from farspan.call.side_effects.kept import Kept
from farspan.call.side_effects.reachable import REAL, Glance, State, is_same
from farspan.errors import RecordError
from farspan.graph import Changes

__all__ = [
    "Attributes",
    "HeldState",
    "OwnObjects",
    "attributes_of",
    "attributes_sharing",
    "attributes_with_tensors",
    "holds_hidden",
    "own_attributes",
    "put_attributes",
    "put_own_attributes",
    "real_attributes",
    "unchanged_as_before",
    "unchanged_in_backward",
    "watched_attributes",
]

Attributes = dict[str, Any]
"""Attributes by "number of the module among the leaf's modules.name"."""

_ABSENT = object()
_NUMBERS_AND_TEXTS = frozenset([bool, int, float, complex, str, bytes, type(None)])
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"} | {"_flat_weights", "_flat_weight_refs", "_all_weights"}


def attributes_of(modules: Sequence[nn.Module], keys: Collection[str]) -> Attributes:
    """Returns those of the attributes `keys` that are there, in the keys' order."""
    found: Attributes = {}
    for key in sorted(keys):
        module, name = _find(modules, key)
        if name in module.__dict__:
            found[key] = module.__dict__[name]
    return found


def put_attributes(modules: Sequence[nn.Module], keys: Collection[str], values: Attributes) -> None:
    """Let the modules have `values`, and no other of the attributes `keys`."""
    for key in keys:
        module, name = _find(modules, key)
        if key in values:
            module.__dict__[name] = values[key]
        else:
            module.__dict__.pop(name, None)


def own_attributes(module: nn.Module) -> Attributes:
    """Returns all attributes of `module` that are not torch's own, by name."""
    return {name: item for name, item in module.__dict__.items() if name not in _OF_TORCH}


def put_own_attributes(module: nn.Module, values: Attributes) -> None:
    """Let `module` have `values`, and no other attribute that is not torch's own."""
    for name in [name for name in module.__dict__ if name not in _OF_TORCH]:
        del module.__dict__[name]
    module.__dict__.update(values)


@contextlib.contextmanager
def real_attributes(modules: Sequence[nn.Module], keys: Collection[str], values: Attributes) -> Iterator[None]:
    """Run a call with `values` as its modules' attributes; `values` becomes what it leaves of `keys`."""
    keys = list(dict.fromkeys([*values, *keys]))
    before = attributes_of(modules, keys)
    put_attributes(modules, keys, values)
    try:
        yield
        after = attributes_of(modules, keys)
        values.clear()
        values.update(after)
    finally:
        put_attributes(modules, keys, before)


@contextlib.contextmanager
def watched_attributes(modules: Sequence[nn.Module], values: Attributes, *, is_real: bool) -> Iterator[None]:
    """Does as `real_attributes`, and finds out which other attributes the call changes: `values` has them too, then.

    Args:
        modules: The leaf's.
        values: The attributes known so far.
        is_real: Whether what no template describes may stay on the modules: it is the owner's, not a fake.
    """
    before = [dict(module.__dict__) for module in modules]
    given = list(values)
    own = _unknown_attributes(modules, values)
    state = State(item for _, item in own)
    kept = Kept(state.tensors.values())
    put_attributes(modules, given, values)
    hidden = [] if is_real else hidden_in([module.__dict__ for module in modules], state.holders)
    try:
        with copies_of_hidden(hidden):
            yield
    finally:
        values.clear()
        changed = state.changed()
        inside = changed | kept.put_back(is_real=is_real)
        undescribed: dict[str, Any] = {}
        reached = {key for key, item in own if state.reaches(item, inside)}
        for number, (module, old) in enumerate(zip(modules, before, strict=True)):
            for name in [name for name in module.__dict__ if name not in _OF_TORCH]:
                key, item = f"{number}.{name}", module.__dict__[name]
                if key in given:
                    values[key] = item
                elif key in reached or not is_same(item, old.get(name, _ABSENT)):
                    if can_describe(item, state.ids):
                        values[key] = map_tensors(item, lambda tensor: tensor)  # it is about to be put back
                    elif is_real:
                        old[name] = item
                    else:
                        undescribed[key] = item
            for name in [name for name in module.__dict__ if name not in _OF_TORCH and name not in old]:
                del module.__dict__[name]
            module.__dict__.update((name, item) for name, item in old.items() if name not in _OF_TORCH)
        state.put_back(inside)
        for key in sorted(values):
            values[key] = values.pop(key)
        if not is_real and state.has_changed_array(inside):
            raise LeakError("a module writes into an array that it holds")
        if not is_real and state.has_changed_tensor(changed):
            raise LeakError("a module sets an attribute of a tensor")
        if not is_real and state.has_changed_behind_callable(inside):
            raise LeakError("a module changes an object through a bound method or a partial function")
        if hidden_in([undescribed], State(undescribed.values()).holders):
            raise LeakError("a module sets an object whose state cannot be looked into")


class HeldState:
    """All that some modules hold now in attributes that are not torch's own, at any depth."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held = [(module, own_attributes(module)) for module in modules]
        self._state = State(item for _, held in self._held for item in held.values())

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Let the modules hold this in the body, whatever they hold by then, and that again after it."""
        now = HeldState([module for module, _ in self._held])
        self._put()
        try:
            yield
        finally:
            now._put()

    def _put(self) -> None:
        for module, held in self._held:
            put_own_attributes(module, held)
        self._state.put_back(self._state.changed())

    def changed(self, *, puts_back: bool) -> list[tuple[nn.Module, str, Any]]:
        """Returns the attributes that hold something else now, with what they held; but, if `puts_back`, for tensors
        in the place of tensors: these are put back.
        """
        inside, found = self._state.changed(), list[tuple[nn.Module, str, Any]]()
        for module, held in self._held:
            for name, item in own_attributes(module).items():
                then = held.get(name, _ABSENT)
                if puts_back and isinstance(item, torch.Tensor) and isinstance(then, torch.Tensor):
                    module.__dict__[name] = then
                elif not is_same(item, then) or self._state.reaches(then, inside):
                    found.append((module, name, then))
        return found


_COUNT_IN_A_BUFFER = (
    'a buffer, which they do see: self.register_buffer("count", torch.zeros(())), then self.count += 1;\n'
)


@contextlib.contextmanager
def unchanged_in_backward(
    targets: Sequence[Leaf | FunctionCall], changes: Changes | None, *, is_packed: bool
) -> Iterator[None]:
    """Run in the body a backward, which is run on one rank alone, and see to it that it changes no attribute of the
    modules of `targets`, and no buffer of which the forward has not shown that. A tensor that their forward sets, and a
    checkpoint sets again, is the one of the forward, unless it `is_packed`: made of what hooks have saved.

    Args:
        targets: What the backward goes through.
        changes: Takes what attributes were that it may change: those without tensors; None if it may change none.
            Where it reads recorded values, a tensor that it sets has to be equal to that of the forward.
        is_packed: As above.

    Raises:
        RecordError: It has changed one, which the other ranks cannot know; or has read one that is a recorded value.
    """
    names = " or ".join(map(str, targets))
    before = HeldState([module for target in targets for module in target.modules])
    buffers = [buffer for target in targets for buffer in _unwritten(target)]
    versions = [buffer._version for buffer in buffers]
    if changes is not None:
        changes.is_running = True
    try:
        yield
    except LeakError as error:
        raise RecordError(
            f"{names}: its backward reads a value that a call has set as an attribute, or a buffer of another rank.",
            why="a checkpoint computes a part of it again, or an autograd function reads what the module holds.",
            hint="give the state to forward as an argument, and return the new one",
        ) from error
    finally:
        if changes is not None:
            changes.is_running = False
    has_read = changes is not None and changes.has_read
    for module, name, old in before.changed(puts_back=not (is_packed or has_read)):
        item = module.__dict__.get(name, _ABSENT)
        if isinstance(item, torch.Tensor) and isinstance(old, torch.Tensor) and _is_equal(item, old):
            module.__dict__[name] = old
            continue
        if changes is not None and old is not _ABSENT and _is_plain(item):
            changes.old.setdefault((module, name), old)
            continue
        raise RecordError(
            f"{names}: its backward changes {type(module).__name__}.{name}.",
            why="a backward runs on one rank, and the other ranks would not see the change.",
            hint=_COUNT_IN_A_BUFFER
            + "in a module that a checkpoint computes again, change it outside of the checkpoint",
        )
    if [buffer._version for buffer in buffers] != versions:
        raise RecordError(
            f"{names}: its backward writes into a buffer.",
            why="calls that read the buffer run before this backward or after it, for the forward did not show that.",
            hint="let the autograd function keep the module (ctx.module = module), which runs as one unit",
        )


def _is_plain(item: Any) -> bool:
    """Returns whether it is a number or text, or consists of lists, tuples and dictionaries of these."""
    if type(item) is dict:
        return all(map(_is_plain, (*item, *item.values())))
    return all(map(_is_plain, item)) if type(item) in (list, tuple) else type(item) in _NUMBERS_AND_TEXTS


def _is_equal(item: torch.Tensor, recorded: Any) -> bool:
    """Returns whether a tensor has the data of a recorded one, which are on this rank."""
    data = recorded._value.data if hasattr(recorded, "_value") else recorded
    return data is not None and item.dtype == data.dtype and torch.equal(item.detach(), data.detach())


def _unwritten(target: Leaf | FunctionCall) -> list[torch.Tensor]:
    """Returns the buffers of a target into which nobody has been seen to write."""
    if isinstance(target, Leaf):
        return [item.tensor for item in target.buffers if not item.is_written]
    return [buffer for module in target.modules for buffer in module.buffers()]


@contextlib.contextmanager
def unchanged_as_before(leaf: Leaf) -> Iterator[None]:
    """Run in the body a call whose data decide what it does, and see to it that it changes no attribute but those that
    it has changed in its first calls: only its owner would see that.

    Raises:
        RecordError: It has changed one.
    """
    before = HeldState(leaf.modules)
    yield
    for module, name, _ in before.changed(puts_back=False):
        raise RecordError(
            f"{leaf.name}: its call changes {type(module).__name__}.{name}, and did not in its first calls.",
            why="data decide what it does, and the other ranks would not see the change.",
            hint=_COUNT_IN_A_BUFFER + "or change it in every call",
        )


def attributes_sharing(modules: Sequence[nn.Module], tensor: torch.Tensor) -> list[str]:
    """Returns the attributes from which a tensor in the memory of `tensor` can be reached."""
    own = _unknown_attributes(modules, ())
    state = State(item for _, item in own)
    memory = storage_id(tensor)
    ids = {key for key, item in state.tensors.items() if type(item) in REAL and storage_id(item) == memory}
    return [key for key, item in own if state.reaches(item, ids)]


def attributes_with_tensors(modules: Sequence[nn.Module], known: Collection[str]) -> list[str]:
    """Returns the attributes, other than the `known` ones, that hold plain tensors and can be arguments."""
    found: list[str] = []
    for key, item in _unknown_attributes(modules, known):
        state = State([item])
        if any(type(tensor) in REAL for tensor in state.tensors.values()) and can_describe(item):
            found.append(key)
    return found


def holds_hidden(modules: Sequence[nn.Module]) -> bool:
    """Returns whether the modules hold objects with state that cannot be inspected, and may change."""
    state = State(item for _, item in _unknown_attributes(modules, ()))
    return bool(hidden_in([own_attributes(module) for module in modules], state.holders))


class OwnObjects:
    """The lists, dictionaries and objects that a leaf's attributes hold, and that others may change too.

    Args:
        modules: The leaf's.
        known: The attributes that are arguments.
        is_foreign: Returns for the id of a parameter or buffer whether it is none of the leaf's own, and None for that
            of any other tensor. The type of the former says nothing: its owner has another one than the other ranks.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        known: Collection[str],
        is_foreign: Callable[[int], bool | None] = lambda _: None,
    ) -> None:
        self._own = _unknown_attributes(modules, known)
        self._state = State(item for _, item in self._own)
        self._glance = Glance(self._state.objects)
        self.is_empty = self._glance.is_empty
        """True if the modules hold no objects that others may change."""
        recorded: list[int] = []
        for key, tensor in self._state.tensors.items():
            foreign = is_foreign(key)
            if type(tensor) not in REAL if foreign is None else foreign:
                recorded.append(key)
        self.recorded = [key for key, item in self._own if recorded and self._state.reaches(item, recorded)]
        """The attributes through which a recorded tensor is reached."""
        self.memory = self._state.memory
        """Numbers of the plain tensors among the objects, and of their memory."""
        own = set(map(id, modules))
        self.foreign = [module for module in self._state.modules if id(module) not in own]
        """The modules that are held, and are none of the leaf's."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that can be reached from them."""
        return [*self._state.tensors.values()]

    def has_changed(self) -> bool:
        """Returns whether one of the objects holds something else than when this was made."""
        return self._glance.has_changed()

    def changed(self) -> list[str]:
        """Returns the attributes through which something else is reached than when this was made, if they can be
        arguments: arrays cannot, nor can bound methods and partial functions.
        """
        if not self._glance.has_changed() or self.has_changed_behind_callable():
            return []
        changed = self._state.changed(with_arrays=False)
        return [key for key, item in self._own if self._state.reaches(item, changed)]

    def has_changed_behind_callable(self) -> bool:
        """Returns whether a bound method or a partial function that the modules hold knows an object that has
        changed."""
        return self.has_changed() and self._state.has_changed_behind_callable(self._state.changed())

    def put_back(self) -> State:
        """Let the objects hold what they held; give what they held meanwhile."""
        meanwhile = State(item for _, item in self._own)
        self._state.put_back(self._state.changed())
        return meanwhile


def _unknown_attributes(modules: Sequence[nn.Module], known: Collection[str]) -> list[tuple[str, Any]]:
    """Returns by key the attributes that are neither torch's own nor known."""
    return [
        (f"{number}.{name}", item)
        for number, module in enumerate(modules)
        for name, item in module.__dict__.items()
        if name not in _OF_TORCH and f"{number}.{name}" not in known
    ]


def _find(modules: Sequence[nn.Module], key: str) -> tuple[nn.Module, str]:
    number, _, name = key.partition(".")
    return modules[int(number)], name
