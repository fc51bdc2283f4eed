"""A call and its values: a value is known by its metadata on every rank, by its data on its owner alone.

call -> value -> call       calls that one stage can run without waiting in the middle: a segment
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

from farspan.graph.cut import Cut
from farspan.graph.meta import Meta

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

__all__ = ["EVERYWHERE", "Call", "MicroBatch", "Segment", "ModuleTarget", "Template", "Value", "plain_of"]

EVERYWHERE = -1
"""Stands in place of a stage for a source that every rank has, because it lies outside the model."""

Template: TypeAlias = Hashable
"""The structure around the tensors of arguments or results, opaque here: `call.pytree` makes and reads it."""

_OF_CALL, _OF_PARAMETER, _OF_INPUT = range(3)


class ModuleTarget:
    """The target of a call that is a module on one stage; all other targets are functions. `call.leaf` says what is in
    it."""

    __slots__ = ()

    stage: int
    has_buffers: bool
    parameter_names: frozenset[str]
    placed: Sequence[Any]
    buffers: Sequence[Any]
    state: Any
    own_objects: Any
    versions: tuple[int, ...]


class MicroBatch(Cut["Call", "Segment"]):
    """The calls of one micro-batch, in program order. `Graph` adds how they are recorded."""

    __slots__ = ("backwards", "index", "turn")

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.turn = 0
        """Number of the wide stage's member that runs it, counted round and round; known when it is about to run."""
        self.backwards: list[Any] = []
        """The `Backward`s that begin here."""


class Value:
    """One tensor of the recorded program.

    A value is produced by a call, or it is a *source*: something its stage holds before the step begins (a
    parameter used outside its own module, a gradient, an input that one rank has read, a value of an earlier step), or
    EVERYWHERE: a plain tensor that gradient flows to.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "data",
        "gradient_number",
        "gradient_of",
        "index",
        "is_kept",
        "is_weight",
        "lazy",
        "meta",
        "name",
        "num_readers",
        "num_users",
        "segment",
        "stage",
        "state_of",
        "ticket",
    )

    def __init__(self, meta: Meta, stage: int, call: Call | None = None, index: int = 0, *, name: str = "") -> None:
        self.meta = meta
        self.stage = stage
        self.call = call
        """The call that produces it; None for a source."""
        self.index = index
        """Its number among the producer's outputs; for a source that is an input, its number among all inputs, from
        1."""
        self.segment: Segment | None = None if call is None else call.segment
        self.name = name
        """The parameter's name, for a source that is a parameter; "" otherwise."""
        self.is_weight: bool | None = None
        """True if it is a parameter or made of parameters alone; None until that is asked for."""
        self.gradient_of = ""
        """The parameter's name, for a source that is its gradient, and for what has been written into one since."""
        self.gradient_number = 0
        """How many gradients that parameter had before this one."""
        self.state_of: tuple[int, str, int] | None = None
        """Identifies a tensor of an optimizer's state: the optimizer, the parameter, its place among the tensors of
        that parameter."""
        self.data: Any = None
        """The real tensor, on the rank that has it."""
        self.lazy: weakref.ref[Any] | None = None
        """A weak reference to the user's handle; dead when the user's program can no longer read this value."""
        self.is_kept = False
        """True while slower ranks may still read it: they are at a point of the program where it was held."""
        self.num_users = 0
        """For a value received from another rank, how many segments here have yet to use it. Counted at run time."""
        self.num_readers = 0
        """How many segments and messages of this rank have yet to take it. Counted at run time."""
        self.ticket: Any = None
        """Where a small value of another rank arrives without being asked for."""

    def drop_if_over(self) -> bool:
        """Drop data that nothing on this rank takes any more: no segment, no message, no backward.

        Returns False if nothing but a backward takes it: to that, its history matters, and not always its data.
        """
        if self.num_readers > 0 or self.is_held or self.call is None or self.data is None:
            return True
        if self.data.requires_grad:
            return False
        self.data = None  # it never required a gradient, or a backward has gone through it
        return True

    @property
    def pending(self) -> bool:
        """Returns whether the value has yet to be computed."""
        return self.segment is not None and not self.segment.executed

    @property
    def turn(self) -> int:
        """Returns the turn of the micro-batch that made it; sources lie on stages of one member."""
        return 0 if self.call is None else self.call.graph.turn

    @property
    def is_gradient(self) -> bool:
        """Returns whether it is a source that is a parameter's gradient."""
        return bool(self.gradient_of) and self.call is None

    @property
    def key(self) -> tuple[int, int, int]:
        """Returns the name by which ranks know the value."""
        return (-1, -1, self.index) if self.call is None else (self.call.graph.index, self.call.index, self.index)

    @property
    def identity(self) -> tuple[int, ...]:
        """Returns numbers that say what a source is, the same on every rank."""
        if self.call is not None:
            return (_OF_CALL, *self.key)
        if self.name or self.gradient_of:
            return (_OF_PARAMETER, _number_of(self.name), _number_of(self.gradient_of))
        return (_OF_INPUT, self.index, self.stage)

    @property
    def is_readable(self) -> bool:
        """Returns whether the user's program still holds the value, or all ranks have yet to get it."""
        return self.ticket is not None or (self.lazy is not None and self.lazy() is not None)

    @property
    def is_held(self) -> bool:
        """Returns whether its data are needed beyond the step, by this rank's program or by that of a slower rank."""
        return self.is_kept or self.is_readable

    def describe(self) -> str:
        if self.name:
            return f"parameter {self.name}"
        if self.gradient_of:
            return f"gradient of {self.gradient_of}"
        if self.stage == EVERYWHERE:
            return f"{self.meta}, a tensor outside the model"
        producer = "a batch that one rank has read" if self.call is None else self.call.describe()
        return f"{self.meta} from {producer}"


