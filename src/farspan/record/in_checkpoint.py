"""Refuses what a checkpoint would do twice, where its parts lie on several stages.

    checkpoint(block, x)      one process runs `block` again in the backward: it counts, prints and averages once more

What is called in a checkpoint is recorded call by call, where the module lies on several stages, and is not computed
again. A program whose numbers hang on the second run would get others. (A module that one stage runs as a whole is
computed again by torch, as in one process.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.call.leaf import Leaf
from farspan.call.side_effects.attributes import HeldState

if TYPE_CHECKING:
    from farspan.graph import Call
    from farspan.record.recording import Recording

_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""They write into their buffers in training mode only."""

__all__ = ["counts_again", "unchanged_in_checkpoint"]


def counts_again(recorder: Recording, call: Call, tensors: list[Any]) -> bool:
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
        module: What is called.
        leaf: It, as it would be called as a whole if it left no trace.

    Raises:
        RecordError: It changes what it holds, or leaves a trace outside of itself.
    """
    if leaf is not None and leaf.leaves_trace:
        _refuse(recorder, f"{leaf.name} prints, writes into a file, or sets a variable around it")
    held = HeldState([module])
    yield
    for _, name in held.changed():
        _refuse(recorder, f"a {type(module).__name__} changes its attribute {name}")


def _refuse(recorder: Recording, what: str) -> None:
    recorder.refuse(
        f"{what} in a checkpoint whose parts lie on several stages",
        why="one process would compute it again in the backward, and do so twice.",
        hint="leave the checkpoint out, and let farspan compute it again: farspan.distribute(model, remat=True)",
    )
