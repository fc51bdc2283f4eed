"""Intercepts running Python: torch functions, module calls, `.grad`, saving and loading.

torch functions are seen through a function mode that stays on while user code runs, module calls through
`torch.nn.Module.__call__`, gradients through a property on `torch.nn.Parameter`; all else is left alone.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.call.autograd_reach import install_watch_on_fakes
from farspan.call.draws.drawing_functions import DRAWS, has_own_generator, may_draw
from farspan.call.draws.frame import forget_module, key_of_module, name_module
from farspan.call.draws.scope import active, draw_at_once
from farspan.call.draws.seen import SeenGenerator
from farspan.call.leaf import Leaf, WholeError
from farspan.call.module_tables import has_user_hooks
from farspan.call.naming import CHANGES_GRADIENT_FLOW, METADATA_OF_ONE, PASS_THROUGH, SHOWS, find_where
from farspan.call.user_hooks import call_with_user_hooks, check_container, open_leaves
from farspan.launch.raised.tracebacks import cut_frames
from farspan.record.across_ranks.hook_traces import watched
from farspan.record.around_calls import check_around, check_cached, install_around, is_seen_inside, refuse_trace
from farspan.record.in_checkpoint import hooks_unchanged_in_checkpoint, unchanged_in_checkpoint
from farspan.record.lanes.batch import call_batch, note_rows
from farspan.record.lanes.lane_tensor import LaneTensor
from farspan.record.lanes.losses import LOSSES, summed_inside
from farspan.record.memory.leaves import new_parameter
from farspan.record.memory.pickling import reduce_module, reduce_placed
from farspan.record.memory.rebinding import set_memory
from farspan.record.memory.transfer import check_assigned, transferring
from farspan.record.ops.autograd_function import install_apply
from farspan.record.ops.explicit_placement import calls_for_a_place
from farspan.record.parameters.away import AwayParameter
from farspan.record.parameters.copying import copy_module, copy_parameter, copy_plainly
from farspan.record.parameters.gradient_property import install_gradient_property, recorder_of, watch_parameter
from farspan.record.parameters.outside_tensors import GRADIENT_ACCESS, access_gradient
from farspan.record.parameters.program_device import DEVICE_OF_ONE, moving_in_program, named_device
from farspan.record.recording import Recording
from farspan.record.saving.files import before_pickling, stream_saving
from farspan.record.saving.hand_over import fill_before_hand_over
from farspan.record.saving.reserved import fill_reserved, reserved_memory
from farspan.record.surgery.adopted import adopt
from farspan.record.surgery.attempt import begin_attempt, past_attempts
from farspan.record.surgery.closed import close
from farspan.record.surgery.variants import is_set_already, note_attribute, present_leaf, set_on_parameter
from farspan.record.team.calls import call_split, watch_checkpoints
from farspan.record.team.slices.gradient import SlicedGradient, dispatch_gradient
from farspan.record.team.team_tensor import TeamTensor
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import (
    NAMES_A_STRETCH,
    DisableTorchFunctionSubclass,
    call_container,
    check_release,
    compile_what_it_calls,
    is_compiled_wrapper,
    is_mode_active,
    not_passed_on,
    replace_apply,
    watch_autocast_regions,
    watch_backward_hooks,
)
from farspan.torch_private.flags import is_called_plainly, is_in_checkpoint

__all__ = ["Intercept", "install", "watch_module"]

_PLAIN = (torch.Tensor, nn.Parameter)
_recorder_of_module: dict[int, Recording] = {}


class Intercept(TorchFunctionMode):
    """Sends torch functions on lazy tensors and on placed parameters to the recorder."""

    def __init__(self, recorder: Recording) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.l1_loss:
            kwargs = not_passed_on(func) | kwargs
        recorder = self.recorder
        if not recorder.is_recording:
            return func(*args, **kwargs)
        if func in DEVICE_OF_ONE and (placed := recorder.placed.get(id(args[0]))) is not None:
            return named_device(placed, func)
        if func in METADATA_OF_ONE and type(args[0]) in _PLAIN:
            return func(*args, **kwargs)
        if func in NAMES_A_STRETCH:
            return func(*args, **kwargs)
        copies = recorder.copies
        try:
            if (
                (copies.by_storage or copies.of_gradients or reserved_memory)
                and not torch.compiler.is_compiling()
                and copies.before(func, args, kwargs)
            ):
                try:
                    return self._run_or_record(func, types, args, kwargs)
                finally:
                    copies.after(args, kwargs)
            return self._run_or_record(func, types, args, kwargs)
        except Exception as error:
            if recorder.frame is recorder.root:
                cut_frames(error)
            raise

    def _run_or_record(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        if SlicedGradient in types:
            return dispatch_gradient(func, args, kwargs)
        if LaneTensor in types:
            return LaneTensor.__torch_function__(func, types, args, kwargs)
        if recorder.batches.counts is not None and func in LOSSES:
            return summed_inside(recorder.batches, func, args, kwargs)
        if func in CHANGES_GRADIENT_FLOW:
            recorder.held_objects.before_freezing(args[0])
        is_for_us = LazyTensor in types or TeamTensor in types or _concerns(args, kwargs, recorder.placed)
        if not (is_for_us or types or calls_for_a_place(func, args, kwargs)):
            return _run_unrecorded(func, args, kwargs, recorder)
        if func in PASS_THROUGH:
            if func in GRADIENT_ACCESS:
                return access_gradient(recorder, func, args)
            if func in SHOWS:
                recorder.before_read(args[0])
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if types and not is_for_us:
            return _run_unrecorded(func, args, kwargs, recorder)  # plain tensors, or another library's tensor subclass
        return (recorder.transfer or recorder.splitting.takes_operations).dispatch(func, args, kwargs)


def _run_unrecorded(func: Any, args: Any, kwargs: Any, recorder: Recording) -> Any:
    """Run a function on tensors that are not recorded. What torch.compile traces draws when it runs."""
    recorder.held_objects.before_write(func, args, kwargs)
    if recorder.draws.is_plain:
        if not torch.compiler.is_compiling() and may_draw(func) and not has_own_generator(kwargs):
            if func in DRAWS and recorder.frame is recorder.root:
                recorder.noted_draws.note(func)
            return recorder.draws.now(func, args, kwargs)
    elif func in DRAWS and not has_own_generator(kwargs):
        if recorder.frame is not recorder.root:
            return draw_at_once(recorder.frame, recorder.draws.first_seed, func, args, kwargs)
        recorder.noted_draws.note(func)
    return func(*args, **kwargs)


def _concerns(args: Any, kwargs: Any, placed: dict[int, Any]) -> bool:
    """Returns whether a lazy tensor or a placed parameter is among the arguments."""
    for item in args:
        if isinstance(item, torch.Tensor):
            if type(item) is LazyTensor or id(item) in placed:
                return True
        elif isinstance(item, (list, tuple)):
            if _concerns(item, None, placed):
                return True
        elif isinstance(item, dict) and _concerns(item.values(), None, placed):
            return True
    return bool(kwargs) and _concerns(kwargs.values(), None, placed)


def _call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces `nn.Module.__call__`; torch's profiler, when it notes stacks, looks for `self` in its frames."""
    module = self
    recorder = _recorder_of_module.get(id(module))
    if recorder is None and is_compiled_wrapper(module):
        recorder = _recorder_of_module.get(id(module._orig_mod))
        if recorder is not None and recorder.is_recording:
            return call_container(module, *args, **kwargs)
        recorder = None
    if recorder is None and adopt(module, args, kwargs, lambda part: id(part) in _recorder_of_module, watch_module):
        recorder = _recorder_of_module[id(module)]
    if recorder is not None and recorder.is_in_optimizer:
        recorder.leave_optimizer()  # a step that raised has not said that it is over
    if recorder is None or not recorder.is_recording:
        if recorder is None:
            return _original_call(module, *args, **kwargs)
        if active.units is not None:
            return active.units.call_module(module, _run_module, args, kwargs)
        return _run_module(module, *args, **kwargs)
    if active.recorder is not recorder:
        activate(recorder)
    if recorder.frame is not recorder.root:
        return _record_module(recorder, module, args, kwargs)
    try:
        return _record_module(recorder, module, args, kwargs)
    except Exception as error:
        cut_frames(error)
        raise
    finally:
        recorder.current.end_model()


