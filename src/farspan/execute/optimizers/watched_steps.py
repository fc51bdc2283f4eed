"""Optimizers: the recorded backwards run before a step, which then sees the whole model (`step_view`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from farspan.execute.engine import Engine
from farspan.execute.optimizers.kept_state import raw_state
from farspan.execute.optimizers.lent_state import state_in
from farspan.execute.optimizers.own_share import OwnShares
from farspan.execute.optimizers.shown import keeps_beside_state, kept_for, show_to_all, show_to_step, whole_state
from farspan.execute.optimizers.states import GivenState, for_this_rank, placed_in
from farspan.execute.optimizers.step_view import StepView
from farspan.execute.optimizers.steps.in_gradient_hooks import check_step_in_hook
from farspan.execute.process.world import current_engine
from farspan.launch.raised.tracebacks import cut_frames
from farspan.launch.rank.notes import end_noting_training
from farspan.record.memory.leaves import check_made_of_parameters
from farspan.record.ops.overrides import read_recorded
from farspan.record.unrecorded import unrecorded
from farspan.torch_private import (
    call_inside_step_hooks,
    forget_inside_step_hooks,
    has_step_hooks,
    load_between_hooks,
)

__all__ = ["watch_optimizers", "watch_state"]

_watched = False
_original_zero_grad: Any = Optimizer.zero_grad
_original_state_dict: Any = Optimizer.state_dict
_original_load: Any = Optimizer.load_state_dict


def watch_optimizers() -> None:
    """Hook all optimizers of this process, once."""
    global _watched
    if not _watched:
        end_noting_training()
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        Optimizer.zero_grad = _zero_grad  # type: ignore[method-assign]
        Optimizer.state_dict = _state_dict  # type: ignore[method-assign]
        Optimizer.load_state_dict = _load_state_dict  # type: ignore[method-assign]
        watch_state()
        _watched = True


def watch_state() -> None:
    """Let `optimizer.state` of all optimizers of this process be what may be seen of it, once there is a use for that:
    they keep it in their attributes as before."""
    Optimizer.state = property(_get_state, _replace_state)  # type: ignore[assignment]


# What is kept, outside of a step.


def _get_state(optimizer: Optimizer) -> Any:
    try:
        state = state_in(optimizer.__dict__)
    except KeyError:
        raise AttributeError(f"'{type(optimizer).__name__}' object has no attribute 'state'") from None
    engine = current_engine()
    if engine is not None and engine.recorder.is_recording:
        _show(engine, optimizer)
        if engine.values.optimizers.number_of(optimizer) is not None:
            engine.values.optimizers.held.add(optimizer)
    return state


def _replace_state(optimizer: Optimizer, state: Any) -> None:
    """The program gives an optimizer another state."""
    engine = current_engine()
    if engine is not None and engine.recorder.is_recording and "state" in vars(optimizer):
        engine.slices.look(optimizer)
    _set_state(optimizer, state)


def _set_state(optimizer: Optimizer, state: Any) -> None:
    optimizer.__dict__["state"] = state
    engine = current_engine()
    if engine is not None:
        engine.losses.change_state(optimizer)
        engine.values.optimizers.stepped.discard(optimizer)


def _show(engine: Engine, optimizer: Optimizer) -> None:
    """The program may see what the optimizer keeps."""
    if engine.masks.owned.slices:
        engine.slices.look(optimizer)
    _show_all(engine, optimizer)


def _show_all(engine: Engine, optimizer: Optimizer) -> None:
    steps, shards = engine.values.optimizers, engine.groups.shards
    number = steps.number_of(optimizer)
    if number is not None and shards is not None and shards.is_divided(optimizer):
        shards.gather(optimizer)
        steps.stepped.add(optimizer)
    if number is not None and optimizer in steps.stepped:
        engine.losses.change_state(optimizer)
        steps.stepped.discard(optimizer)
        show_to_all(engine, optimizer, number)


# Gradients.


@functools.wraps(Optimizer.zero_grad)
def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Does what torch's own does, parameter by parameter: here all together."""
    engine = current_engine() if set_to_none else None
    if engine is not None and engine.recorder.is_recording:
        placed = placed_in(optimizer, engine.recorder.placed)
        num_parameters = sum([len(group["params"]) for group in optimizer.param_groups])
        if placed and len(placed) == num_parameters and engine.recorder.gradients.clear(placed):
            return
    _original_zero_grad(optimizer, set_to_none)


