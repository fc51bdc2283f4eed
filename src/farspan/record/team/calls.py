"""Calls of modules on split stages: which are called part by part, and what the program gets of them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.draws.scope import active, replayed
from farspan.record.in_checkpoint import containers_around, unchanged_in_checkpoint
from farspan.record.team.team_tensor import SplitStage
from farspan.record.tensor import LazyTensor
from farspan.torch_private import recompute_through

if TYPE_CHECKING:
    from farspan.record.recording import Recording, SplitStages

__all__ = ["call_split", "checkpointed", "open_split", "watch_checkpoints"]


def call_split(recorder: Recording, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module as the program does, from outside any other, where there are split stages."""
    splitting = recorder.splitting
    around, splitting.is_inside = splitting.inside, True
    try:
        return splitting.left(call(*args, **kwargs))
    finally:
        splitting.is_inside, splitting.inside = False, around


@contextlib.contextmanager
def checkpointed(function: Any) -> Iterator[None]:
    """What is recorded in the body runs in a checkpoint of `function`: where stages are split it is computed again as
    it asks.
    """
    recorder = active.recorder
    if recorder is None or not recorder.is_recording:
        yield
        return
    splitting, own = recorder.splitting, object()
    if splitting.stages and splitting.unit is None:
        splitting.unit = own
    around = recorder.checkpoint
    if around is None and torch.is_grad_enabled():
        recorder.checkpoint = []
    try:
        with contextlib.ExitStack() as stack:
            for module in containers_around(recorder, function) if recorder.checkpoint is not None else ():
                stack.enter_context(unchanged_in_checkpoint(recorder, module, None))
            yield
    finally:
        recorder.checkpoint = around
        if splitting.unit is own:
            splitting.unit = None


def watch_checkpoints() -> None:
    """Let checkpoints draw the same numbers again, and know where their operations are recorded."""
    recompute_through(
        functools.partial(replayed, is_first=False), lambda item: isinstance(item, LazyTensor), checkpointed
    )


def open_split(recorder: Recording, model: nn.Module, stages: Mapping[str, SplitStage]) -> None:
    """Let the modules of split stages be called part by part, down to single operations.

    Args:
        recorder: Records their calls.
        model: It has been placed.
        stages: By name, those of modules that lie on a split stage.
    """
    recorder.splitting.takes_operations = recorder.splitting
    leaves = [recorder.leaves.get(id(module)) for module in model.modules()]
    recorder.splitting.crossings.add(stages.values(), [leaf.stage for leaf in leaves if leaf is not None])
    for name, module in model.named_modules():
        leaf, split = recorder.leaves.get(id(module)), stages.get(name)
        if leaf is None or split is None or isinstance(module, torch.jit.ScriptModule):
            continue
        recorder.splitting.stages[id(module)] = split
        weakref.finalize(module, _forget, recorder.splitting, id(module))
        if leaf.is_open:
            continue
        if leaf.buffers and len(leaf.modules) == 1:  # what it writes into its buffers is part of it
            for item in module.parameters():
                placed = recorder.placed.get(id(item))
                if placed is not None and item.dim() > 1:
                    recorder.splitting.matrices.kept_whole.setdefault(placed.name, "its module has buffers")
            continue
        leaf.is_open = True
        recorder.splitting.opened.add(id(module))


def _forget(splitting: SplitStages, module_id: int) -> None:
    splitting.stages.pop(module_id, None)
    splitting.opened.discard(module_id)
