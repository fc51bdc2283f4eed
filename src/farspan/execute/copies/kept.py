"""The copies that one rank keeps of what another one owns: parameters, gradients, optimizers' states, buffers.

end of a step      gradients and statistics come from their owner, before any rank goes on
optimizer.step()   each rank steps its own parameters, and its copies with the same gradients: nothing is sent
anything else      that changes parameters or states: they come again at the end of the next step
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.call.leaf import Placed
from farspan.call.wire.checked import damaged
from farspan.execute.engine import Engine
from farspan.execute.optimizers.kept_state import change_tensors, raw_state
from farspan.execute.optimizers.own import make_own
from farspan.execute.optimizers.own_share import stand_in, treats_each_parameter
from farspan.execute.optimizers.shown import keeps_beside_state, show_to_all
from farspan.execute.optimizers.states import as_laid_out, placed_in
from farspan.graph import Graph, Value, whole_name
from farspan.record.parameters.away import real_of
from farspan.record.parameters.parameter_values import renew_aliases_of
from farspan.record.surgery.real import become_real, without_weak_references
from farspan.torch_private import (
    DisableTorchFunction,
    has_memory_of_its_own,
    has_other_users,
    has_step_hooks,
    raw_grad,
    set_raw_grad,
)

__all__ = ["KeptCopies"]

_MOST_BYTES, _MOST_BYTES_IN_TRAINING = 64 << 20, 64 << 10
"""Larger results of a step are not kept twice: the program reads few of those that it holds, in training hardly any."""


@dataclass(slots=True)
class _Coming:
    """What has come from owners, and does not count yet."""

    written: frozenset[str] = frozenset()
    has_gradients: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict[str, "torch.Tensor | None"])
    states: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    results: dict[Value, torch.Tensor | None] = field(default_factory=dict[Value, "torch.Tensor | None"])


class KeptCopies:
    """The copies of one rank.

    Args:
        engine: This rank's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._graphs: Sequence[Graph] = ()
        """The step that runs, or has run last."""
        self._is_own_change = False
        self._why_never = ""
        """Why nothing is copied."""
        self._results: weakref.WeakKeyDictionary[Value, torch.Tensor | None] = weakref.WeakKeyDictionary()
        """The values of an owner that the program may still read; None where they were too large."""
        self.forget()
        engine.values.copies = self._answer

    def forget(self) -> None:
        """Nothing is kept any more; all is to be brought."""
        self._tensors: dict[str, torch.Tensor] = {}
        """The copies of parameters and buffers, by name. The `grad` of a copy is the copy of its gradient."""
        self._states: dict[int, dict[str, Any]] = {}
        """By number of an optimizer and name of a parameter."""
        self._are_tensors_known = self._are_gradients_known = False
        self._known_states: set[int] = set()
        self._are_stepped = False
        self._why_unknown = "it has not been copied yet"
        self._coming = _Coming()

    # What the program does.

    def begin(self, graphs: Sequence[Graph]) -> None:
        """A step is about to run."""
        self._graphs = graphs

    def clear_gradients(self, items: Sequence[Placed]) -> None:
        """The program has deleted gradients."""
        for item in items:
            tensor = self._tensors.get(item.name)
            if tensor is not None:
                tensor.grad = None

    def change_gradients(self) -> None:
        """The program has set gradients."""
        self._are_gradients_known = False
        self._why_unknown = "the program has set gradients"

    def change(self) -> None:
        """Parameters, or where they are, may have changed."""
        if self._is_own_change:
            self._is_own_change = False
            return
        why = self._why_unknown if self._are_stepped else "the program has written into parameters, or loaded them"
        self.forget()
        self._why_unknown = why

    def change_state(self, optimizer: Optimizer) -> None:
        """The program has been shown what an optimizer keeps, or has given it something else."""
        number = self._engine.values.optimizers.number_of(optimizer)
        if number is not None:
            self._known_states.discard(number)
            self._why_unknown = f"the program has looked at what {type(optimizer).__name__} keeps, or has changed it"

    def step(self, optimizer: Optimizer, placed: Sequence[Placed], *, has_closure: bool) -> None:
        """An optimizer has stepped what each rank owns; `change` comes next."""
        engine = self._engine
        number = engine.values.optimizers.number_of(optimizer)
        assert number is not None
        is_known = number in self._known_states and self._are_tensors_known and self._are_gradients_known
        if is_known and not has_closure and _treats_each_parameter(optimizer):
            self._is_own_change = True
            with engine.executing():
                self._step(optimizer, number, placed)
            return
        kind, self._are_stepped = type(optimizer).__name__, True
        self._why_unknown = f"{kind} has stepped for the first time, or after a change, and no step has ended since"
        if not _treats_each_parameter(optimizer):
            self._why_never = f"{kind} does not step each parameter by itself, as torch's own do without hooks"

    def _step(self, optimizer: Optimizer, number: int, placed: Sequence[Placed]) -> None:
        copies = {id(item.tensor): self._tensors[item.name] for item in placed if item.name in self._tensors}
        if not copies:
            return
        states, names = self._states[number], [item.name for item in placed if item.name in self._tensors]
        kept = {self._tensors[name]: states.get(name, {}) for name in names}
        copy = stand_in(optimizer, lambda tensors: [copies[id(each)] for each in tensors if id(each) in copies], kept)
        with torch.no_grad():
            type(optimizer).step(copy)
        found = raw_state(copy)
        states.update({name: found[self._tensors[name]] for name in names if self._tensors[name] in found})

    # What comes from the owners, at the end of a step.

    def bring(self, owners: Iterable[int], *, has_run: bool) -> None:
        """Brings what has changed at other ranks; it counts when all ranks have (`brought`).

        Args:
            owners: Those of which this rank keeps copies.
            has_run: Whether a step has run.
        """
        engine, graphs = self._engine, self._graphs if has_run else ()
        self._coming = coming = _Coming()
        engine.masks.resolve()
        if engine.masks.sparse:
            self._why_never = "there are sparse gradients"
        if self._why_never:
            return
        written = _states_written(graphs)
        known = self._known_states - written
        numbered = [(number, each) for number, each in engine.values.optimizers.numbered() if number not in known]
        is_training = any(graph.backwards for graph in graphs)
        coming.written = _names_written(graphs)
        coming.has_gradients = (
            is_training
            or not self._are_gradients_known
            or any(value.gradient_of for graph in graphs for value in graph.sources)
        )
        for owner in owners:
            items = [item for item in engine.parameters.values() if self._rank_of(item) == owner]
            self._pull(owner, items, self._results_of(owner, graphs, is_training=is_training))
            for number, optimizer in numbered:
                kept = coming.states.setdefault(number, {})
                for item in placed_in(optimizer, engine.recorder.placed):
                    if self._rank_of(item) == owner:
                        kept[item.name] = engine.values.pull_state(owner, number, item.name) or {}

    def brought(self) -> None:
        """All ranks have what they were to bring."""
        coming, self._coming, self._graphs = self._coming, _Coming(), ()
        for name, tensor in coming.tensors.items():
            if name in self._tensors:
                tensor.grad = self._tensors[name].grad
            self._tensors[name] = tensor
        for name, gradient in coming.gradients.items():
            self._tensors[name].grad = gradient
        for number, kept in coming.states.items():
            self._states.setdefault(number, {}).update(kept)
        self._results.update(coming.results)
        optimizers = self._engine.values.optimizers
        self._are_tensors_known = self._are_gradients_known = True
        self._known_states = {number for number, each in optimizers.numbered() if each not in optimizers.held}

    def _results_of(self, owner: int, graphs: Sequence[Graph], *, is_training: bool) -> list[Value]:
        """Returns what a rank has made that the program may still read, but for what every rank gets to know."""
        most = _MOST_BYTES_IN_TRAINING if is_training else _MOST_BYTES
        found: list[Value] = []
        for value in [value for graph in graphs for call in graph.calls for value in call.outputs]:
            if value.is_readable and value.ticket is None and self._engine.owner_of(value) == owner:
                self._coming.results[value] = None
                if not value.gradient_of and value.meta.size_bytes <= most:
                    found.append(value)
        return found

    def _pull(self, owner: int, items: Sequence[Placed], results: Sequence[Value]) -> None:
        engine, coming = self._engine, self._coming
        tensors = [item for item in items if not self._are_tensors_known or item.name in coming.written]
        trained = [item for item in items if coming.has_gradients and item.is_parameter]
        gradients = [item for item in trained if engine.masks.has_gradient(item)]
        wanted = (
            [item.name for item in tensors],
            [item.name for item in gradients],
            [list(value.key) for value in results],
        )
        found = engine.values.pull_copies(owner, *wanted) if any(wanted) else []
        if len(found) != sum(map(len, wanted)):
            raise damaged("copies of what a rank owns, of another number than was asked for")
        data = iter(found)
        with torch.no_grad(), DisableTorchFunction():
            coming.tensors.update({item.name: _like(item, next(data)) for item in tensors})
            coming.gradients.update({item.name: None for item in trained})
            coming.gradients.update({item.name: _like(item, next(data)) for item in gradients})
            for value in results:
                tensor = next(data)
                if tuple(tensor.shape) == value.meta.shape:  # else something sees its memory too
                    coming.results[value] = tensor

    def _answer(self, names: Sequence[str], gradients: Sequence[str], keys: Sequence[Any]) -> list[torch.Tensor]:
        """Returns what another rank keeps copies of; called in a worker thread, when this rank has run its step."""
        parameters = self._engine.parameters
        values = {value.key: value for graph in self._graphs if keys for call in graph.calls for value in call.outputs}
        found = [real_of(parameters[name].tensor) for name in names]
        found += [_gradient_of(parameters[name]) for name in gradients]
        for key in keys:
            data = values[tuple(key)].data
            is_alone = has_memory_of_its_own(data)  # else the program may write into it by another name
            found.append(data.detach() if is_alone or data.numel() < 2 else data.new_empty(0))
        return found

    def _rank_of(self, item: Placed) -> int:
        return self._engine.teams[item.stage].leader.rank

    # A loss.

    def missing(self, owner: int) -> str:
        """Returns why copies are not what a rank had, or cannot take its place; "" if they can."""
        recorder = self._engine.recorder
        memory = [copy for copies in recorder.copies.by_storage.values() for copy in copies]
        if any(self._rank_of(copy.placed) == owner and not copy.storage.expired() for copy in memory):
            return "the program holds a state dictionary with parameters of the lost rank"
        if recorder.copies.of_gradients or recorder.gradients.memory.pairs:
            return "gradients are parts of other memory"
        items = [item for item in self._engine.parameters.values() if self._rank_of(item) == owner]
        if any(recorder.gradients.is_kept(item) for item in items):
            return "the program holds gradients of an earlier step"
        if any(item.hooked_at is not None for item in items):
            return "gradients have hooks"
        with self._without_weak_references():
            if any(has_other_users(item.tensor) for item in items):
                return "the program uses parameters where farspan does not see it"
        if self._why_never:
            return self._why_never
        optimizers = self._engine.values.optimizers
        is_all_known = self._are_tensors_known and self._are_gradients_known
        is_all_known &= all(number in self._known_states for number, _ in optimizers.numbered())
        return "" if is_all_known else self._why_unknown

    def take(self, owner: int, graphs: Sequence[Graph]) -> None:
        """What `owner` had is this rank's from here on.

        Args:
            owner: By its number of before.
            graphs: All that has been recorded and has not run.

        Raises:
            RuntimeError: Something in this program holds weak references to parameters.
        """
        engine = self._engine
        items = [item for item in engine.parameters.values() if self._rank_of(item) == owner]
        results = {value: data for value, data in self._results.items() if engine.owner_of(value) == owner}
        with self._without_weak_references():
            for item in items:
                self._own(item)
        by_name = {item.name: item for item in items}
        for value in [value for graph in graphs for value in graph.sources]:
            self._renew(value, by_name)
        engine.recorder.parameter_values.renew(by_name)
        engine.recorder.gradients.renew(by_name)
        for value, data in results.items():
            self._renew(value, by_name)
            value.data = data if value.data is None else value.data
            if value.data is not None:
                engine.values.keep_inputs([value])
                value.is_kept = True
            elif value.call is not None and value.ticket is None:
                value.call.raised = "the loss of the rank that had it"
        self._take_states(items)

    def _renew(self, value: Value, items: dict[str, Placed]) -> None:
        """Lets a value that stands for a parameter, or for its gradient, have the data that are here now."""
        if (item := items.get(value.gradient_of)) is not None:
            value.data = raw_grad(item.tensor) if self._engine.is_present_gradient(value) else None
        elif (item := items.get(value.name)) is not None:
            is_itself = value.meta.requires_grad == item.tensor.requires_grad
            with DisableTorchFunction():
                value.data = item.tensor if is_itself else item.tensor.detach()

    @contextlib.contextmanager
    def _without_weak_references(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in [entry[0] for entry in self._engine.recorder.keep_alive]:
                if isinstance(model, torch.nn.Module):
                    stack.enter_context(without_weak_references(model))
            yield

    def _own(self, item: Placed) -> None:
        tensor = self._tensors[item.name]
        gradient, tensor.grad = tensor.grad, None
        become_real(item, tensor)
        item.is_owned = True
        if gradient is not None:
            set_raw_grad(item.tensor, gradient)
        renew_aliases_of(item)

    def _take_states(self, items: Sequence[Placed]) -> None:
        engine = self._engine
        steps = engine.values.optimizers
        for number, optimizer in steps.numbered():
            kept, state = self._states.get(number, {}), raw_state(optimizer)
            for item in [item for item in items if kept.get(item.name)]:
                state[item.tensor] = change_tensors(kept[item.name], make_own)
            if optimizer not in steps.stepped:  # the program may look at it
                show_to_all(engine, optimizer, number)


def _treats_each_parameter(optimizer: Optimizer) -> bool:
    is_plain = treats_each_parameter(optimizer) and not has_step_hooks(optimizer)
    return is_plain and not keeps_beside_state(optimizer)


def _like(item: Placed, data: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a parameter, or of its gradient, that lies in memory as it does at its owner."""
    if tuple(data.shape) != item.meta.shape or data.dtype != item.meta.dtype:
        raise damaged("a copy of what a rank owns, with another shape than that")
    return as_laid_out(item.meta).copy_(data)


def _names_written(graphs: Sequence[Graph]) -> frozenset[str]:
    """Returns the parameters and buffers that calls may have written."""
    found: set[str] = set()
    for call in [call for graph in graphs for call in graph.calls]:
        arguments = call.arguments or ()
        given = [arguments[number] for number in call.entry.mutated if number < len(arguments)]
        found.update(whole_name(item.name) for item in given if type(item) is Value and item.name)
        found.update(item.name for item in getattr(call.target, "placed", ()) if item.is_written)
    return frozenset(found)


def _states_written(graphs: Sequence[Graph]) -> set[int]:
    """Returns the optimizers of which calls have written into what they keep."""
    calls = [call for graph in graphs for call in graph.calls if call.arguments is not None]
    written = [call.arguments[number] for call in calls for number in call.entry.mutated if call.arguments is not None]
    return {item.state_of[0] for item in written if type(item) is Value and item.state_of is not None}


def _gradient_of(item: Placed) -> torch.Tensor:
    gradient = raw_grad(item.tensor)
    assert gradient is not None
    return gradient.detach()
