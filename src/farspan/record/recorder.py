"""The recorder: running Python becomes calls in graphs, one graph for each micro-batch.

A call to a leaf, or a torch function on lazy tensors or on parameters, is appended to the current graph and answered
with lazy tensors. `backward()` closes the graph. What has been recorded waits in `pending` until something needs a
value; then the runtime behind `engine` executes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from farspan.call.draws.drawing_functions import DRAWS, has_own_generator
from farspan.call.draws.frame import Frame, key_of_function
from farspan.call.draws.generators import host_seed
from farspan.call.draws.program_draws import ProgramDraws
from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Entry, Unknown, meta_of
from farspan.call.infer.fallbacks import MetadataCache
from farspan.call.leaf import Leaf, LeakError, Placed, Target, TraceError
from farspan.call.modes import Modes, Regions, current_modes
from farspan.call.naming import find_where, format_where, name_of
from farspan.call.pytree.template import flatten, flatten_arguments, rebuild, shape_of_call
from farspan.call.side_effects.attributes import attributes_of
from farspan.errors import RecordError
from farspan.graph import Call, Graph, Meta, Template, Value
from farspan.record.across_ranks.changed_in_backward import ChangingBackwards
from farspan.record.across_ranks.drawing import NotedDraws, answer_drawing, draws_in_python
from farspan.record.across_ranks.resolved_calls import resolve
from farspan.record.around_calls import check_around
from farspan.record.deferred.deferred import Deferred
from farspan.record.held_objects import HeldObjects
from farspan.record.in_checkpoint import note_recounted, unchanged_in_checkpoint
from farspan.record.lanes.batches import Batches
from farspan.record.memory.leaves import become_leaf
from farspan.record.memory.parameter_copies import Copies
from farspan.record.ops.autograd_function import MAY_HIDE_HISTORY, check_history
from farspan.record.ops.foreach import record_foreach
from farspan.record.ops.mutation import (
    is_plain_write,
    prepare_mutation,
    write_apart,
    write_parameters,
    written_parameters,
)
from farspan.record.ops.op_placement import stage_for
from farspan.record.ops.overrides import HANDLERS, draw_here, is_own_draw, read_data, read_numbers
from farspan.record.ops.results import answer
from farspan.record.ops.views import Through, changes_shape, refresh, reshape
from farspan.record.parameters.gradients import Gradients
from farspan.record.parameters.outside_tensors import Outside
from farspan.record.parameters.parameter_hooks import Hooks
from farspan.record.parameters.parameter_values import ParameterValues
from farspan.record.recorded_backward import record_backward
from farspan.record.stale_casts import StaleCasts
from farspan.record.surgery.opened import call_parts
from farspan.record.team.slices.gradient import SlicedGradient
from farspan.record.team.splitting import Splitting
from farspan.record.team.team_tensor import TeamTensor
from farspan.record.tensor import LazyTensor, StubParameter, memory_of, plain_versions
from farspan.torch_private import DisableTorchFunction, put_modes, run_without_modes_of, take_modes_of
from farspan.torch_private.flags import hooks_on_what_is_saved, is_in_checkpoint, is_of_a_checkpoint

if TYPE_CHECKING:
    from farspan.record.runtime import Engine

__all__ = ["Recorder"]

_MAX_FORWARD_ONLY = 64  # micro-batches that wait; then they are run unasked, so that memory stays bounded


class Recorder:
    """Records one rank's (one thread's) program."""

    def __init__(self) -> None:
        self.engine: Engine
        self.is_recording = True  # not while calls run for real: in leaves, in the optimizer, in a metadata run
        self.is_in_optimizer = False
        self.checkpoint: list[tuple[int, int, str]] | None = None  # its calls that count; None outside of one
        self.step_view: Any = None  # what answers torch functions in an optimizer's step of several ranks
        self.placed: dict[int, Placed] = {}  # parameters and buffers of all distributed models, by id
        self.leaves: dict[int, Leaf] = {}
        self.variants: dict[Any, Leaf] = {}  # of leaves, for other contents of their modules' tables
        self.leaf_parts: set[int] = set()  # ids of all modules inside leaves, the leaves included
        self.roots: dict[int, str] = {}  # by id of a model, what stands before the names of its parts
        self.keep_alive: list[Any] = []  # what the tables above know by id
        self.cache = MetadataCache(functools.partial(run_without_modes_of, self), self.placed)
        self.pending: list[Graph] = []
        self.num_graphs = 1
        self.num_pending_backwards = 0
        self.runs_each_backward = False  # weights may change at each: a leaf writes into its own
        self.has_hooked_calls = False  # whether there have been hooks on recorded tensors
        self.held_objects = HeldObjects(self)
        self.changing_backwards = ChangingBackwards(self)
        self.batches = Batches()
        self.num_copies = 0  # of distributed models and their parts
        self.current = Graph(0)
        self.parameter_values = ParameterValues()
        self.gradients = Gradients(self)
        self.hooks = Hooks(self)
        self.outside = Outside()
        self.copies = Copies(self)
        self.become_leaf = functools.partial(become_leaf, requires_grad=True)
        self.made_of_parameters: list[tuple[Any, Placed]] = []  # a weak reference to each, and of which it was made
        self._modes: list[Any] = []
        self.is_writing = False
        self.regions = Regions()
        self.stale_casts = StaleCasts(self)
        self.reached: Any = None  # the error of what went to torch's core with a recorded tensor, until it is raised
        self.outermost: Any = None  # the module that the program has called last, from outside any other
        self.here: tuple[int, ...] = ()  # where ops run by the program's own word (`farspan.on`), if it says one
        self.root = self.frame = Frame(0)
        """The frames of the program's own code and of the container that is running: paths of draws begin here."""
        self.draws = ProgramDraws()
        self.number = 0  # of the call that is being recorded, among those of the same name in its frame
        self.noted_draws = NotedDraws(self)
        self.deferred = Deferred(self)
        self.splitting = Splitting(self)
        self.transfer: Any = None  # replaces the recorder while a state dictionary is made

    # Recording calls.

    def call_leaf(self, leaf: Leaf, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_number: bool = False) -> Any:
        """Record a call of `leaf`, counted unless it `has_number`; return its result, with lazy tensors in it."""
        if not has_number:
            self.number = self.frame.count(leaf.key, is_apart=self.is_evaluation(leaf.module))
        if not leaf.has_been_called:
            self.current.name_parameters(leaf.begin())
        objects, around = leaf.own_objects, leaf.surroundings
        is_closed = objects is not None and objects.is_empty and not objects.memory and around and around.is_empty
        try:
            if not is_closed or self.held_objects.are_marked:
                self.held_objects.see(leaf, args, kwargs)
        except LeakError as error:
            return call_parts(self, leaf, (args, kwargs), error.what)
        if leaf.num_extra or leaf.attributes:
            given = (args, kwargs, *([attributes_of(leaf.modules, leaf.attributes)] if leaf.attributes else ()))
            template, tensors = flatten(given)
            tensors += leaf.extra_tensors()
            return self.record(leaf, template, tensors, leaf.stage, given=given)
        return self.record_call(leaf, args, kwargs, leaf.stage)

    def record_call(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], stage: int | None) -> Any:
        """Record a call; if one of its kind was seen before, without taking its arguments apart again."""
        tensors: list[Any] = []
        shape = shape_of_call(args, kwargs, tensors)
        if shape is None:
            template, tensors = flatten_arguments(args, kwargs)
            return self.record(target, template, tensors, stage, given=(args, kwargs))
        arguments: list[Value | torch.Tensor] = []
        metas: list[int] = []
        for tensor in tensors:
            item = self.argument(tensor)
            arguments.append(item)
            metas.append((item.meta if isinstance(item, Value) else meta_of(item)).number)
        modes = current_modes()
        state = (target.state or target.state_key()) if type(target) is Leaf else None
        key = (target, shape, tuple(metas), modes, state)
        known = self.cache.known.get(key)
        if known is None or (known[1].mutated and not is_plain_write(self, target, known[1], tensors)):
            template, _ = flatten_arguments(args, kwargs)
            return self.record(target, template, tensors, stage, key=key, given=(args, kwargs))
        template, entry = known
        return self.append(target, template, arguments, entry, stage, modes, tensors)

    def dispatch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function of which at least one argument is lazy or a parameter."""
        handler = HANDLERS.get(function)
        if handler is not None:
            result = handler(self, function, args, kwargs)
            if result is not NotImplemented:
                return result
        elif getattr(function, "__name__", "").startswith("_foreach_"):
            return record_foreach(self, function, args, kwargs)
        elif getattr(function, "__module__", "").startswith("torch.distributed"):
            self.refuse(f"{name_of(function)} cannot take a recorded tensor", hint="read it first: tensor.read()")
        check_around()
        if function in DRAWS or type(function) is FunctionCall:
            self.number = 0 if has_own_generator(kwargs) else self.frame.count(key_of_function(function))
        else:
            self.number = -1
        return self.record_call(function, args, read_numbers(kwargs), None)

    def record(
        self,
        target: Target,
        template: Template,
        tensors: list[torch.Tensor],
        stage: int | None,
        *,
        key: Any = None,
        given: tuple[Any, ...] = ((), {}),
    ) -> Any:
        """Append a call.

        Args:
            target: A leaf or a torch function.
            template: Of its arguments.
            tensors: Those among the arguments.
            stage: Where it runs; None lets the inputs decide.
            key: Remembers it for its like.
            given: The arguments themselves, for what the call does to them.
        """
        arguments = [self.argument(tensor) for tensor in tensors]
        metas = [item.meta if isinstance(item, Value) else meta_of(item) for item in arguments]
        modes, reason = current_modes(), ""
        try:
            entry = self.predict(target, template, metas, modes)
            if isinstance(entry, Unknown):
                result = resolve(self, target, template, tensors, stage, entry, given)
                self.changing_backwards.see(target)
                return result
        except LeakError as error:
            entry, reason = None, error.what
            if isinstance(target, Leaf):
                target.leaves_trace |= isinstance(error, TraceError)
        if entry is None:
            if isinstance(target, Leaf) and (self.checkpoint is not None or is_in_checkpoint()):
                with unchanged_in_checkpoint(self, target.module, target):
                    return call_parts(self, target, given, reason)
            return call_parts(self, target, given, reason)
        if isinstance(target, Leaf):
            self.changing_backwards.see(target)
            if written_parameters(self, entry, tensors):
                return call_parts(self, target, given, "it writes into a parameter of another stage")
            if not target.attributes.keys() >= set(entry.attributes):
                if any(call.target is target for graph in (*self.pending, self.current) for call in graph.calls):
                    self.flush_before_change("a module is about to change attributes that its earlier calls have read")
                target.attributes.update(dict.fromkeys(entry.attributes))
                target.own_objects = None
                return self.call_leaf(target, given[0], given[1], has_number=True)  # with what these hold
        else:
            if not entry.has_tensors_only:
                args, kwargs = rebuild(template, [read_data(tensor) for tensor in tensors])
                return target(*args, **kwargs)
            if entry.is_random and is_own_draw(self, target, entry, tensors, given[1]):
                return draw_here(self, target, template, tensors, entry)
            if not entry.mutated and entry.num_results and min(entry.same_as) >= 0:
                return rebuild(entry.template, [tensors[i] for i in entry.same_as])  # as x.to(its own dtype)
            if entry.mutated and type(target) is not Through and changes_shape(self, entry, tensors):
                return reshape(self, target, template, tensors, entry.name)
            if entry.mutated and not self.is_writing and (written := written_parameters(self, entry, tensors)):
                return write_parameters(self, target, template, tensors, stage, written)
        if entry.mutated and not self.is_writing and not is_plain_write(self, target, entry, tensors):
            try:
                is_done, result = write_apart(self, target, template, tensors, stage, entry)
            except LeakError as error:
                return call_parts(self, target, given, error.what)
            return result if is_done else self.record(target, template, tensors, stage, given=given)
        if key is not None and not self.is_writing:
            self.cache.known[key] = (template, entry)
        return self.append(target, template, arguments, entry, stage, modes, tensors, given)

    def append(
        self,
        target: Target,
        template: Template,
        arguments: Sequence[Any],
        entry: Entry,
        stage: int | None,
        modes: Modes,
        tensors: list[torch.Tensor],
        given: tuple[Any, ...] = ((), {}),
    ) -> Any:
        if stage is None and self.deferred.can_wait(target, entry, arguments, tensors):
            return self.deferred.defer(target, template, arguments, entry, modes, tensors, given)
        if self.deferred.has_any:
            arguments = self.deferred.recorded(arguments, entry, tensors)
        self.runs_each_backward |= entry.is_ordered
        values = used = [item for item in arguments if isinstance(item, Value)]
        if entry.unused:
            used = [item for i, item in enumerate(arguments) if isinstance(item, Value) and i not in entry.unused]
        stage = stage_for(self, entry, tensors, used) if stage is None else stage
        call = Call(target, template, arguments, entry, stage, modes, find_where(4))
        if len(used) < len(arguments) or self.outside.is_used:
            call.versions = plain_versions(arguments)
            self.held_objects.given.update({memory_of(item): item for item in arguments if type(item) is torch.Tensor})
        call.region = self.regions.of(modes)
        if call.region and isinstance(target, Leaf):
            self.stale_casts.see(target, call.region, modes)
        checkpoint = self.checkpoint
        if (hooks := hooks_on_what_is_saved()) is not None:
            if is_of_a_checkpoint(hooks):  # what is called in one is recorded, and not computed again
                checkpoint = [] if checkpoint is None else checkpoint
            else:
                call.saved_hooks = hooks
        call.moment, call.unit = self.held_objects.moments.latest, self.splitting.unit
        at_least = prepare_mutation(self, call, tensors) if entry.mutated else 0
        graph = self.current
        graph.add(call, used, at_least=at_least)
        if checkpoint is not None:
            note_recounted(self, call, tensors, checkpoint)
        call.outputs = tuple([Value(meta, stage, call, i) for i, meta in enumerate(entry.metas)])
        graph.note(call, values, entry.digest)
        if entry.is_random:
            return answer_drawing(self, call, entry, tensors, given)
        if entry.is_one_new_tensor:
            return LazyTensor.make(call.outputs[0], self)
        return answer(self, call, entry, tensors, given)

    def predict(self, target: Target, template: Template, metas: Sequence[Meta], modes: Modes) -> Entry | Unknown:
        was_recording, self.is_recording = self.is_recording, False
        try:
            entry = self.cache.lookup(target, template, metas, modes)
            return draws_in_python(entry) if entry.is_random_in_python and self.draws.is_plain else entry
        finally:
            self.is_recording = was_recording

    def argument(self, tensor: torch.Tensor) -> Value | torch.Tensor:
        if type(tensor) is LazyTensor:
            if MAY_HIDE_HISTORY:
                check_history(self, tensor)
            if tensor.may_be_old:
                refresh(self, tensor)
            value = tensor._value
            return value if type(value.call) is Call else self.deferred.argument(value)
        if (placed := self.placed.get(id(tensor))) is not None:
            return self.value_of(placed)
        if type(tensor) in (TeamTensor, SlicedGradient):
            return self.argument(self.splitting.join(tensor, "a module takes it"))
        if self.copies.by_storage:
            self.copies.refresh((tensor,))
        with DisableTorchFunction():
            requires_grad = tensor.requires_grad
        return self.outside.of(tensor) if requires_grad else tensor

    def value_of(self, placed: Placed) -> Value:
        """Returns a parameter or buffer as a source, as written by now."""
        self.before_read(placed.tensor)
        is_fixed = placed.is_written and not self.is_writing and not placed.is_parameter
        return self.parameter_values.of(placed, is_fixed=is_fixed)

    def backward(self, tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> None:
        """Queue a backward; the current micro-batch ends here."""
        backward = record_backward(self, tensors, gradients, *args, **kwargs)
        changes = self.changing_backwards
        changing = changes.begin(backward) if changes.open or changes.latest else []
        self.num_pending_backwards += 1
        self.next_graph()
        if (self.hooks.hooked and self.hooks.are_there) or backward.stops is not None:
            self.hooks.run_backward(backward, "a backward, after which hooks run")
        elif self.runs_each_backward or changing:
            self.engine.flush("a backward, after which weights or attributes may change")
        if changing:
            self.changing_backwards.end(backward, changing)
        if self.copies.of_gradients:
            self.gradients.memory.put_outside()

    def next_graph(self) -> None:
        """Begin a new micro-batch, if the current one has begun at all."""
        if self.current.calls or self.current.backwards:
            self.pending.append(self.current)
            self.num_graphs += 1
            self.current = Graph(self.num_graphs - 1)
            if self.splitting.stages:
                self.splitting.end_graph()

    def take_pending(self) -> list[Graph]:
        """Returns all that waits, to be run. What is recorded from now on is a new micro-batch."""
        self.deferred.settle()
        self.next_graph()
        graphs, self.pending, self.num_pending_backwards = self.pending, [], 0
        return graphs

    def has_pending(self) -> bool:
        return bool(self.pending or self.current.calls)

    def flush_before_change(self, reason: str) -> None:
        """Run what is recorded while the model is still as it was."""
        if self.has_pending():
            self.engine.flush(reason)

    @property
    def position(self) -> tuple[int, int]:
        """Returns where the program stands: which call of which graph it will record next."""
        return (self.current.index, len(self.current.calls))

    def forget_states(self) -> None:
        """A module has gone from train to eval, or a parameter has been frozen."""
        for leaf in (*self.leaves.values(), *self.variants.values()):
            leaf.state = None

    def is_evaluation(self, module: Any) -> bool:
        """Returns whether the program calls a module in eval mode: draws of such calls are numbered apart."""
        return self.frame is self.root and not module.training

    def begin_module(self, module: Any) -> None:
        """A module is called from outside any other: in forward-only code each call of a model is a micro-batch."""
        if not self.draws.is_plain:
            self.draws.first_seed = host_seed()
        self.outermost, self.reached = module, None
        if id(module) in self.roots and not torch.is_grad_enabled():
            self.next_graph()
            if len(self.pending) >= _MAX_FORWARD_ONLY and self.num_pending_backwards == 0:
                self.engine.flush(f"{_MAX_FORWARD_ONLY} forward-only micro-batches")

    def enter_optimizer(self) -> None:
        """Records nothing until `leave_optimizer`."""
        self.is_in_optimizer, self.is_recording = True, False
        self._modes = take_modes_of(self)

    def leave_optimizer(self) -> None:
        self.is_in_optimizer, self.is_recording = False, True
        self.step_view = None
        put_modes(self._modes)
        self.gradients.end_step()
        self.held_objects.end_step()

    def read(self, lazy: LazyTensor) -> torch.Tensor:
        return self.gradients.read(lazy) if self.step_view is None else self.step_view.read(lazy)

    def before_read(self, tensor: Any) -> None:
        """Run what is recorded, if it writes into a parameter or buffer of which the program asks the data."""
        placed = self.placed.get(id(tensor)) if self.is_recording and not self.is_writing else None
        if placed is not None and placed.is_written and self.has_pending():
            self.engine.flush(f"{placed.name}, which a module writes, is read")

    def read_parameter(self, stub: StubParameter) -> torch.Tensor:
        self.before_read(stub)
        return self.step_view.read(stub) if self.step_view else self.engine.read_parameter(self.placed[id(stub)])

    def forget_parameter_values(self) -> None:
        """A step has ended: parameters may change, so their values are new sources."""
        self.parameter_values.forget()
        if self.splitting.stages:
            self.splitting.matrices.forget_slices()
        self.outside.forget()
        self.copies.epoch += 1

    def refuse(self, what: str, *, why: str = "", hint: str = "") -> NoReturn:
        raise RecordError(what + ".", why=why or f"at {format_where(find_where())}", hint=hint)
