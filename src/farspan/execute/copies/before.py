"""What a step finds, so that it can be run again: what it reads and writes, and what has been recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from farspan.call.leaf import Leaf, Placed
from farspan.graph import Call, Graph, Value
from farspan.torch_private import DisableTorchFunction, raw_grad, set_raw_grad

if TYPE_CHECKING:
    from farspan.execute.engine import Engine

__all__ = ["StepBefore", "why_not_again"]


class StepBefore:
    """What one rank finds before it runs its part of a step.

    Args:
        engine: This rank's.
        graphs: What has been recorded.
    """

    def __init__(self, engine: Engine, graphs: Sequence[Graph]) -> None:
        self._graphs = graphs
        self._sources = [(value, value.data) for graph in graphs for value in graph.sources]
        own = [item for item in engine.parameters.values() if item.is_owned and item.is_parameter]
        with DisableTorchFunction(), torch.no_grad():
            gradients = [(item.tensor, raw_grad(item.tensor)) for item in own]
            self._gradients = [(tensor, each, None if each is None else each.clone()) for tensor, each in gradients]
            tensors = {id(tensor): tensor for call in _calls(graphs) for tensor in _written_by(call, graphs)}
            known = {id(each) for _, each in gradients}
            self._written = [(each, each.detach().clone()) for each in tensors.values() if id(each) not in known]

    def restore(self) -> None:
        """Lets all be as it was found: nothing of the step has run."""
        for call in _calls(self._graphs):
            for value in call.outputs:
                value.data = value.ticket = None
                value.num_readers = value.num_users = 0
        for segment in [segment for graph in self._graphs for segment in graph.segments]:
            segment.leaves.clear()
            segment.entries.clear()
        for value, data in self._sources:
            value.data = data
            value.num_readers = value.num_users = 0
        with DisableTorchFunction(), torch.no_grad():
            for tensor, before in self._written:
                _put_back(tensor, before)
            for tensor, gradient, before in self._gradients:
                if gradient is not None and before is not None:
                    _put_back(gradient, before)
                set_raw_grad(tensor, gradient)


def why_not_again(engine: Engine, graphs: Sequence[Graph], *, is_resolving: bool) -> str:
    """Returns why a step could not be run again, if a rank were lost while it runs; "" if it could.

    Args:
        engine: This rank's.
        graphs: What has been recorded.
        is_resolving: Whether the step runs a call whose result cannot be foreseen.
    """
    recorder = engine.recorder
    backwards = [backward for graph in graphs for backward in graph.backwards]
    numbers = {graph.index for graph in graphs}
    before = [value.call for graph in graphs for value in graph.sources if value.meta.requires_grad]
    before += [root.call for backward in backwards for root in backward.roots]
    if is_resolving:
        return "it has a call whose result depends on data"
    if any(call is not None and call.graph.index not in numbers for call in before):
        return "a backward in it goes through an earlier step"
    if any(backward.requested is not None for backward in backwards):
        return "it has torch.autograd.grad"
    if any(backward.stops is not None for backward in backwards) or recorder.hooks.are_there:
        return "it calls hooks of gradients"
    if recorder.outside.is_used:
        return "tensors outside of the model are trained in it"
    if any(value.call is None and value.index for graph in graphs for value in graph.sources):
        return "it takes a batch that one rank alone has read (farspan.from_rank)"
    if engine.executor.measures:
        return "it is measured"
    return ""


def _calls(graphs: Sequence[Graph]) -> Iterator[Call]:
    return (call for graph in graphs for call in graph.calls)


def _written_by(call: Call, graphs: Sequence[Graph]) -> list[torch.Tensor]:
    """Returns what a call may write into on this rank, of what was there before."""
    if type(call.target) is Leaf:
        placed: Sequence[Placed] = call.target.placed
        return [item.tensor for item in placed if item.is_owned and (item.is_written or not item.is_parameter)]
    values = [call.arguments[number] for number in call.entry.mutated] if call.arguments is not None else []
    given = [value for value in values if type(value) is Value]
    given = [value for value in given if value.call is None or value.call.graph not in graphs]
    return [value.data for value in given if isinstance(value.data, torch.Tensor)]


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.shape == before.shape and tensor.dtype == before.dtype and tensor.layout is before.layout:
        tensor.detach().copy_(before)
    else:
        tensor.data = before
