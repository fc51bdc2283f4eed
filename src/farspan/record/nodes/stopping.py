"""A backward at one of its stops: the hooks of a call, and on which way the gradients go on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.call.pytree.canonical import digest_of
from farspan.graph import BackwardSegment, Value
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.graph import Backward, Call
    from farspan.record.recording import Recording

__all__ = ["run_hooks", "take_up"]


def run_hooks(recorder: Recording, backward: Backward, call: Call) -> None:
    """Call the hooks of `call` with what has come of its gradients, and hand on what they make of them."""
    assert backward.stops is not None
    stops = backward.stops.waiting[call]
    gradients: list[Any] = [None] * len(call.outputs)
    for stop, gradient in zip(stops, _arrived(recorder, backward, stops), strict=True):
        gradients[_value_at(stop).index] = gradient
        requested = backward.requested
        if requested is not None and _value_at(stop) in requested.values and call in stop.outgoing[0].dst.calls:
            requested.before_hooks[_value_at(stop)] = gradient
    given = list(gradients)
    with torch.no_grad():
        gradients = call.hooks.run(gradients)
        for number, gradient in enumerate(gradients):
            if gradient is None and given[number] is not None:
                gradients[number] = torch.zeros_like(given[number])
    found = [gradients[_value_at(stop).index] for stop in stops]
    for gradient in found:
        recorder.deferred.record_one(gradient)
    is_pending = any(type(gradient) is LazyTensor and gradient._value.pending for gradient in found)
    if is_pending or _is_gradient_used(recorder):
        recorder.engine.flush("gradients that hooks use, before more is added to them")
    for stop, gradient in zip(stops, found, strict=True):
        is_recorded = type(gradient) is LazyTensor
        stop.stage = gradient._value.stage if is_recorded else _value_at(stop).stage
        data = gradient._value.data if is_recorded else gradient.detach()
        if data is not None:
            recorder.engine.executor.put(stop.outgoing[0], data)
    backward.stops.go_on(call)


def take_up(recorder: Recording, backward: Backward) -> None:
    """Let the next flush go on with `backward`."""
    graph = recorder.current
    backward.graph = graph
    graph.backwards.append(backward)
    graph.note_backward(backward, digest_of("goes on"))
    recorder.next_graph()


def _is_gradient_used(recorder: Recording) -> bool:
    """Returns whether recorded calls take parameters' gradients, to which the backward may add when it goes on."""
    graphs = (*recorder.pending, recorder.current)
    return any(source.gradient_of for graph in graphs for source in graph.sources)


def _arrived(recorder: Recording, backward: Backward, stops: list[BackwardSegment]) -> list[Any]:
    """Returns the gradients that have come to `stops`: what was recorded passed on, and what the backward was begun
    with."""
    engine = recorder.engine
    coming = [stop for stop in stops if stop.incoming]
    data = [engine.executor.take(stop.incoming[0]) for stop in coming]
    strides = [None if item is None else list(item.stride()) for item in data]
    if coming and engine.num_ranks > 1:
        parts = [json.loads(part) for part in engine.gather("gradients at hooks", json.dumps(strides).encode())]
        strides = [next(item for item in of_ranks if item is not None) for of_ranks in zip(*parts, strict=True)]
    metas = [
        replace(_value_at(stop).meta, stride=tuple(stride or ()), requires_grad=False, is_parameter=False)
        for stop, stride in zip(coming, strides, strict=True)
    ]
    sources = engine.new_sources(
        [(intern(meta), stop.stage, item) for meta, stop, item in zip(metas, coming, data, strict=True)]
    )
    lazies = {stop: LazyTensor.make(value, recorder) for stop, value in zip(coming, sources, strict=True)}
    found: list[Any] = []
    for stop in stops:
        value = _value_at(stop)
        seeds = [seed for root, seed in zip(backward.roots, backward.gradients, strict=True) if root is value]
        parts_of_it = [_seed(value) if seed is None else seed for seed in seeds]
        parts_of_it += [lazies[stop]] if stop in lazies else []
        found.append(parts_of_it[0])
        for item in parts_of_it[1:]:
            found[-1] = found[-1] + item
    return found


def _seed(value: Value) -> torch.Tensor:
    return torch.ones(value.meta.shape, dtype=value.meta.dtype, device=value.meta.device)


def _value_at(stop: BackwardSegment) -> Value:
    key = stop.outgoing[0].key
    assert isinstance(key, Value)
    return key
