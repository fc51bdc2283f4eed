"""Recording `backward()`: what it starts from, and the errors torch would give."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from farspan.call.leaf import WholeError
from farspan.call.modes import current_modes
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.canonical import digest_of
from farspan.graph import (
    Backward,
    Call,
    RequestedGradients,
    Stops,
    Value,
    first_released,
    hooked_calls,
    passed,
    released_error,
    whole_name,
)
from farspan.record.derivatives.refusal import check_requested
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.call.modes import Modes
    from farspan.record.recording import Recording

__all__ = ["record_backward", "value_of_root"]

_KEEP_TENSORS = frozenset(
    [
        *[F.linear, F.embedding, F.layer_norm, F.scaled_dot_product_attention, torch.matmul, torch.Tensor.matmul],
        *[F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss, F.smooth_l1_loss, F.huber_loss],
    ]
)
"""Operations that keep tensors for their backward, whatever they are given."""


def record_backward(
    recorder: Recording,
    tensors: Any,
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *,
    inputs: Any = None,
    requested: RequestedGradients | None = None,
) -> Backward:
    """Add a backward to the current graph; the arguments are those of `torch.autograd.backward`.

    Args:
        requested: What `torch.autograd.grad` asks for, if it is that.

    Returns:
        What was added.

    Raises:
        RuntimeError: As torch: a root that needs no gradient, or that is no scalar and has no gradient given, or of
            which the graph was not kept.
        RecordError: What cannot be recorded.
    """
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [gradients] if isinstance(gradients, torch.Tensor) or gradients is None else list(gradients)
    given += [None] * (len(roots) - len(given))
    if create_graph:
        raise WholeError(
            "backward with create_graph=True cannot be recorded.",
            why=f"at {format_where(find_where())}: gradients in .grad have no history.",
            hint="torch.autograd.grad(loss, list(model.parameters()), create_graph=True)",
        )
    if inputs is not None:
        recorder.refuse("backward(inputs=...) cannot be recorded", hint="freeze the other parameters instead")
    if recorder.gradients.memory.pairs and requested is None:
        recorder.gradients.memory.begin_backward()
    given = [gradient.read() if type(gradient) is LazyTensor else gradient for gradient in given]
    values = [value_of_root(recorder, root, number, given[number]) for number, root in enumerate(roots)]
    if requested is None:
        _check_kept(recorder, values)
    else:
        check_requested(requested, values)
    seeds = [None if seed is None else recorder.argument(seed) for seed in given]
    graph = recorder.current
    backward = Backward(
        graph,
        values,
        seeds,
        retain_graph=bool(retain_graph),
        modes=current_modes(),
        requested=requested,
        where=find_where(),
    )
    if recorder.splitting.stages:
        recorder.hooks.check_backward(backward)
    moments = recorder.held_objects.moments
    backward.moment = moments.see_all() if moments.latest.snapshots else moments.latest
    graph.backwards.append(backward)
    # The roots may lie in earlier graphs: their segments must deliver, so they count as inputs of this graph.
    for value in values:
        if value.segment is not None and not value.segment.executed:
            value.segment.outputs[value] = None
    graph.note_backward(backward, _digest_of(bool(retain_graph), backward.modes))
    if recorder.parameter_values.set_at:
        _check_weights(recorder, backward)
    if recorder.has_hooked_calls:
        _stop_for_hooks(recorder, backward)
    if requested is not None:
        positions = graph.positions(list(requested.values))
        graph.note_path((digest_of(sorted(requested.names)), len(requested.outside), len(positions), *positions))
    return backward


def value_of_root(recorder: Recording, root: Any, number: int, given: torch.Tensor | None) -> Value:
    """Returns the value of a root, the one of that number, of which the gradient is `given`."""
    if type(root) is not LazyTensor:
        recorder.refuse("backward from a tensor that was not recorded together with recorded ones")
    if not root.requires_grad:
        raise RuntimeError(f"element {number} of tensors does not require grad and does not have a grad_fn")
    if given is None and root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if type(root._value.call) is not Call:
        recorder.deferred.record_one(root)
    return root._value


def _check_kept(recorder: Recording, roots: Sequence[Value]) -> None:
    """Raise torch's error where torch would, at a backward for which another one has left nothing: the program may
    catch it, and go on."""
    current = recorder.current  # that of a lane, in lanes
    is_new = not current.backwards and all(root.call is None or root.call.graph is current for root in roots)
    if is_new and not any(source.call is not None and source.meta.requires_grad for source in current.sources):
        return
    graphs = dict.fromkeys([*recorder.pending, current])
    earlier = [backward for graph in graphs for backward in graph.backwards]
    released = first_released(roots, earlier, lambda call: call.target in _KEEP_TENSORS)
    if released is not None:
        raise released_error(released)


def _check_weights(recorder: Recording, backward: Backward) -> None:
    """Raise if `backward` goes through what another rank has computed with a parameter as it was before its data were
    written: one process uses the new data there."""
    set_at, engine = recorder.parameter_values.set_at, recorder.engine
    for call in passed(backward):
        weights = [item for item in call.arguments or () if isinstance(item, Value) and item.name]
        for value in weights:
            is_old = call.graph.index < set_at.get(whole_name(value.name), 0)
            if is_old and engine.owner_of(call.outputs[0]) != engine.owner_of(value):
                recorder.refuse(
                    f"{value.name} was written through .data between a forward that uses it and its backward",
                    why=f"the call at {format_where(call.where)} ran on another rank, which has it as it was before.",
                    hint="loss.backward() before the write; or name a module around all that use it in the plan",
                )


def _stop_for_hooks(recorder: Recording, backward: Backward) -> None:
    """Let `backward` stop where it passes calls on whose outputs there are hooks."""
    calls, near = hooked_calls(backward)
    if near is not None and near.call is not None:
        recorder.refuse(
            f"a backward cannot stop for the hooks on {near.describe()}",
            why=f"at {format_where(near.call.where)}: it was computed together with its use, when one was read.",
            hint="register the hook before a value is read (loss.item(), print(loss))",
        )
    if calls:
        backward.stops = Stops(calls)
        recorder.current.note_path([number for call in calls for number in (call.graph.index, call.index)])


@functools.lru_cache(maxsize=64)
def _digest_of(retain_graph: bool, modes: Modes) -> int:
    """Digest of what most backwards have in common; it is computed once for each kind."""
    return digest_of((retain_graph, modes))
