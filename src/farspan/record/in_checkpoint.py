"""Refuses what a checkpoint would do twice, where its parts lie on several stages.

    checkpoint(block, x)      one process runs `block` again in the backward: it counts, prints and averages once more

What is called in a checkpoint is recorded call by call, where the module lies on several stages, and is not computed
again. A program whose numbers hang on the second run would get others. (A module that one stage runs as a whole is
computed again by torch, as in one process.)
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.leaf import Leaf, TraceError
from farspan.call.module_tables import has_user_hooks
from farspan.call.side_effects.attributes import HeldState, own_attributes
from farspan.call.side_effects.reachable import State
from farspan.call.side_effects.rehearsal import sets_no_variable
from farspan.call.surroundings.around import Surroundings
from farspan.call.user_hooks import user_forward_hooks
from farspan.record.tensor import LazyTensor, plain_versions
from farspan.torch_private.flags import is_in_checkpoint

if TYPE_CHECKING:
    from farspan.graph import Call
    from farspan.record.recording import Recording

_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""They write into their buffers in training mode only."""

__all__ = ["containers_around", "hooks_unchanged_in_checkpoint", "note_recounted", "unchanged_in_checkpoint"]


def note_recounted(recorder: Recording, call: Call, tensors: list[Any], checkpoint: list[tuple[int, int, str]]) -> None:
    """Notes a call of a checkpoint, and whether it counts: a backward through what comes after it is refused then."""
    call.recounted = checkpoint
    if _counts_again(recorder, call, tensors):
        checkpoint.append((call.graph.index, call.index, call.describe()))


def _counts_again(recorder: Recording, call: Call, tensors: list[Any]) -> bool:
    """Returns whether a call writes into what its module, or the model, keeps: one process would do so once more where
    a backward goes through it.
    """
    if any(id(tensors[number]) in recorder.placed for number in call.entry.mutated if number < len(tensors)):
        return True
    if type(call.target) is not Leaf:
        return False
    norms = [item for item in call.target.modules if isinstance(item, _WITH_STATISTICS)]
    of_norms = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return (
        bool(call.entry.attributes)
        or any(norm.training and norm.track_running_stats and norm.running_mean is not None for norm in norms)
        or any(item.is_written and id(item.tensor) not in of_norms for item in call.target.buffers)
    )


@contextlib.contextmanager
def unchanged_in_checkpoint(recorder: Recording, module: nn.Module, leaf: Leaf | None) -> Iterator[None]:
    """Call in the body, in a checkpoint, a module whose parts lie on several stages.

    Args:
        recorder: Of this rank.
        module: What is called, with its hooks.
        leaf: It, as it would be called as a whole if it left no trace.

    Raises:
        RecordError: It changes what it holds, or leaves a trace outside of itself.
    """
    if leaf is not None and leaf.leaves_trace:
        _refuse(recorder, f"{leaf.name} prints, writes into a file, or sets a variable around it")
    held, tensors = HeldState([module]), _tensors_of(module)
    versions = plain_versions(list(tensors.values()))
    graph, num_before = recorder.current, len(recorder.current.calls)
    try:
        with hooks_unchanged_in_checkpoint(recorder, module), sets_no_variable():
            yield
    except TraceError as error:
        _refuse(recorder, f"a {type(module).__name__} leaves a trace ({error.what.rstrip('.')})")
    calls = graph.calls[num_before:] if recorder.current is graph else None
    now = {name: item for name, item in _tensors_of(module).items() if tensors.get(name) is not item}
    anew = {name: item for name, item in now.items() if _is_set_anew(item, tensors.get(name), calls)}
    changed = [name for name in now if name not in anew]
    for name in changed or [name for _, name, _ in held.changed(puts_back=True) if name not in anew]:
        _refuse(recorder, f"a {type(module).__name__} changes its attribute {name}")
    module.__dict__.update({name: item for name, item in anew.items() if name in module.__dict__})
    if plain_versions(list(tensors.values())) != versions:
        _refuse(recorder, f"a {type(module).__name__} writes into a tensor of its own ({', '.join(tensors)})")


@contextlib.contextmanager
def hooks_unchanged_in_checkpoint(recorder: Recording, module: nn.Module) -> Iterator[None]:
    """Call a module and its hooks.

    Raises:
        RecordError: It is in a checkpoint, and a hook on it changes something: it keeps what it sees.
    """
    is_checkpoint = has_user_hooks(module) and (recorder.checkpoint is not None or is_in_checkpoint())
    hooks = user_forward_hooks(module) if is_checkpoint else []
    if not hooks:
        yield
        return
    around = Surroundings((), [hook for hook in map(_function_of, hooks) if isinstance(hook, types.FunctionType)])
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    held, state = HeldState([item for item in owners if isinstance(item, nn.Module)]), State(hooks)
    tensors = [*around.snapshot.tensors, *state.tensors.values()]
    versions, values = plain_versions(tensors), [getattr(item, "_value", None) for item in tensors]
    yield
    is_written = plain_versions(tensors) != versions
    is_written |= any(getattr(item, "_value", None) is not value for item, value in zip(tensors, values, strict=True))
    if is_written or around.look() or state.changed() or held.changed(puts_back=False):
        names = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
        _refuse(recorder, f"a forward hook on a {type(module).__name__} ({names}) keeps or counts something")


def _function_of(hook: Any) -> Any:
    """Returns the function in Python that a hook runs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook if isinstance(hook, types.FunctionType) else type(hook).__call__)


def containers_around(recorder: Recording, function: Any) -> list[nn.Module]:
    """Returns the modules whose parts lie on several stages that a function is bound to, or finds around it:
    `checkpoint(self.run, x)`.
    """
    cells = getattr(function, "__closure__", None) or ()
    around = [cell.cell_contents for cell in cells if cell != types.CellType()]
    found = [item for item in (getattr(function, "__self__", None), *around) if isinstance(item, nn.Module)]
    return [item for item in found if _lies_on_several_stages(recorder, item)]


def _lies_on_several_stages(recorder: Recording, module: nn.Module) -> bool:
    leaf = recorder.leaves.get(id(module))
    if leaf is not None:
        return leaf.is_open
    return any(id(parameter) in recorder.placed for parameter in module.parameters())  # else it is not distributed


def _is_set_anew(item: torch.Tensor, before: torch.Tensor | None, calls: Sequence[Call] | None) -> bool:
    """Returns whether an attribute has got a result of calls of a checkpoint that does not rest on what it was, such
    as a loss beside the output: to compute it twice gives the same.
    """
    if not isinstance(item, LazyTensor) or calls is None:
        return False
    old = {id(before), id(getattr(before, "_value", before))} - {id(None)}
    return not any(id(each) in old for call in calls for each in call.arguments or ())


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns its buffers and plain tensors, by name."""
    own = {**dict(module.named_buffers(recurse=False)), **own_attributes(module)}
    return {name: item for name, item in own.items() if isinstance(item, torch.Tensor)}


def _refuse(recorder: Recording, what: str) -> None:
    recorder.refuse(
        f"{what} in a checkpoint whose parts lie on several stages",
        why="one process would compute it again in the backward, and do so twice.",
        hint="leave the checkpoint out, and let farspan compute it again: farspan.distribute(model, remat=True)",
    )
