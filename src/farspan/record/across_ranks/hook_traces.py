"""Backward hooks of the deprecated kind: what they return takes effect where the module is; nothing else may be seen.

They are called with the gradients of the last operation in the module, which nobody knows but autograd: inside it, at
the owner alone. A hook that fills a list there would leave the other ranks' lists empty, so the objects that it can
reach are compared before and after each call.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.call.leaf import LeakError
from farspan.call.side_effects.reachable import State, is_same
from farspan.call.side_effects.rehearsal import nothing_written
from farspan.call.surroundings.code import content_of, globals_of
from farspan.call.user_hooks import is_passed_over
from farspan.errors import RecordError
from farspan.torch_private import is_hook_of_all_modules

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["watched"]


def watched(recorder: Recording | None, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns a backward hook as `module`, which belongs to `recorder`, calls it; None if it has been called elsewhere.

    Full ones on all modules have been registered on what was recorded, also where such a call goes on in parts. What
    others do at the owner must not be missed on other ranks.
    """
    if recorder is None or recorder.is_recording:
        return None if is_passed_over(module) and is_hook_of_all_modules(hook) else hook
    if is_hook_of_all_modules(hook):
        return None
    return _without_trace(hook, recorder.engine.rank) if recorder.engine.num_ranks > 1 else hook


def _without_trace(hook: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """`hook`, a module's backward hook, so that it raises if it leaves a trace in objects that the program can read.

    Raises:
        RecordError: By the function that is returned.
    """

    @functools.wraps(hook, updated=())
    def looked_after(module: nn.Module, *gradients: Any) -> Any:
        places = _places_of(hook)
        before = [(name, place, place()) for name, place in places]
        state = State([*(item for _, _, item in before), *_tables(module, *(item for _, _, item in before))])
        versions = [(tensor, tensor._version) for tensor in state.tensors.values()]
        try:
            with nothing_written() if rank else contextlib.nullcontext():  # rank 0's lines and files are the program's
                result = hook(module, *gradients)
        except LeakError as error:
            raise _refusal(module, hook, f"does what only rank {rank} would show: {error.what}") from None
        is_changed = any(not is_same(place(), item) for _, place, item in before) or bool(state.changed())
        if is_changed or any(tensor._version != version for tensor, version in versions):
            raise _refusal(module, hook, "keeps something")
        return result

    return looked_after


def _refusal(module: nn.Module, hook: Any, does: str) -> RecordError:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return RecordError(
        f"a backward hook on {type(module).__name__} {does}: {name}.",
        why="it runs on the rank where the module is placed; the other ranks would not see what it keeps.",
        hint="module.register_full_backward_hook(hook), which runs on every rank",
    )


def _places_of(hook: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Returns the variables that `hook`, and the functions of its file that it calls, can read and bind again."""
    places: list[tuple[str, Callable[[], Any]]] = []
    stack, seen = [hook], set[int]()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, functools.partial):
            places.append(("", functools.partial(_itself, (item.args, item.keywords))))
            stack.append(item.func)
        elif isinstance(item, types.MethodType):
            places.append(("", functools.partial(_itself, item.__self__)))
            stack.append(item.__func__)
        elif isinstance(item, types.FunctionType):
            near = [(name, functools.partial(item.__globals__.get, name)) for name, _ in globals_of(item)]
            near += [("", functools.partial(content_of, cell)) for cell in item.__closure__ or ()]
            places += near
            places.append(("", functools.partial(_itself, item.__dict__)))
            places += [("", functools.partial(_itself, given)) for given in item.__defaults__ or ()]
            places += [("", functools.partial(_itself, given)) for given in (item.__kwdefaults__ or {}).values()]
            called = [place() for _, place in near]
            stack += [
                found
                for found in called
                if isinstance(found, types.MethodType)
                or (isinstance(found, types.FunctionType) and found.__module__ == item.__module__)
            ]
        else:
            places.append(("", functools.partial(_itself, item)))
            if isinstance(type(item).__call__, types.FunctionType):
                stack.append(type(item).__call__)
    return places


def _itself(item: Any) -> Any:
    return item


def _tables(*items: Any) -> list[dict[str, Any]]:
    """Returns what modules hold: `State` does not look into them."""
    return [dict_of for item in items if isinstance(item, nn.Module) for dict_of in [vars(item)]]