def _record_module(recorder: Recording, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of a module as one call, or call it so that its parts are recorded."""
    outer = recorder.frame
    if outer is recorder.root:
        if torch.jit.is_tracing():
            refuse_trace()
        if reserved_memory:
            fill_reserved()  # the module may find it among its globals
        recorder.begin_module(module)
        recorder.current.begin_model(find_where(2))
        if recorder.batches.unseen:
            note_rows(recorder, module, args, kwargs)
        if recorder.batches.models and not recorder.batches.is_inside:
            return call_batch(recorder, module, functools.partial(_call_module, module), args, kwargs)
        if recorder.splitting.stages and not recorder.splitting.is_inside:
            return call_split(recorder, functools.partial(_call_module, module), args, kwargs)
    is_plain = is_called_plainly(recorder)
    if not is_plain:
        check_cached(recorder, module)
    leaf = recorder.leaves.get(id(module))
    if leaf is not None and not leaf.tables.are_unchanged():
        leaf = present_leaf(recorder, leaf, watch_module)
    if leaf is not None and not leaf.is_open and (is_plain or not is_seen_inside(recorder, leaf)):
        if has_user_hooks(module):
            call = functools.partial(_call_leaf, recorder, leaf)
            with hooks_unchanged_in_checkpoint(recorder, module):
                return call_with_user_hooks(module, call, args, kwargs)
        if not is_plain:
            check_around()
        return recorder.splitting.takes_operations.call_leaf(leaf, args, kwargs)
    if module._backward_hooks:
        check_container(module)
    around = recorder.splitting.enter(id(module)) if recorder.splitting.stages else None
    recorder.frame = outer.inside(key_of_module(module), is_apart=recorder.is_evaluation(module))
    num_begun = len(recorder.current.calls)
    attempt = None if id(module) in past_attempts else begin_attempt(recorder, module)
    try:
        if recorder.checkpoint is not None or is_in_checkpoint():
            with unchanged_in_checkpoint(recorder, module, leaf):
                return call_container(module, *args, **kwargs)
        return call_container(module, *args, **kwargs)
    except (WholeError, RuntimeError) as error:
        recorder.frame = outer
        leaf = close(recorder, module, num_begun, error, attempt)
        if leaf is None:
            raise
    finally:
        recorder.frame = outer
        if around is not None:
            recorder.splitting.inside = around
    check_around()
    return recorder.call_leaf(leaf, args, kwargs)


def _call_leaf(recorder: Recording, leaf: Leaf, /, *args: Any, **kwargs: Any) -> Any:
    check_around()
    return recorder.call_leaf(leaf, args, kwargs)


def _run_module(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module of the model for real."""
    scope = active.scope
    if scope is None:
        return _original_call(module, *args, **kwargs)
    return scope.call_module(module, _original_call, args, kwargs)


_original_deepcopy: Any = nn.Parameter.__deepcopy__
_original_new: Any = nn.Parameter.__new__
_original_call: Any = nn.Module.__call__
_original_setattr: Any = nn.Module.__setattr__
_original_delattr: Any = nn.Module.__delattr__
_original_state_dict: Any = nn.Module.state_dict
_original_load: Any = nn.Module.load_state_dict


@functools.wraps(nn.Module.state_dict)
def _state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Returns the whole state, with values fetched from their owners: plain tensors, as before."""
    recorder = _recorder_of_module.get(id(module))
    if recorder is None or not recorder.is_recording or kwargs.get("keep_vars"):
        return _original_state_dict(module, *args, **kwargs)
    with transferring(recorder, is_loading=False):
        return _original_state_dict(module, *args, **kwargs)


@functools.wraps(nn.Module.load_state_dict)
def _load_state_dict(module: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
    recorder = _recorder_of_module.get(id(module))
    if assign:
        fill_reserved()  # the module holds it from now on
    if recorder is None or not recorder.is_recording:
        return _original_load(module, state_dict, strict, assign)
    if assign:
        check_assigned(recorder, module, state_dict)
    with transferring(recorder, is_loading=True, state=state_dict):
        return _original_load(module, state_dict, strict)


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Replaces `nn.Module.__setattr__`: a change to a leaf must not reach its calls that are still to run."""
    recorder = _recorder_of_module.get(id(module))
    if recorder is not None and id(module) in recorder.leaf_parts and not is_set_already(module, name, value):
        if recorder.is_recording:
            note_attribute(recorder, module, name, value)
        if name == "training":
            recorder.forget_states()
        old = module._buffers.get(name)
        if old is not None and id(old) in recorder.placed and not recorder.is_recording and torch.is_tensor(value):
            old.data = value.detach()  # the buffer that all ranks know of
            return
    _original_setattr(module, name, value)


def _delete_attribute(module: nn.Module, name: str) -> None:
    recorder = _recorder_of_module.get(id(module))
    if recorder is not None and id(module) in recorder.leaf_parts and recorder.is_recording:
        note_attribute(recorder, module, name, NotImplemented)
    _original_delattr(module, name)


def _deepcopy_parameter(parameter: Any, memo: dict[int, Any]) -> Any:
    recorder = parameter._recorder if type(parameter) is StubParameter else recorder_of(parameter)
    if recorder is None or not recorder.is_recording:
        return _original_deepcopy(parameter, memo)
    return copy_parameter(recorder, recorder.placed[id(parameter)], memo)


def _pickling_placed(reduce: Any) -> Any:
    @functools.wraps(reduce)
    def reduce_tensor(tensor: Any, protocol: Any) -> Any:
        recorder = active.recorder
        if recorder is None or not recorder.is_recording or id(tensor) not in recorder.placed:
            if reserved_memory or (recorder is not None and recorder.copies.by_storage):
                before_pickling(recorder, tensor)
            return reduce(tensor, protocol)
        return reduce_placed(recorder, recorder.placed[id(tensor)], protocol)

    return reduce_tensor


def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    recorder = active.recorder
    if recorder is not None and recorder.is_recording and (type(data) is LazyTensor or id(data) in recorder.placed):
        return new_parameter(recorder, cls, data, requires_grad)
    return _original_new(cls, data, requires_grad)


def _reduce_module(module: nn.Module, protocol: Any) -> Any:
    recorder = _recorder_of_module.get(id(module))
    if recorder is None or not recorder.is_recording:
        return object.__reduce_ex__(module, protocol)
    return reduce_module(recorder, module, protocol)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
    recorder = _recorder_of_module.get(id(module))
    if recorder is None or not recorder.is_recording:
        return copy_plainly(module, memo)
    return copy_module(recorder, module, memo, watch_module, watch_parameter)


def _opening_leaves(register: Any) -> Any:
    """Returns `register` as it is to be: what was recorded before a hook is registered runs without it."""

    @functools.wraps(register)
    def register_and_open(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder_of_module.get(id(module))
        if recorder is None or not recorder.is_recording or id(module) not in recorder.leaf_parts:
            return register(module, *args, **kwargs)
        recorder.flush_before_change("a hook on a module is registered")
        handle = register(module, *args, **kwargs)
        open_leaves([*recorder.leaves.values(), *recorder.variants.values()])
        return handle

    return register_and_open


def install() -> None:
    """Put the hooks in place, once in a process."""
    if nn.Module.__call__ is _call_module:
        return
    check_release()
    stream_saving()
    fill_before_hand_over()
    install_apply()
    install_watch_on_fakes()
    torch.random.default_generator = SeenGenerator()  # type: ignore[assignment]
    install_around()
    watch_autocast_regions()
    watch_backward_hooks(lambda module, hook: watched(_recorder_of_module.get(id(module)), module, hook))
    watch_checkpoints()
    compile_what_it_calls(_call_module)  # as it does with the one of torch
    nn.Module.__call__ = _call_module  # type: ignore[method-assign]
    nn.Module.__setattr__ = _set_attribute  # type: ignore[method-assign]
    nn.Module.__delattr__ = _delete_attribute  # type: ignore[method-assign]
    nn.Module.register_forward_hook = _opening_leaves(nn.Module.register_forward_hook)
    nn.Module.register_forward_pre_hook = _opening_leaves(nn.Module.register_forward_pre_hook)
    nn.Module.register_full_backward_hook = _opening_leaves(nn.Module.register_full_backward_hook)
    nn.Module.register_full_backward_pre_hook = _opening_leaves(nn.Module.register_full_backward_pre_hook)
    for kind in (nn.Parameter, StubParameter, AwayParameter):
        kind.__deepcopy__ = _deepcopy_parameter  # type: ignore[method-assign]
        kind.__setattr__ = set_on_parameter  # type: ignore[method-assign,assignment]
        install_gradient_property(kind)
        kind.set_ = set_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.__reduce_ex__ = _pickling_placed(torch.Tensor.__reduce_ex__)  # type: ignore[method-assign]
    nn.Parameter.__reduce_ex__ = _pickling_placed(nn.Parameter.__reduce_ex__)  # type: ignore[method-assign]
    nn.Parameter.__new__ = _new_parameter  # type: ignore[method-assign]
    nn.Module.__reduce_ex__ = _reduce_module  # type: ignore[method-assign]
    nn.Module.__deepcopy__ = _deepcopy  # type: ignore[attr-defined]
    replace_apply(functools.partial(moving_in_program, lambda module: _recorder_of_module.get(id(module))))
    nn.Module.state_dict = _state_dict  # type: ignore[method-assign]
    nn.Module.load_state_dict = _load_state_dict  # type: ignore[method-assign]


def watch_module(module: nn.Module, recorder: Recording, name: str) -> None:
    """Let calls of `module`, known as `name`, go to `recorder`, for as long as the module lives."""
    name_module(module, name)
    _recorder_of_module[id(module)] = recorder
    weakref.finalize(module, _forget_module, id(module))


def _forget_module(module_id: int) -> None:
    _recorder_of_module.pop(module_id, None)
    forget_module(module_id)


def activate(recorder: Recording) -> None:
    """Begin to see this thread's torch functions: the function mode belongs to a thread."""
    if not is_mode_active(Intercept):
        active.mode = Intercept(recorder).__enter__()
    active.recorder = recorder