# Saving and loading.


@functools.wraps(Optimizer.state_dict)
def _state_dict(optimizer: Optimizer) -> Any:
    """Returns the whole state, with what other ranks keep fetched from there."""
    engine = _engine_of(optimizer)
    if engine is None:
        return _original_state_dict(optimizer)
    if engine.recorder.has_pending():
        engine.flush("optimizer.state_dict()")
    shards = engine.groups.shards
    is_divided = shards is not None and shards.is_divided(optimizer)
    if not is_divided:
        _show_all(engine, optimizer)
    own, is_held = raw_state(optimizer), optimizer in engine.values.optimizers.held
    whole = shards.whole_state(optimizer) if shards is not None and is_divided else whole_state(engine, optimizer)
    _set_state(optimizer, whole)
    try:
        found = _original_state_dict(optimizer)
    finally:
        _set_state(optimizer, own)
        if not is_held:
            engine.values.optimizers.held.discard(optimizer)
    found["param_groups"] = read_recorded(found["param_groups"])
    return found


@functools.wraps(Optimizer.load_state_dict)
def _load_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give this rank its part; every rank loads the same dictionary."""
    engine = _engine_of(optimizer)
    if engine is None:
        _original_load(optimizer, state_dict)
        return
    load = functools.partial(_load, engine, optimizer)  # hooks are the program's: they see what the program sees
    load_between_hooks(optimizer, state_dict, load, calls_first=not isinstance(state_dict, GivenState))


def _load(engine: Engine, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    engine.slices.come_home("optimizer.load_state_dict()")
    engine.barrier("optimizer.load_state_dict()")  # nobody reads the old state any more
    if engine.groups.shards is not None:
        engine.groups.shards.begin_load(optimizer)
    given, state_dict = for_this_rank(optimizer, state_dict, engine.recorder.placed)
    with unrecorded(engine.recorder):
        _original_load(optimizer, state_dict)
        for item in placed_in(optimizer, engine.recorder.placed):
            if engine.num_ranks > 1 and item.tensor in optimizer.state:
                loaded = optimizer.state[item.tensor]
                optimizer.state[item.tensor] = kept_for(engine, item, loaded, given.get(item.name))
    engine.values.optimizers.add(optimizer)
    engine.values.optimizers.stepped.add(optimizer)
    _shares(engine).has_loaded(engine, optimizer)
    engine.losses.change_state(optimizer)
    if engine.groups.shards is not None:
        engine.groups.shards.has_loaded(optimizer, placed_in(optimizer, engine.recorder.placed))
    engine.parameters_changed(())


# Steps. torch calls the hooks of all optimizers, among them ours, outside of an optimizer's own: the program's hooks
# around a step are of the program, so it begins behind those before it, and ends before those after it.


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if has_step_hooks(optimizer) and _is_outermost():
        call_inside_step_hooks(optimizer, _begin_inside, _end_inside)
        return None
    return _begin_step_for_user(optimizer, args, kwargs)


def _begin_step_for_user(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Begin a step; what that raises has the program's frames only."""
    try:
        return _begin_step(optimizer, args, kwargs)
    except Exception as error:
        cut_frames(error)
        raise


def _begin_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    return _begin_step_for_user(optimizer, args, kwargs) if _is_outermost() else None


