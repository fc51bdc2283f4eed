"""Gradients as recorded values, which have a history: for each call on the way back, its derivative is recorded.

    u = model(x)                               calls  f, g
    d = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
                                               calls  g', f'    each on the stage of its call
    (d - target).square().mean().backward()    one backward through f', g', and what they depend on

The derivative of a call computes it again, so a program that differentiates n times computes a call up to 2^n times.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.derivative import FunctionDerivative, ModuleDerivative
from farspan.call.leaf import Leaf
from farspan.call.modes import current_modes
from farspan.graph import EVERYWHERE, Call, Value, differentiated, parameters_of, released_error
from farspan.record.derivatives.gradient_hooks import after_hooks, hooks_on_parameter, hooks_on_value
from farspan.record.derivatives.outside_graph import OutsideDerivative, OutsideGraph
from farspan.record.derivatives.recorded_again import RecordedAgain, arguments_of, repeating_leaf
from farspan.record.derivatives.refusal import check_requested, refuse_second_derivatives
from farspan.record.recorded_backward import value_of_root
from farspan.torch_private import hooks_on

if TYPE_CHECKING:
    from farspan.graph import RequestedGradients
    from farspan.record.recording import Recording

__all__ = ["record_gradients"]


def record_gradients(
    recorder: Recording, outputs: Any, grad_outputs: Any, requested: RequestedGradients
) -> dict[Any, torch.Tensor]:
    """Record what gives the gradients of `outputs`, for each tensor that is requested and that they depend on.

    Args:
        recorder: Which records them.
        outputs: As `torch.autograd.grad` takes them.
        grad_outputs: The same.
        requested: Of what gradients are asked for.

    Returns:
        By name of a parameter, by recorded value, and by id of a tensor outside the model.

    Raises:
        RuntimeError: As torch: an output that needs no gradient, or that is no scalar and has no gradient given.
        WholeError: A call on the way cannot be computed again alike.
    """
    if recorder.frame is not recorder.root or recorder.splitting.stages:
        raise refuse_second_derivatives("parts of a module, or of its layers, lie on several ranks")
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) or grad_outputs is None else list(grad_outputs)
    given += [None] * (len(roots) - len(given))
    values = [value_of_root(recorder, root, number, given[number]) for number, root in enumerate(roots)]
    check_requested(requested, values)
    seeds = [
        torch.ones(value.meta.shape, dtype=value.meta.dtype, device=value.meta.device) if seed is None else seed
        for value, seed in zip(values, given, strict=True)
    ]
    with torch.enable_grad():  # also in a program's no_grad(), as in torch
        return _Walk(recorder, requested).run(values, seeds)


class _Walk:
    """Goes back through calls, the latest first, and records the derivative of each."""

    def __init__(self, recorder: Recording, requested: RequestedGradients) -> None:
        self.recorder = recorder
        self.requested = requested
        self._outside = OutsideGraph(requested.outside)
        self._autocast = current_modes()[2]
        self._gradients: dict[Value, torch.Tensor] = {}
        self._of_parameters: dict[str, torch.Tensor] = {}
        self._leads: dict[Value | Call, bool] = {}
        self._again = RecordedAgain(recorder)

    def run(self, roots: Sequence[Value], seeds: Sequence[torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Returns what `record_gradients` does."""
        queue: list[tuple[int, int, Call]] = []
        queued: set[Call] = set()

        def reach(value: Value, gradient: torch.Tensor) -> None:
            self._add(self._gradients, value, gradient)
            call = value.call
            if isinstance(call, Call) and call not in queued and self._leads_to(call):
                queued.add(call)
                heapq.heappush(queue, (-call.graph.index, -call.index, call))

        self._find_leading([root.call for root in roots if isinstance(root.call, Call)])
        for root, seed in zip(roots, seeds, strict=True):
            reach(root, seed)
        while queue:
            call = heapq.heappop(queue)[2]
            for source, gradient in self._differentiate(call):
                if isinstance(source, Value):
                    reach(source, gradient)
                else:
                    self._add(self._of_parameters, source, gradient)
        found: dict[Any, torch.Tensor] = dict(self._of_parameters)
        arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, gradient in self._gradients.items():
            if value.stage == EVERYWHERE:
                if id(value.data) in self._outside.requested:
                    self._add(found, id(value.data), gradient)
                if self._outside.behind(value.data):
                    arrived.append((value.data, gradient))
            elif value in self.requested.values:
                found[value] = gradient
        gone_on_from = {id(root) for root, _ in arrived}
        for source, gradient in self._outside.record(self.recorder, arrived):
            if id(source) in gone_on_from:
                found[id(source)] = gradient  # what has come there is part of it
            else:
                self._add(found, id(source), gradient)
        return {key: after_hooks(gradient, self._hooks_on(key)) for key, gradient in found.items()}

    def _hooks_on(self, key: Any) -> list[Any]:
        """Returns the hooks that change the gradient of what is requested: autograd has it before those of a tensor
        from which gradient goes on."""
        if isinstance(key, str):
            return hooks_on_parameter(self.recorder, key)
        if isinstance(key, Value):
            return [] if key.call is None or self._leads_to(key.call) else hooks_on_value(key)
        tensor = self._outside.requested[key]
        return [] if self._outside.behind(tensor) else hooks_on(tensor)

    def _add(self, gradients: dict[Any, torch.Tensor], key: Any, gradient: torch.Tensor) -> None:
        known = gradients.get(key)
        gradients[key] = gradient if known is None else known + gradient

    # What leads to what is requested.

    def _find_leading(self, calls: list[Call]) -> None:
        """Notes which values and calls depend on what is requested."""
        todo, seen = calls, set[Call]()
        while todo:
            call = todo.pop()
            if call in seen:
                continue
            if call.arguments is None:
                raise released_error(call)
            seen.add(call)
            target = call.target
            while isinstance(target, FunctionDerivative):
                target = target.function
            if isinstance(target, OutsideDerivative):
                self._outside.check_again(target)
            todo += [value.call for value in differentiated(call, call.outputs) if isinstance(value.call, Call)]
        for call in sorted(seen, key=lambda call: (call.graph.index, call.index)):
            has_requested = not self.requested.names.isdisjoint(getattr(call.target, "parameter_names", ()))
            for value in differentiated(call, call.outputs):
                self._leads[value] = self._leads.get(value, False) or self._is_requested(value)
                has_requested |= self._leads[value]
            self._leads[call] = has_requested
            for output in call.outputs:
                if output is not None:
                    self._leads[output] = has_requested

    def _is_requested(self, value: Value) -> bool:
        if value.stage == EVERYWHERE:
            return id(value.data) in self._outside.requested or bool(self._outside.behind(value.data))
        return value.name in self.requested.names or value in self.requested.values

    def _leads_to(self, item: Value | Call) -> bool:
        return self._leads.get(item, False)

    # The derivative of one call.

    def _differentiate(self, call: Call) -> list[tuple[Value | str, torch.Tensor]]:
        """Records the derivative of a call; returns what gets gradient from it, and these gradients."""
        assert call.arguments is not None
        leaf = call.target if isinstance(call.target, Leaf) else None
        gradients = tuple([None if value is None else self._gradients.get(value) for value in call.outputs])
        active = {value for value, gradient in zip(call.outputs, gradients, strict=True) if gradient is not None}
        reached = set(differentiated(call, active))
        recorded = [item for items in arguments_of(call) for item in items if isinstance(item, Value)]
        values = [value for value in dict.fromkeys(recorded) if value in reached and self._leads_to(value)]
        names = {} if leaf is None else self._parameters_of(leaf, call, active)
        sources: list[Value | str] = [*(value.name or value for value in values), *names]
        if not sources:
            return []  # what is requested is behind another of its outputs
        given, gradients = self._again.given_to(call), gradients[: len(call.entry.metas)]
        numbers = tuple([given.places[id(self._again.tensor_of(value))] for value in values])
        with self._again.recording_as(call):
            if leaf is None:
                function: Any = call.target
                found = self.recorder.record_call(
                    FunctionDerivative(function),
                    (given.args, given.kwargs, gradients, numbers, given.written, self._autocast),
                    {},
                    call.stage,
                )
            else:
                derivative = repeating_leaf(self.recorder, leaf, ModuleDerivative)
                names_of_its = tuple(names.values())
                found = self.recorder.call_leaf(
                    derivative,
                    (*given[:3], gradients, numbers, names_of_its, given.written, self._autocast),
                    {},
                )
        return list(zip(sources, found, strict=True))

    def _parameters_of(self, leaf: Leaf, call: Call, active: set[Value]) -> dict[str, str]:
        """Returns the parameters of a module that are requested and that a call uses: what its module calls them."""
        names = {id(tensor): name for name, tensor in leaf.module.named_parameters()}
        used = {leaf.placed[number].name for number in parameters_of(call, active)}
        used |= {value.name for value in differentiated(call, active) if value.call is None}
        return {
            item.name: names[id(item.tensor)]
            for item in leaf.placed
            if item.name in self.requested.names and item.is_trained and item.name in used
        }
