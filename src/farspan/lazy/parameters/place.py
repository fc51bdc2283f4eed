"""Placing a model: each rank keeps what its stages own, and a stub for every other parameter."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from farspan.errors import PlanError
from farspan.lazy.hooks import open_leaves
from farspan.lazy.intercept import watch_module, watch_parameter
from farspan.lazy.leaf import Leaf, Placed
from farspan.lazy.metadata import meta_of
from farspan.lazy.recorder import Recorder
from farspan.lazy.tensor import StubParameter

__all__ = ["place"]


def place(
    model: nn.Module,
    recorder: Recorder,
    *,
    owner: Mapping[str, int],
    leaf_stage: Mapping[str, int | None],
    stages: Sequence[int],
    is_mine: Sequence[bool],
    devices: Sequence[torch.device],
    prefix: str,
) -> list[Placed]:
    """Give `model`'s modules and parameters their stages, in place.

    Args:
        model: The user's model; its parameters keep their identity.
        recorder: Will see its calls.
        owner: Stage of the plan for each parameter, by its first name.
        leaf_stage: Stage that wholly owns a module, by name; None for containers and for what is placed nowhere.
        stages: The recorder's number of each stage of the plan.
        is_mine: For each stage of the plan, whether this rank runs it.
        devices: For each stage of the plan, its device (used where it is mine).
        prefix: Put before every name, to tell several models apart.

    Returns:
        Everything placed: parameters, and the buffers of leaves.
    """
    placed: dict[int, Placed] = {}
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # weak references, which would stand in the way of the stubs
    for name, parameter in model.named_parameters():
        placed[id(parameter)] = _place_tensor(
            prefix + name, parameter, owner[name], stages, is_mine, devices, recorder, is_parameter=True
        )
    for module in recurrent:
        module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in module._flat_weights]
    seen: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        placed[id(parameter)].is_tied |= id(parameter) in seen
        seen.add(id(parameter))
    leaves: list[Leaf] = []
    for name, module in model.named_modules():
        watch_module(module, recorder, prefix + name)
        stage = leaf_stage[name]
        if stage is None:
            continue
        for buffer_name, buffer in module.named_buffers(name):  # of parts that nobody placed, too
            if id(buffer) not in placed:
                placed[id(buffer)] = _place_tensor(
                    prefix + buffer_name, buffer, stage, stages, is_mine, devices, recorder, is_parameter=False
                )
    for name, module in model.named_modules():
        stage = leaf_stage[name]
        if stage is not None:
            below = [*module.parameters(), *module.buffers()]
            leaf = Leaf(
                prefix + name, module, stages[stage], [placed[id(item)] for item in below if id(item) in placed]
            )
            recorder.leaves[id(module)] = leaf
            recorder.leaf_parts.update(map(id, leaf.modules))
            leaves.append(leaf)
    open_leaves(recorder.leaves)
    recorder.placed.update(placed)
    recorder.roots.add(id(model))
    recorder.keep_alive.append((model, leaves))
    return list(placed.values())


def _place_tensor(
    name: str,
    tensor: torch.Tensor,
    stage: int,
    stages: Sequence[int],
    is_mine: Sequence[bool],
    devices: Sequence[torch.device],
    recorder: Recorder,
    *,
    is_parameter: bool,
) -> Placed:
    meta = meta_of(tensor)
    item = Placed(name, stages[stage], tensor, meta, is_mine[stage], is_parameter)
    if is_parameter:
        watch_parameter(tensor, recorder)
    if is_mine[stage]:
        if tensor.device != devices[stage]:
            tensor.data = tensor.data.to(devices[stage])
        return item
    stub = StubParameter.make(name, meta, recorder, is_parameter=is_parameter)
    try:
        torch.utils.swap_tensors(tensor, stub)  # whoever holds the parameter now holds the stub
    except RuntimeError as error:
        raise PlanError(
            f"the parameter {name} cannot be given to another rank.",
            why=f"something in this program holds a weak reference to it, or its autograd node: {error}",
            hint="call farspan.distribute(model) earlier: right after the model is built",
        ) from error
    return item
