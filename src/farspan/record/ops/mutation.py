"""Records in-place operations: values have versions, and a tensor moves on to the new one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry
from farspan.call.infer.watch import storage_id
from farspan.call.leaf import Leaf, LeakError
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.template import flatten_arguments, rebuild
from farspan.graph import Call, Value
from farspan.record.memory.exchanged import can_be_recorded, exchange
from farspan.record.nodes.tensor_hooks import check_unhooked
from farspan.record.ops.op_placement import stage_for
from farspan.record.ops.overrides import read_data
from farspan.record.ops.views import Through, changes_shape, is_shared, root_of, write_through
from farspan.record.parameters.parameter_values import renew_aliases
from farspan.record.team.team_tensor import TeamTensor
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.call.leaf import Placed, Target
    from farspan.graph import Template
    from farspan.record.recording import Recording

__all__ = [
    "is_plain_write",
    "let_record_written",
    "prepare_mutation",
    "write_apart",
    "write_parameters",
    "written_parameters",
]


def prepare_mutation(recorder: Recording, call: Call, tensors: list[torch.Tensor]) -> int:
    """Return the level up to which the old versions of what `call` writes into are read."""
    level = 0
    for argument in call.entry.mutated:
        tensor = tensors[argument]
        if type(tensor) is LazyTensor:
            level = max(level, recorder.current.read_level(tensor._value, call.stage))
    return level


def written_parameters(recorder: Recording, entry: Entry, tensors: list[torch.Tensor]) -> list[Placed]:
    """Returns the parameters a call writes into, themselves or through `param.data`."""
    found: list[Placed] = []
    for tensor in (tensors[i] for i in entry.mutated):
        placed = recorder.placed.get(id(tensor)) or getattr(tensor, "_alias_of", None)
        if placed is not None:
            found.append(placed)
    return found


def is_plain_write(recorder: Recording, target: Target, entry: Entry, tensors: list[torch.Tensor]) -> bool:
    """Returns whether a call of `target` writes only into recorded tensors that share their memory with no other."""
    if type(target) is Through:
        return True
    if type(target) is not Leaf and changes_shape(recorder, entry, tensors):
        return False
    for tensor in (tensors[i] for i in entry.mutated):
        if type(tensor) is TeamTensor:
            recorder.refuse(
                f"{entry.name} writes into a tensor of which the ranks of a stage have parts",
                hint="write out of place (y = y + 1), or leave out tensor_parallel= of farspan.distribute",
            )
        if type(tensor) is not LazyTensor or tensor._is_torn or tensor._alias_of is not None or is_shared(tensor):
            return False
        check_unhooked(tensor, entry.name, is_shared=False)
    return True


def write_apart(
    recorder: Recording,
    target: Target,
    template: Template,
    tensors: list[torch.Tensor],
    stage: int | None,
    entry: Entry,
) -> tuple[bool, Any]:
    """Record a call that writes into a view, or into what has views.

    A plain tensor that it writes into, which every rank has, becomes a recorded one first. If it cannot, for it is a
    parameter, or others use its memory, or it is a gradient, it stays plain, and the call runs at once, on every rank.

    Returns:
        Whether this was all there is to do, and the call's result.

    Raises:
        LeakError: A module writes into such memory: its parts can.
    """
    where = format_where(find_where())
    run_here: Any = functools.partial(_run_here, recorder, target, template, tensors)
    if type(target) is not Leaf and any(recorder.outside.is_gradient(tensors[i]) for i in entry.mutated):
        return True, run_here()
    written = [tensors[i] for i in entry.mutated]
    roots = [root_of(item) for item in written if type(item) is LazyTensor]
    if any(type(item) is LazyTensor and item._is_torn for item in (*written, *roots)):
        recorder.refuse(
            f"{entry.name} writes into a tensor that has been put together, and shares its memory with views",
            why="the parts that it was put together from would not change with it.",
            hint="write out of place (y = y + 1), or leave out micro_batches= (tensor_parallel=) of farspan.distribute",
        )
    plain = [item for item in written if type(item) is not LazyTensor and id(item) not in recorder.placed]
    if len(plain) == len(written) and recorder.deferred.can_run(target, tensors):
        return True, run_here()
    if not all(can_be_recorded(recorder, tensor) for tensor in plain):
        if type(target) is Leaf:
            raise LeakError("it writes into plain memory that others use too")
        has_gradient = _check_every_rank_can_write(recorder, target, entry, tensors, plain, where)
        result = run_here()
        if has_gradient:
            _end_gradient(recorder, plain[0], entry.name, where)
        return True, result
    for tensor in plain:
        if type(tensor) is not LazyTensor:
            known = [item for item in tensors if type(item) is LazyTensor or id(item) in recorder.placed]
            values = [value for item in known if isinstance(value := recorder.argument(item), Value)]
            home = target.stage if type(target) is Leaf else stage_for(recorder, entry, tensors, values, is_new=True)
            _become_recorded(recorder, tensor, home, entry.name, where)
    shared = [(i, tensor) for i in entry.mutated if isinstance(tensor := tensors[i], LazyTensor) and is_shared(tensor)]
    if not shared:
        return False, None
    _check_view(recorder, target, entry, shared[0][1], where)
    write_through(recorder, target, template, tensors, shared[0][0], stage)
    return True, (tensors[entry.same_as[0]] if entry.same_as else None)


def _run_here(recorder: Recording, target: Any, template: Template, tensors: Sequence[torch.Tensor]) -> Any:
    """Runs a call that writes at once, on every rank; what is recorded keeps what it has been given."""
    args, kwargs = rebuild(template, list(map(read_data, tensors)))
    recorder.held_objects.before_write(target, args, kwargs)
    return target(*args, **kwargs)


def _check_view(recorder: Recording, target: Target, entry: Entry, view: LazyTensor, where: str) -> None:
    """Raises unless a call that writes into a view can be recorded as one that writes into what it is a view of."""
    if len(entry.mutated) > 1 or type(target) is Leaf or min(entry.same_as, default=0) < 0:
        recorder.refuse(
            f"{entry.name} writes into a tensor of which a view is still in use",
            why=f"at {where}: the view would have to change with it.",
            hint="use the out-of-place operation, or write before taking the view",
        )
    if root_of(view) is None:
        recorder.refuse(
            f"{entry.name} writes into a view that a module has returned",
            why=f"at {where}: what it is a view of would have to change with it.",
            hint="clone() it first, or let the module write",
        )


def _become_recorded(recorder: Recording, plain: torch.Tensor, stage: int, name: str, where: str) -> None:
    """Let the program hold a recorded tensor where it held `plain`."""
    if not can_be_recorded(recorder, plain):
        _refuse_shared(recorder, name, where)
    memory = plain.detach()  # nobody writes into it any more
    for graph in (*recorder.pending, recorder.current):
        for call in graph.calls:
            if call.versions and call.arguments is not None and any(item is plain for item in call.arguments):
                call.arguments = [memory if item is plain else item for item in call.arguments]
    given = ((memory,), {})
    template, tensors = flatten_arguments(*given)
    lazy = recorder.record(torch.clone, template, tensors, stage, given=given)
    exchange(recorder, plain, lazy, lazy._value)


def let_record_written(
    recorder: Recording, call: Call, tensors: list[torch.Tensor], recordable: Sequence[bool]
) -> None:
    """A call that had to run to be known has written into plain tensors, at its owner: what they are now is recorded.

    Args:
        recorder: Whose program it is.
        call: Has run.
        tensors: Those among its arguments.
        recordable: For each whether it could be a recorded one, before the run.

    Raises:
        RecordError: One of them cannot.
    """
    for number, argument in enumerate(call.entry.mutated):
        tensor = tensors[argument]
        if type(tensor) is LazyTensor or id(tensor) in recorder.placed:
            continue
        if not recordable[argument]:
            _refuse_shared(recorder, call.entry.name, format_where(call.where))
        value = call.outputs[call.entry.num_results + number]
        lazy = LazyTensor.make(value, recorder)
        exchange(recorder, tensor, lazy, value)
        value.data = lazy if value.data is tensor else value.data


def _check_every_rank_can_write(
    recorder: Recording,
    target: Target,
    entry: Entry,
    tensors: list[torch.Tensor],
    plain: list[torch.Tensor],
    where: str,
) -> bool:
    """Raise if a call that writes into plain memory cannot do so on every rank, on fetched values.

    Returns:
        Whether gradient would flow through it, into what shares its memory with a buffer: `buffer.data.copy_(x)`. The
        buffer holds what is written, and no gradient, in one process too.

    Raises:
        RecordError: It is a module's call, writes into recorded tensors too, or gradient would flow into other memory.
    """
    is_module = type(target) is Leaf or type(target) is FunctionCall
    has_gradient = torch.is_grad_enabled() and any(
        (type(item) is LazyTensor or id(item) in recorder.placed) and item.requires_grad for item in tensors
    )
    if is_module or len(plain) < len(entry.mutated) or (has_gradient and not _is_data_of_buffer(recorder, plain)):
        _refuse_shared(recorder, entry.name, where)
    return has_gradient


def _is_data_of_buffer(recorder: Recording, plain: Sequence[torch.Tensor]) -> bool:
    """Returns whether one plain tensor, no view, shares its memory with a buffer of the model that is running."""
    if len(plain) != 1 or plain[0]._base is not None or plain[0].requires_grad or recorder.outermost is None:
        return False
    with DisableTorchFunction():
        memory = storage_id(plain[0])
        buffers = [item for item in recorder.outermost.buffers() if type(item) is torch.Tensor]
        return any(storage_id(item) == memory and item is not plain[0] for item in buffers)


def _end_gradient(recorder: Recording, plain: torch.Tensor, name: str, where: str) -> None:
    """Let a tensor into which values have been written require grad, as in one process, and refuse what comes to it."""
    with DisableTorchFunction():
        plain.requires_grad_().register_hook(lambda _: _refuse_shared(recorder, name, where))


def _refuse_shared(recorder: Recording, name: str, where: str) -> NoReturn:
    recorder.refuse(
        f"{name} writes recorded values into a plain tensor whose memory others use too",
        why=f"at {where}: the plain tensor exists on every rank, the values on one.",
        hint="write what needs no gradient: x.detach(), or under torch.no_grad(); or use torch.cat, torch.where",
    )


def write_parameters(
    recorder: Recording,
    target: Target,
    template: Template,
    tensors: list[torch.Tensor],
    stage: int | None,
    written: Sequence[Placed],
) -> Any:
    """Record a call that writes parameters outside the optimizer: all before it sees the old values, all after it the
    new ones.
    """
    recorder.engine.flush("a parameter is written")
    recorder.is_writing = True
    try:
        result = recorder.record(target, template, tensors, stage)
        recorder.engine.flush("a parameter is written")
    finally:
        recorder.is_writing = False
    recorder.engine.parameters_changed(written, in_step=True)
    unseen = [item._alias_of for item in tensors if type(item) is LazyTensor and not item._is_counted]
    recorder.parameter_values.set_at.update({item.name: recorder.current.index for item in written if item in unseen})
    renew_aliases(tensors)
    return result