def _end_inside(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = current_engine()
    if engine is not None and engine.values.optimizers.depth == 1:  # not a step that the step has called
        _end_step(optimizer, args, kwargs)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _end_step(optimizer, args, kwargs)
    engine = current_engine()
    if engine is None or not engine.recorder.is_in_optimizer:
        forget_inside_step_hooks(optimizer)


def _is_outermost() -> bool:
    """Returns whether a step that begins is the program's: not called by another step, or in a gradient hook."""
    engine = current_engine()
    return engine is not None and engine.recorder.is_recording and not engine.recorder.is_in_optimizer


def _begin_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    raw_state(optimizer)  # it is lent no more
    engine = current_engine()
    placed = [] if engine is None else placed_in(optimizer, engine.recorder.placed)
    if engine is None or not placed:
        if engine is not None and engine.groups.outside is not None and engine.recorder.is_recording:
            _average_outside(engine, optimizer)
        return None
    if not engine.recorder.is_recording and not engine.recorder.is_in_optimizer:
        check_step_in_hook(engine, optimizer)
        return None
    engine.recorder.hooks.check_step(placed)
    if not engine.recorder.is_in_optimizer:
        what = "step(), with hooks," if _shares(engine).needs_hooks_everywhere(optimizer) else "step()"
        engine.groups.note_step(optimizer, engine.events.step(optimizer, what, engine.recorder.placed))
        if engine.groups.outside is not None:
            engine.groups.outside.add(_outside(engine, optimizer))
    steps = engine.values.optimizers
    if engine.recorder.is_in_optimizer:  # a step that calls the one of its base class, or of an optimizer it wraps
        steps.depth += 1
        _begin(engine, optimizer)
        return None
    begins_with_closure = _begins_with_closure(optimizer, args, kwargs)
    if not begins_with_closure:
        _run_recorded(engine, "optimizer.step()", optimizer)
    if engine.recorder.stale_casts.cast:
        engine.recorder.stale_casts.note_step(placed)
    if engine.recorder.made_of_parameters:
        check_made_of_parameters(engine.recorder, placed)
    if engine.masks.owned.slices:
        engine.slices.begin_step()
    args, kwargs = _with_recording_closure(engine, args, kwargs, has_changed=not begins_with_closure)
    is_as_left = optimizer in steps.stepped
    _begin(engine, optimizer)
    steps.depth = 1
    shards, has_closure = engine.groups.shards, _has_closure(args, kwargs)
    share = None if shards is None else shards.take(optimizer, placed)
    if share is None:
        share = _shares(engine).take(engine, optimizer, placed, is_as_left=is_as_left, has_closure=has_closure)
    if share is None:
        _enter(engine)
        return args, kwargs
    engine.recorder.enter_optimizer()
    return (share, *args[1:]), kwargs


def _outside(engine: Engine, optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the tensors of an optimizer that are not of the model."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return [tensor for tensor in tensors if id(tensor) not in engine.recorder.placed]


def _average_outside(engine: Engine, optimizer: Optimizer) -> None:
    """Lets all groups have the mean of the gradients of parameters outside the model, which an optimizer has alone."""
    trained = [tensor for tensor in _outside(engine, optimizer) if isinstance(tensor, torch.nn.Parameter)]
    if trained and engine.groups.outside is not None:
        engine.groups.outside.add(trained)
        _run_recorded(engine, "optimizer.step()", optimizer)


def _begin(engine: Engine, optimizer: Optimizer) -> None:
    """Turns what the optimizer keeps into what its step sees."""
    (steps := engine.values.optimizers).add(optimizer)
    show_to_step(engine, optimizer, is_as_left=optimizer in steps.stepped)
    steps.stepped.add(optimizer)


def _enter(engine: Engine) -> None:
    engine.recorder.enter_optimizer()
    if engine.num_ranks > 1:
        steps = engine.values.optimizers
        steps.view = engine.recorder.step_view = steps.view or StepView(engine)
        steps.view.begin()


def _shares(engine: Engine) -> OwnShares:
    steps = engine.values.optimizers
    steps.shares = steps.shares or OwnShares()
    return steps.shares


def _run_recorded(engine: Engine, reason: str, optimizer: Optimizer) -> None:
    memory, placed = engine.recorder.gradients.memory, engine.recorder.placed
    with memory.before_step(placed_in(optimizer, placed)) if memory.pairs else contextlib.nullcontext():
        if engine.recorder.has_pending():
            engine.flush(reason, ends_window=True)
        else:
            engine.barrier(reason)  # a slower rank may still read what the step will change
        engine.average_gradients(has_passed_barrier=True)


def _has_closure(args: Any, kwargs: Any) -> bool:
    return any(item is not None for item in (*args[1:], *kwargs.values()))


def _begins_with_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Returns whether the step calls a closure before it reads any parameter, as torch's own do: what was recorded
    before can run together with what the closure records.
    """
    has_closure = any(map(callable, (*args[1:2], kwargs.get("closure"))))
    return has_closure and type(optimizer).step.__module__.startswith("torch.optim.")


def _with_recording_closure(engine: Engine, args: Any, kwargs: Any, *, has_changed: bool) -> tuple[Any, Any]:
    """Wraps the closure that the optimizer (first argument) may get: what it does is recorded, and run at its end.

    `has_changed`: whether parameters may have changed before its first call; if not, slower ranks may still read them.
    """

    def wrap(closure: Any) -> Any:
        def recorded() -> Any:
            nonlocal has_changed
            depth = engine.values.optimizers.depth
            engine.recorder.leave_optimizer()
            if has_changed:
                engine.parameters_changed(placed_in(args[0], engine.recorder.placed))
            has_changed = True
            result = closure()  # if it raises, the program is where it may catch that: outside of the step
            _run_recorded(engine, "the closure of optimizer.step()", args[0])
            result = engine.groups.mean(result)  # a line search must find the same in all groups
            engine.values.optimizers.depth = depth
            if engine.groups.shards is not None and engine.groups.shards.is_stepping:
                engine.recorder.enter_optimizer()
            else:
                _enter(engine)
            return result

        return recorded if callable(closure) else closure

    return (*args[:1], *map(wrap, args[1:2]), *args[2:]), {
        name: wrap(value) if name == "closure" else value for name, value in kwargs.items()
    }


def _end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = current_engine()
    if engine is None or not engine.recorder.is_in_optimizer:
        return
    placed, steps = placed_in(optimizer, engine.recorder.placed), engine.values.optimizers
    if placed:
        steps.depth -= 1
        if steps.depth == 0:
            is_share = engine.recorder.step_view is None
            if not is_share and not _has_closure(args, kwargs):
                _shares(engine).has_stepped(engine, optimizer, placed)
            engine.recorder.leave_optimizer()
            if engine.groups.shards is not None:
                engine.groups.shards.end(placed)
            engine.losses.step(optimizer, placed, has_closure=_has_closure(args, kwargs))
            engine.parameters_changed(placed)
            if engine.recorder.splitting.stages:
                engine.slices.has_stepped(optimizer, placed, is_share=is_share and not keeps_beside_state(optimizer))
            if not engine.recorder.hooks.are_running:
                engine.console.optimizer_stepped()
                for act in tuple(engine.after_step):
                    act()
            shards = engine.groups.shards
            if shards is not None and shards.is_divided(optimizer) and not shards.is_held(optimizer):
                steps.held.discard(optimizer)
            is_alone = engine.num_ranks == 1 and shards is None
            if not is_alone and (optimizer in steps.held or keeps_beside_state(optimizer)):
                _show(engine, optimizer)


def _engine_of(optimizer: Optimizer) -> Engine | None:
    """Returns the engine, if the program may save and load `optimizer`, and that has parameters of its model."""
    engine = current_engine()
    if engine is None or not engine.recorder.is_recording or not placed_in(optimizer, engine.recorder.placed):
        return None
    return engine
