"""Containers that do what only a whole can do: second derivatives, `torch.func`. They are called as one unit.

Their parts may lie on several stages, the parameters of which come to the one where it runs as values, and gradients go
back: right for every plan, and slower than a plan that has the parts together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from farspan.call.leaf import Leaf, WholeError
from farspan.call.module_tables import has_user_hooks
from farspan.record.around_calls import is_clear_around

if TYPE_CHECKING:
    from farspan.record.recording import Recording
    from farspan.record.surgery.attempt import Attempt

__all__ = ["close"]


def close(
    recorder: Recording, module: nn.Module, num_begun: int, error: Exception, attempt: Attempt | None
) -> Leaf | None:
    """Let `module`, which is a container, be called as one unit from now on, and undo what the attempt has changed.

    Args:
        recorder: Whose module it is.
        module: Its forward has been tried and has ended in an error.
        num_begun: How many calls the present graph had before that.
        error: It; code that is not Python raises another one than the `WholeError` that it runs into.
        attempt: The call that has ended in it; None if nothing is known of what it has changed.

    Returns:
        The leaf; None where that would not help, or the attempt has changed something already.

    Raises:
        WholeError: The error that scripted code has raised, where that would not help.
    """
    reached, recorder.reached = recorder.reached, None
    if isinstance(error, WholeError):
        return _undone(_closed(recorder, module, num_begun), module, attempt, error)
    if reached is None:
        return None
    leaf = _closed(recorder, module, num_begun)
    if leaf is None:
        raise reached from error
    return _undone(leaf, module, attempt, error)


def _undone(leaf: Leaf | None, module: nn.Module, attempt: Attempt | None, error: Exception) -> Leaf | None:
    if leaf is None:
        return None
    if attempt is None:
        raise WholeError(
            f"{type(module).__name__} can run as one unit only, and has been called part by part before.",
            why="this call needs second derivatives or torch.func; nobody knows what it has changed already.",
            hint="place its parts on one rank, or let a call of this kind be among its first",
        ) from error
    attempt.undo()
    return leaf


def _closed(recorder: Recording, module: nn.Module, num_begun: int) -> Leaf | None:
    below = [*module.parameters(), *module.buffers()]
    placed = [recorder.placed[id(item)] for item in below if id(item) in recorder.placed]
    known = recorder.leaves.get(id(module)) if id(module) in recorder.splitting.opened else None
    if not placed or (id(module) in recorder.leaves and known is None):
        return None
    if has_user_hooks(module) or not is_clear_around():
        return None
    if any(map(has_user_hooks, module.modules())) or any(not item.is_parameter for item in placed):
        return None
    if any(call.entry.mutated for call in recorder.current.calls[num_begun:]):
        return None
    if known is not None:
        known.is_open = False
        recorder.splitting.opened.discard(id(module))
        return known
    name = next((name for name, part in recorder.outermost.named_modules() if part is module), None)
    if name is None:
        return None
    leaf = Leaf(recorder.roots.get(id(recorder.outermost), "") + name, module, placed[0].stage, placed)
    recorder.leaves[id(module)] = leaf
    recorder.leaf_parts.update(map(id, leaf.modules))
    return leaf