class Call:
    """A module call or an op call: one unit of work on one stage."""

    __slots__ = (
        "__weakref__",
        "arguments",
        "buffer_names",
        "buffers",
        "draws",
        "entry",
        "feeding",
        "graph",
        "hooks",
        "index",
        "is_closing",
        "is_repeated",
        "level",
        "modes",
        "moment",
        "outputs",
        "path",
        "raised",
        "recounted",
        "region",
        "saved_hooks",
        "segment",
        "stage",
        "state",
        "target",
        "template",
        "unit",
        "where",
        "versions",
    )

    def __init__(
        self,
        target: Any,
        template: Template,
        arguments: Sequence[Any],
        entry: Any,
        stage: int,
        modes: tuple[Any, ...],
        where: Any,
    ) -> None:
        self.target = target
        """The callable: a leaf (module) or a torch function; opaque here."""
        self.template = template
        """The structure from which `arguments` become the call's arguments again."""
        self.path: tuple[int, int, int] | None = None
        """The place in the program of a call that draws random numbers; the same for every plan."""
        self.draws: Any = None
        """Its place in the plain program's random numbers; None if its path seeds it."""
        self.region = 0
        """The autocast region it was recorded in, in which a parameter is cast once; 0 for none."""
        self.raised: Any = None
        """The exception that ended the call, if it had to run to be known."""
        self.saved_hooks: Any = None
        """The saved-tensor hooks that the program has set for the call, if any."""
        self.is_closing = False
        """True, when it runs, if a backward of the same step goes through it and nothing comes back after that."""
        self.recounted: Sequence[tuple[int, int, str]] = ()
        """Calls of its checkpoint, by graph and number, that torch would run again in a backward, and that would write
        into buffers or attributes once more; with their descriptions."""
        self.is_repeated = False
        """True if calls have been recorded that compute it again: not all gradient comes to its own results then."""
        self.hooks: Any = None
        """The program's hooks that receive the gradients of its outputs."""
        self.versions: tuple[int, ...] = ()
        """The versions of the plain tensor arguments when the call was recorded."""
        self.state: tuple[Any, Any, tuple[int, ...], Sequence[str]] | None = None
        """How a module was set when the call was recorded, the objects that it held with the versions of their tensors,
        and the buffers that calls had been seen to write."""
        if isinstance(target, ModuleTarget):
            written = [item.name for item in target.buffers if item.is_written] if target.buffers else ()
            self.state = (target.state, target.own_objects, target.versions, written)
        self.buffers: dict[str, Any] = {}
        """By name the buffers that calls of the module write, as they were before this one: at the owner, once it has
        run, if a derivative has been recorded or may still be."""
        self.buffer_names: tuple[str, ...] = ()
        """Those of them that are results too, after those that are foreseen: a derivative computes the call again."""
        self.feeding: dict[Value, Call] = {}
        """Once it has run, for arguments to which no gradient flows: copies of the calls that computed them, which know
        their own arguments no longer."""
        self.arguments: Sequence[Any] | None = arguments
        """Tensor arguments in template order: a Value, or a plain tensor that every rank has. None once the call
        has run and nothing can go back through it."""
        self.entry = entry
        """What inference knows of the call: output template, metadata, which output depends on which argument."""
        self.stage = stage
        self.modes = modes
        """The modes (grad mode, autocast) under which the call runs."""
        self.unit: object | None = None
        """Equal for all calls that are computed again together in the backward; None if this one is not."""
        self.moment: Any = None
        """The moment of the call: what it reads beside its arguments is as it was then."""
        self.where = where
        """The user's line, as (code object, line number)."""
        self.outputs: Sequence[Value] = ()
        """Its results, in order, and `buffer_names`; once it has run, without those that nothing refers to any more
        (`graph.release`)."""
        self.index = -1
        self.level = 0
        self.graph: MicroBatch
        self.segment: Segment

    def describe(self) -> str:
        name = str(self.entry.name)
        if self.where is None:
            return name
        code, line = self.where
        return f"{name} at {code.co_filename}:{line}"


