"""Resolves calls at run time: what was recorded is run, then the owner runs the call and broadcasts its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.draws.drawing_functions import DRAWS, may_draw_inside
from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry, Unknown, meta_of
from farspan.call.infer.observe import observe
from farspan.call.leaf import Leaf, LeakError, reaches_outside
from farspan.call.modes import current_modes, saved_hooks
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.canonical import digest_of
from farspan.call.pytree.template import rebuild
from farspan.call.side_effects.attributes import attributes_with_tensors, holds_hidden
from farspan.call.side_effects.hidden import generators_held
from farspan.call.side_effects.registered import Registered
from farspan.call.surroundings.around import AroundError, nothing_changed_around
from farspan.call.wire.exceptions import exception_from_json, exception_to_json, sendable
from farspan.call.wire.structure import entry_from_json, entry_to_json
from farspan.call.wire.users_line import note_line
from farspan.errors import FarspanError, RecordError
from farspan.graph import Call, Value
from farspan.record.across_ranks.drawing import path_of
from farspan.record.memory.exchanged import can_be_recorded
from farspan.record.ops.mutation import let_record_written
from farspan.record.ops.op_placement import stage_for
from farspan.record.ops.overrides import read_data
from farspan.record.ops.results import answer
from farspan.record.tensor import LazyTensor, plain_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from farspan.call.leaf import Target
    from farspan.graph import Template
    from farspan.record.recording import Recording

__all__ = [
    "as_before",
    "resolve",
    "resolve_from_run",
    "resolve_from_text",
    "noting_raised",
    "registering_nothing",
    "text_for_others",
]


_COUNT_IN_A_BUFFER = 'keep it in a buffer: self.register_buffer("count", torch.zeros(())), then self.count += 1'


def resolve(
    recorder: Recording,
    target: Target,
    template: Template,
    tensors: list[torch.Tensor],
    stage: int | None,
    unknown: Unknown,
    given: tuple[Any, ...],
) -> Any:
    """Run the call now, as a graph of its own, and return what the user's code gets.

    Raises:
        LeakError: It reaches outside itself, as its run has shown.
    """
    if not isinstance(target, Leaf) and _is_of_plain_memory(recorder, target, tensors):
        args, kwargs = rebuild(template, list(map(read_data, tensors)))
        return target(*args, **kwargs)
    known = recorder.deferred.run_here(target, template, tensors)
    if known is not None:
        return known[0]
    if isinstance(target, Leaf) and (held := attributes_with_tensors(target.modules, target.attributes)):
        # Its owner alone will see which of them it writes into: they become arguments.
        target.attributes.update(dict.fromkeys(held))
        target.own_objects = None
        return recorder.call_leaf(target, given[0], given[1], has_number=True)
    if isinstance(target, Leaf):
        _check_alone(target, template)
    path = path_of(recorder, target)
    reason = f"what {unknown.name} gives depends on data"
    has_backward = any(graph.backwards for graph in recorder.pending)
    with recorder.engine.broadcasting(unknown.raised):
        recorder.engine.flush(reason)
    arguments = [recorder.argument(tensor) for tensor in tensors]
    recorder.deferred.record_all(arguments)
    recordable = [can_be_recorded(recorder, tensor) for tensor in tensors]
    if stage is None:
        stage = stage_for(recorder, unknown, tensors, [item for item in arguments if isinstance(item, Value)])
    call = _record(recorder, target, template, arguments, stage, unknown, path)
    answers: list[Any] = []

    def give_answer() -> None:
        entry: Entry | Unknown = call.entry
        if isinstance(entry, Unknown):
            return  # it can only be called part by part
        _check_written(recorder, call, entry, arguments)
        metas = [item.meta if isinstance(item, Value) else meta_of(item) for item in arguments]
        let_record_written(recorder, call, tensors, recordable)
        recorder.runs_each_backward |= entry.is_ordered
        # it may draw more, or fewer, the next time: dropout of no rows draws nothing
        draws_freely = recorder.draws.is_plain and (entry.is_random or may_draw_inside(target))
        if draws_freely and has_backward:
            recorder.engine.console.note_drawing(_described(target, unknown.name, call.where))
        if call.raised is None and not draws_freely:
            recorder.cache.resolve(target, template, metas, call.modes, entry)
        answers.append(answer(recorder, call, entry, tensors, given))

    with recorder.engine.broadcasting(unknown.raised):
        recorder.engine.flush(reason, resolving=(call, give_answer))
    if call.raised is not None:
        raise call.raised
    if not answers:
        raise LeakError(
            f"{unknown.name} names a place inside, uses a parameter of another module, or changes what is outside of it"
        )
    return answers[0]


def _check_alone(leaf: Leaf, template: Template) -> None:
    """Raise if a run at the owner alone would do more than all ranks can know of.

    Raises:
        LeakError: The leaf can only be called part by part.
    """
    if not all(item.is_parameter for item in leaf.foreign):
        raise LeakError("it may write into a buffer of another stage")
    if holds_hidden(leaf.modules) or generators_held(leaf.modules, template):
        raise LeakError("it holds an object that its owner alone would move on")
    around = leaf.surroundings.snapshot.tensors if torch.is_grad_enabled() else ()
    if any(tensor.requires_grad for tensor in around):
        raise LeakError("it may use a tensor outside itself that requires grad")


def _record(
    recorder: Recording,
    target: Target,
    template: Template,
    arguments: list[Any],
    stage: int,
    unknown: Unknown,
    path: Any,
) -> Call:
    """Add a call of which nobody knows what it gives to the current graph."""
    modes = current_modes()
    call = Call(
        target=target,
        template=template,
        arguments=arguments,
        entry=unknown,
        stage=stage,
        modes=modes,
        where=find_where(),
    )
    call.path = path
    if recorder.draws.is_plain:
        call.draws = recorder.draws.place_of(unknown.draws)
    call.region, call.saved_hooks = recorder.regions.of(modes), saved_hooks()
    call.moment = recorder.held_objects.moments.latest
    graph, values = recorder.current, [item for item in arguments if isinstance(item, Value)]
    graph.add(call, values)
    flags = target.flags if type(target) is Leaf else None
    graph.note(call, values, digest_of((unknown.name, template, modes, flags)))
    graph.note_path(path)
    return call


def _is_of_plain_memory(recorder: Recording, target: Target, tensors: list[torch.Tensor]) -> bool:
    """Returns whether a call is about a plain tensor that every rank has, and recorded values only say where: `cm[t, p]
    += 1`.

    Each rank then runs it itself, on its own memory.
    """
    if type(target) is FunctionCall or target in DRAWS or not tensors or type(tensors[0]) is LazyTensor:
        return False
    if id(tensors[0]) in recorder.placed:
        return False
    recorded = [item for item in tensors if type(item) is LazyTensor or id(item) in recorder.placed]
    return not torch.is_grad_enabled() or not any(item.requires_grad for item in recorded)


def _check_written(recorder: Recording, call: Call, entry: Entry, arguments: list[Any]) -> None:
    """Raise if the run has written into what came from another stage, and so into a copy.

    Raises:
        RecordError: The same on every rank.
    """
    for item in [arguments[number] for number in entry.mutated]:
        if isinstance(item, Value) and item.name and item.stage != call.stage:
            recorder.refuse(
                f"{entry.name} writes into {item.describe()}, and what it does depends on data of another stage",
                hint="read what it depends on first: tensor.item()",
            )


# At the owner, and then at the others.


def resolve_from_run(call: Call, leaves: list[torch.Tensor], run: Callable[[list[torch.Tensor]], Any]) -> None:
    """Run `call` with `leaves` as its tensors, and let it know what it gives; nothing if it must be opened.

    If it raises, `call.raised` is the exception, for the program; what a module has done before that is done all the
    same: what it has set on itself, counted, written into its arguments.
    """
    assert call.arguments is not None
    metas = [item.meta if isinstance(item, Value) else meta_of(item) for item in call.arguments]
    before = _written(call, leaves)

    def run_seen(tensors: list[torch.Tensor]) -> Any:
        segment = call.segment
        segment.entries = {
            item: tensor
            for item, tensor in zip(call.arguments or (), tensors, strict=True)
            if isinstance(item, Value) and item.meta.requires_grad and item in segment.leaves
        }
        return run(tensors)

    try:
        entry, outputs = observe(call.target, call.template, metas, call.modes, leaves, run_seen)
    except Exception as error:
        if reaches_outside(error) and hasattr(call.target, "is_open"):
            if _written(call, leaves) == before:
                call.raised = None
                return  # nothing has come of it
            raise RecordError(
                f"{call.entry.name} writes into a tensor, and {getattr(error, 'what', error)}".rstrip(".") + ".",
                why="its parts would have to be called one by one, and the run that has shown it has written.",
                hint=_COUNT_IN_A_BUFFER,
            ) from error
        if isinstance(error, FarspanError):
            raise
        note_line(error, call)
        call.raised = sendable(error, [call])
        return
    _know(call, entry)
    for value, tensor in zip(call.outputs, outputs, strict=True):
        value.data = tensor
        call.segment.outputs[value] = None  # wanted, by whoever asked for the call


def _described(target: Target, name: str, where: Any) -> str:
    """Returns a call for people, with the line where its forward is written, or where the program has called it."""
    if not isinstance(target, Leaf):
        return f"{name} at {format_where(where)}"
    kind = type(target.module)
    code = getattr(kind.forward, "__code__", None)
    line = "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
    return f"{name} ({kind.__name__}{line})"


@contextlib.contextmanager
def registering_nothing(call: Call, copies: Collection[torch.Tensor]) -> Iterator[None]:
    """Run a call of a leaf in the body, and see to it that its modules' parameters and parts stay what they are, and in
    a first run what is around their code: lists and counters among globals and class attributes, which all ranks have.

    A run on fakes has seen to it, but for what depends on data.

    Args:
        call: About to run, at its owner.
        copies: What stands for buffers of the leaf.

    Raises:
        LeakError: They do not, and nothing is known of the call yet.
        RecordError: They do not, and they did when such calls have run before.
    """
    is_new = type(call.entry) is Unknown
    if not is_new and not call.target.is_resolved:
        yield
        return
    own = {*map(id, copies), *(id(item.tensor) for item in call.target.buffers)}
    registered = Registered(call.target.modules, call.entry.name, own)
    try:
        with nothing_changed_around(call.target.modules, must_copy=is_new):
            yield
    except AroundError as error:
        if is_new:
            raise
        raise _other_than_before(call, f"around its modules than before: {error.what}", _COUNT_IN_A_BUFFER) from None
    try:
        registered.check()
    except LeakError as error:
        if is_new:
            raise
        hint = "write into what is there: with torch.no_grad(): self.weight.copy_(value)"
        raise _other_than_before(call, f"to its own modules than before: {error.what}", hint) from None


def _other_than_before(call: Call, what: str, hint: str) -> RecordError:
    return RecordError(
        f"{call.entry.name} did something else {what.rstrip('.')}.",
        why=f"at {format_where(call.where)}: it depends on the data, and was not so in the first calls.",
        hint=hint,
    )


@contextlib.contextmanager
def noting_raised(call: Call) -> Iterator[None]:
    """The body is a run of `call`: if it is the first one, an exception ends the body, and `call.raised` is it, for the
    program to catch on every rank. Not one for which the call must be opened, nor our own.
    """
    try:
        yield
    except Exception as error:
        if type(call.entry) is not Unknown or reaches_outside(error) or isinstance(error, FarspanError):
            raise
        note_line(error, call)
        call.raised = sendable(error, [call])


def as_before(
    call: Call, tensors: list[torch.Tensor], run: Callable[[Call, list[torch.Tensor]], list[Any]]
) -> list[Any]:
    """Run a call of which data decide what it does, and see to it that it returns and writes into the same of its
    arguments as in the runs before.

    Args:
        call: Its metadata is known.
        tensors: Its arguments.
        run: Runs it, and returns the tensors of its result.

    Raises:
        RecordError: It has returned another argument, or has written into another one.
    """
    others = [tensor for number, tensor in enumerate(tensors) if number not in call.entry.mutated]
    before = plain_versions(others)
    results = run(call, tensors)
    is_same = all(
        same < 0 or tensor is tensors[same] for tensor, same in zip(results, call.entry.same_as, strict=False)
    )
    if not is_same or plain_versions(others) != before:
        raise RecordError(
            f"{call.entry.name} returned or wrote into other arguments than before.",
            why=f"at {format_where(call.where)}: it depends on the data, and was not so in the first calls.",
            hint="return a new tensor each time: x.clone() for x, x + 1 for x.add_(1)",
        )
    return results


def _written(call: Call, leaves: list[torch.Tensor]) -> list[Any]:
    """Changes when a run writes into what it is given, or into its module's parameters and buffers."""
    owned = [item.tensor for item in getattr(call.target, "placed", ()) if item.is_owned]
    return [plain_versions([*leaves, *owned]), [tensor.data_ptr() for tensor in owned]]


def text_for_others(call: Call) -> bytes:
    """Returns what the owner broadcasts about a call that has been resolved at run time."""
    raised = b"" if call.raised is None else exception_to_json(call.raised)
    entry = b"" if type(call.entry) is Unknown else entry_to_json(call.entry, call.template)
    runs_code = b"1" if getattr(call.target, "runs_code_backward", False) else b""
    return b"\n".join([raised, runs_code, entry])


def resolve_from_text(call: Call, text: bytes) -> None:
    """Let `call` know what its owner has broadcast."""
    raised, runs_code, entry = text.split(b"\n", 2)
    if runs_code:
        call.target.runs_code_backward = True
    if raised:
        call.raised = exception_from_json(raised, [call])
    if entry:
        _know(call, entry_from_json(entry, call.template, len(call.arguments or ()), call.target))


def _know(call: Call, entry: Entry) -> None:
    call.entry = entry
    if type(call.target) is Leaf:
        call.target.is_resolved = True
    for item in getattr(call.target, "placed", ()):  # nothing has shown which
        item.is_written |= entry.is_ordered or not item.is_parameter
        item.is_saved |= not item.is_parameter
    call.outputs = tuple([Value(meta, call.stage, call=call, index=i) for i, meta in enumerate(entry.metas)])
