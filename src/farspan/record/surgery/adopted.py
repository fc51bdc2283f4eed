"""Modules that the program puts into a distributed model after `distribute`: a new head, an adapter, another block.

The plan knows nothing of them. One that holds nothing of the model is called as one unit, where the data are that it is
first called with; its parameters and buffers stay what they are, on every rank alike, and are arguments of its calls.
One that is put around parts of the model is called part by part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.call.draws.scope import active
from farspan.call.leaf import Leaf
from farspan.call.pytree.template import flatten
from farspan.record.ops.op_placement import latest_stage
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.record.recording import Recording

__all__ = ["adopt"]


def adopt(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_watched: Callable[[nn.Module], bool],
    watch: Callable[[nn.Module, Recording, str], None],
) -> bool:
    """Take in `module`, which nobody has distributed, if a model that is running has it among its parts by now.

    Args:
        module: About to be called.
        args: With which.
        kwargs: With which.
        is_watched: Whether a module has been taken in.
        watch: Takes in a module.

    Returns:
        Whether it has been.
    """
    recorder: Recording | None = active.recorder
    if recorder is None or not recorder.is_recording or recorder.frame is recorder.root:
        return False
    if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
        return False  # its operations are recorded one by one
    lazy = [tensor for tensor in flatten((args, kwargs))[1] if type(tensor) is LazyTensor]
    model = recorder.outermost
    if not lazy or model is None:
        return False
    name = next((name for name, part in model.named_modules() if part is module), None)
    if name is None:
        return False
    name = recorder.roots.get(id(model), "") + name
    if any(map(is_watched, module.modules())):
        watch(module, recorder, name)
        return True
    stage = latest_stage([tensor._value for tensor in lazy])
    for inner, part in module.named_modules(prefix=name):
        watch(part, recorder, inner)
        recorder.leaves[id(part)] = Leaf(inner, part, stage, [])
        recorder.leaf_parts.add(id(part))
    return True