class Segment:
    """A maximal piece of one graph that one stage can run without waiting in the middle."""

    __slots__ = (
        "calls",
        "entries",
        "executed",
        "graph",
        "index",
        "inputs",
        "leaves",
        "level",
        "num_open",
        "outputs",
        "stage",
        "_title",
    )

    def __init__(self, graph: MicroBatch, index: int, level: int, stage: int) -> None:
        self.graph = graph
        self.index = index
        self.level = level
        self.stage = stage
        self.calls: list[Call] = []
        self.inputs: dict[Value, None] = {}
        """Values that come from other segments or from outside the step, in order of first use."""
        self.outputs: dict[Value, None] = {}
        """Values that other segments need, in order of production."""
        self.leaves: dict[Value, Any] = {}
        """Maps each input value, at run time, to the detached tensor at which this segment's autograd graph begins."""
        self.entries: dict[Value, Any] = {}
        """Maps an input value to what its users here use, if that is not the tensor in `leaves` itself."""
        self.executed = False
        self.num_open = 0
        """Number of calls that have run and through which a backward may still come."""
        self._title = ""

    @property
    def title(self) -> str:
        """Returns what runs, for people: the first and the last of its calls. It is known until these are released, and
        after that if it has been asked for before."""
        if not self._title and self.calls:
            ends = (self.calls[0], self.calls[-1])
            first, last = (str(call.entry.name).removeprefix("Tensor.") for call in ends)
            self._title = first if first == last else f"{first} .. {last}"
        return self._title

    @property
    def order(self) -> tuple[int, int, int]:
        """A total order that follows the data: a segment comes after all those it depends on."""
        return (self.graph.index, self.level, self.index)

    @property
    def turn(self) -> int:
        """Returns the turn of its micro-batch."""
        return self.graph.turn

    def describe(self) -> str:
        return f"segment {self.index} (stage {self.stage}) of micro-batch {self.graph.index}"


def plain_of(argument: Any) -> Any:
    """Returns the plain tensor behind an argument of a call, if every rank has it; else the argument."""
    return argument.data if type(argument) is Value and argument.stage == EVERYWHERE else argument


@functools.cache
def _number_of(name: str) -> int:
    """Returns a number for the name of a parameter, equal in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
