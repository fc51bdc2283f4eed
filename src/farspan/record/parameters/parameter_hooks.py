"""Gradient hooks on parameters: every rank runs them, right after each backward.

    owner        autograd -> gradient of p caught, nothing added to p.grad
    all ranks    which gradients there are, in the order in which autograd has them in one process
    all ranks    hook(recorded gradient) -> recorded gradient; the owner adds it to p.grad; hook(p) after that

So a hook sees on every rank what it sees in one process, and what it collects, prints or counts is the same everywhere.
Autograd has the gradient of a parameter when it is through the earliest call that uses it, and goes through calls in
the reverse order of their recording: that orders the gradients of different ranks. The rank that has made them knows
in which order autograd had those of one call, for owners elsewhere too.

Recorded tensors have hooks too (`nodes.hooks`): a backward runs from one of their stops to the next, and the hooks on
parameters whose gradients are there come in between.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from farspan.call.infer.entry import intern
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.template import flatten_arguments
from farspan.errors import RecordError
from farspan.graph import Backward, SliceName, earliest_uses, whole_name
from farspan.record.nodes.stopping import run_hooks, take_up
from farspan.record.nodes.tensor_hooks import changed, register_hook
from farspan.record.parameters.outside_tensors import go_on_outside
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["HOOKS", "Hooks", "register"]


HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


@dataclass(slots=True, eq=False)
class _Hooked:
    """A parameter and the hooks that the program has registered on it, by the numbers of their handles."""

    placed: Placed
    before: OrderedDict[int, Any] = field(default_factory=OrderedDict[int, Any])
    """Called with the gradient; they may return another."""
    after: OrderedDict[int, Any] = field(default_factory=OrderedDict[int, Any])
    """Called with the parameter, once its gradient has been added to `.grad`."""


class _Caught(NamedTuple):
    name: str
    stride: list[int]
    is_sparse: bool


class Hooks:
    """The gradient hooks on the parameters of all distributed models."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.hooked: dict[str, _Hooked] = {}
        """By name, the parameters that have or have had one."""
        self._waiting: list[tuple[Placed, Any]] = []
        """Gradients to be added to `.grad`."""
        self._uses: dict[str, tuple[int, int]] = {}
        """The place, by parameter, at which the backward has the parameter's gradient; set while hooks run."""
        self._now: tuple[int, int] | None = None
        """The place of the backward, while hooks run."""
        self._is_after = False
        self._to_come: set[str] = set()
        """The hooked parameters of which the hooks have not yet run."""

    def add(self, placed: Placed, hook: Any, *, is_post: bool) -> RemovableHandle:
        """Register a hook."""
        if not placed.tensor.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        self.recorder.splitting.matrices.owned.need_whole(placed, "gets a hook")
        hooked = self.hooked.setdefault(placed.name, _Hooked(placed))
        table = hooked.after if is_post else hooked.before
        handle = RemovableHandle(table)
        table[handle.id] = hook
        return handle

    @property
    def are_there(self) -> bool:
        """Returns whether a parameter has a hook, so that each backward runs at once."""
        return any(item.before or item.after for item in self.hooked.values())

    @property
    def are_running(self) -> bool:
        """Returns whether one of them runs."""
        return self._now is not None

    def check_backward(self, backward: Backward) -> None:
        """Raise if the forward has used slices of a parameter that has got a hook since."""
        owned = self.recorder.splitting.matrices.owned.whole_names
        for name in earliest_uses(backward) if self.are_there else ():
            whole = whole_name(name) if type(name) is SliceName else owned.get(name)
            item = None if whole is None else self.hooked.get(whole)
            if item is not None and (item.before or item.after):
                self.recorder.refuse(
                    f"a backward brings gradients of slices of {item.placed.name}, which has a hook",
                    why=f"registered at {format_where(item.placed.hooked_at)}, behind the forward.",
                    hint="register hooks before the forward: the parameter stays whole then",
                )

    def run_backward(self, backward: Backward, reason: str) -> None:
        """Run all that is recorded, of which `backward` is the last, and the hooks."""
        uses, stops = earliest_uses(backward), backward.stops
        self._run_until_stop(backward, uses, reason)
        if stops is None:
            return
        try:
            while (call := stops.next_call()) is not None:
                run_hooks(self.recorder, backward, call)
                if stops.next_parts():
                    take_up(self.recorder, backward)
                    self._run_until_stop(backward, uses, reason)
        finally:
            self.recorder.engine.executor.drop(backward)
        if stops.arrived:
            go_on_outside(backward, stops.arrived)

    def _run_until_stop(self, backward: Backward, uses: dict[str, tuple[int, int]], reason: str) -> None:
        """Run what can run, and the hooks of the parameters that have got their gradients."""
        engine = self.recorder.engine
        with self._catching() as caught:
            engine.flush(reason)
        if not self.are_there:
            return
        own = [
            _Caught(name, list(item.stride()) if item.layout is torch.strided else [], item.layout is not torch.strided)
            for name, item in caught.items()
        ]
        passed_on = [name for name in engine.executor.passed_on if name in self.hooked]
        parts = engine.gather("gradients of hooked parameters", json.dumps([own, passed_on]).encode())
        found = [json.loads(part) for part in parts]
        turn = {name: turn for _, names in found for turn, name in enumerate(names)}
        events = sorted(
            (_Caught(*event) for events, _ in found for event in events),
            key=lambda event: (uses[event.name], -turn.get(event.name, 0)),
            reverse=True,
        )
        for event in events:
            if event.is_sparse and engine.num_ranks > 1:
                raise RecordError(
                    f"a gradient hook on {event.name}, which has a sparse gradient.",
                    why=f"registered at {format_where(self.hooked[event.name].placed.hooked_at)}.",
                    hint="change param.grad after loss.backward()",
                )
        placed = [self.hooked[event.name].placed for event in events]
        metas = [
            replace(item.meta, stride=tuple(event.stride) or item.meta.stride, requires_grad=False, is_parameter=False)
            for item, event in zip(placed, events, strict=True)
        ]
        sources = [(intern(meta), item.stage, caught.get(item.name)) for meta, item in zip(metas, placed, strict=True)]
        gradients: list[Any] = [LazyTensor.make(value, self.recorder) for value in engine.new_sources(sources)]
        gradients = [
            caught[event.name] if event.is_sparse else gradient
            for event, gradient in zip(events, gradients, strict=True)
        ]
        caught.clear()
        self._uses, self._to_come = uses, {event.name for event in events}
        try:
            while gradients:
                item = self.hooked[events[len(events) - len(gradients)].name]
                self._now = uses[item.placed.name]
                self._run_hooks(item, gradients.pop(0), backward)
            self.commit()
        finally:
            self._uses, self._now, self._to_come, self._is_after = {}, None, set(), False
            self._waiting.clear()

    def _run_hooks(self, item: _Hooked, gradient: Any, backward: Backward) -> None:
        with torch.no_grad():
            for hook in [*item.before.values()]:
                gradient = changed(hook, gradient, hook(gradient))
            self._to_come.discard(item.placed.name)
            if backward.requested is not None:
                backward.requested.found[item.placed.name] = self._data_of(item.placed, gradient)
                return
            self._waiting.append((item.placed, gradient))
            del gradient
            self._is_after = True
            for hook in [*item.after.values()]:
                if hook(item.placed.tensor) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")
            self._is_after = False

    def commit(self) -> None:
        """Let `.grad` be what it is in one process at this point of the backward."""
        if not self._waiting:
            return
        recorder, engine = self.recorder, self.recorder.engine
        waiting, self._waiting = self._waiting, []
        moved = [(placed, self._at_home(placed, gradient)) for placed, gradient in waiting]
        if any(type(gradient) is LazyTensor and gradient._value.pending for _, gradient in moved):
            engine.flush("gradients that hooks have changed")
        engine.barrier("gradients of hooked parameters")  # a slower rank may still read the old ones
        for placed, gradient in moved:
            recorder.gradients.accumulate(placed, gradient)
        engine.parameters_changed(())

    def check_read(self, placed: Placed) -> None:
        """Raise if a hook reads a gradient that is already there, and would not be in one process."""
        now, at = self._now, self._uses.get(placed.name)
        if now is None or at is None or placed.name in self.hooked or at > now:
            return
        self.recorder.refuse(
            f"a gradient hook reads {placed.name}.grad, to which the same backward adds only later",
            hint="read it after loss.backward(), or register a hook on that parameter too",
        )

    def check_step(self, placed: list[Placed]) -> None:
        """Raise if an optimizer steps in a hook, and the backward would still need what it changes."""
        now = self._now
        if now is None:
            return
        self.commit()
        if not self._is_after:
            raise RecordError(
                "optimizer.step() is called in a gradient hook.",
                why="the gradient is not yet in param.grad when the hook is called.",
                hint="parameter.register_post_accumulate_grad_hook(hook), with an optimizer for each parameter",
            )
        later = [item.name for item in placed if self._uses.get(item.name, now) < now]
        if later:
            raise RecordError(
                "optimizer.step() is called in a gradient hook, for parameters that the backward still needs.",
                why=f"{later[0]} gets its gradient only later.",
                hint="an optimizer for each parameter, or optimizer.step() after loss.backward()",
            )

    def _at_home(self, placed: Placed, gradient: Any) -> Any:
        self.recorder.deferred.record_one(gradient)
        if type(gradient) is not LazyTensor or gradient._value.stage == placed.stage:
            return gradient
        template, tensors = flatten_arguments((gradient,), {})  # sent to where the parameter is
        return self.recorder.record(torch.clone, template, tensors, placed.stage, given=((gradient,), {}))

    def _data_of(self, placed: Placed, gradient: Any) -> torch.Tensor | None:
        gradient = self._at_home(placed, gradient)
        if type(gradient) is not LazyTensor:
            return gradient
        if gradient._value.pending:
            self.recorder.engine.flush("gradients that hooks have changed")
        return gradient._value.data

    @contextlib.contextmanager
    def _catching(self) -> Iterator[dict[str, torch.Tensor]]:
        """Catch what arrives at the hooked parameters of this rank, before autograd adds it to `.grad`."""
        caught: dict[str, torch.Tensor] = {}

        def catch(name: str) -> Any:
            def hook(gradients: Any) -> tuple[None] | None:
                if gradients[0] is None or self.hooked[name].placed.is_passed_on:
                    return None
                if name in caught:
                    raise RecordError(
                        f"a gradient hook on {name}, of which several gradients come in one run.",
                        why=f"registered at {format_where(self.hooked[name].placed.hooked_at)}.",
                        hint="change param.grad after loss.backward()",
                    )
                caught[name] = gradients[0]
                return (None,)

            return hook

        handles: list[Any] = []
        nodes: list[Any] = []
        for name, item in self.hooked.items():
            tensor = item.placed.tensor
            if (item.before or item.after) and item.placed.is_owned and tensor.requires_grad:
                with DisableTorchFunction():
                    nodes.append(get_gradient_edge(tensor).node)  # autograd itself holds it by a weak reference
                handles.append(nodes[-1].register_prehook(catch(name)))
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()


def register(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`register_hook(hook)` and its like: every rank calls it."""
    placed = recorder.placed.get(id(args[0]))
    if placed is None:
        if function is not torch.Tensor.register_hook:
            raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
        return register_hook(*args, **kwargs)
    recorder.flush_before_change("a gradient hook is registered")
    placed.hooked_at = find_where()
    is_post = function is torch.Tensor.register_post_accumulate_grad_hook
    return recorder.hooks.add(placed, *args[1:], is_post=is_post, **kwargs)
