"""A leaf: a module placed wholly on one stage, called as one unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn

from farspan.call.draws.frame import key_of
from farspan.call.module_tables import Tables
from farspan.errors import RecordError
from farspan.graph import ModuleTarget, SliceName, whole_name
from farspan.torch_private import DisableTorchFunction, is_not_torchs_device

if TYPE_CHECKING:
    from farspan.graph import Meta

__all__ = ["Leaf", "LeakError", "Placed", "Target", "WholeError", "reaches_outside", "sliced", "swapped", "tensor_of"]


class LeakError(RecordError):
    """A call reaches outside: uses a parameter of another module, puts a tensor into a closure or a global list, or
    names a place to run at.

    A module that does is not called as one unit. The user sees the error only where that comes too late.
    """


class TraceError(LeakError):
    """A call leaves a trace that a second run of it would leave twice: it prints, writes into a file, counts in a
    variable around it.
    """


def reaches_outside(error: BaseException) -> bool:
    """Returns whether a call that raised `error` needs what is outside its module: its parts are called one by one
    instead."""
    return isinstance(error, LeakError) or is_not_torchs_device(error)


class WholeError(RecordError):
    """Raised by what cannot be recorded operation by operation, and can run inside a module that is called as one unit.

    A module whose parts are called one by one, and whose forward does it, is from then on called as one unit. The user
    sees the error only where it is done outside of every module.
    """


@dataclass(slots=True, eq=False)
class Placed:
    """A parameter or buffer of a distributed model, and the stage that owns it."""

    name: str
    stage: int
    tensor: torch.Tensor
    """The object the user's code holds: the real one on its owner, a stub elsewhere."""
    meta: Meta
    is_owned: bool
    is_parameter: bool
    kind: type[torch.Tensor]
    """The class of the parameter, which a stub does not have."""
    is_shared: bool = False
    """True if the model has it under several names, or calls several modules that hold it."""
    user: Leaf | None = None
    """The first leaf to be called that holds it."""
    is_written: bool = False
    """True once a call of a leaf has been seen to write into it."""
    is_saved: bool = False
    """True once autograd has been seen to save this buffer, so that a later backward needs what it was."""
    is_copy: bool = False
    """True if it is of a `copy.deepcopy` of a distributed model, or of a part of it."""
    changed_at: int = 0
    """The number of the first micro-batch since the program, or an optimizer, has written into it."""
    hooked_at: Any = None
    """The user's line that registered a gradient hook on it."""
    is_passed_on: bool = False
    """True, while a backward segment runs, if its gradient goes on to another segment, which adds to it."""
    aliases: list[Any] = field(default_factory=list)
    """Weak references to the recorded tensors that share its memory: `param.data`, and views of it."""

    @property
    def is_trained(self) -> bool:
        return self.is_parameter and self.tensor.requires_grad


def tensor_of(parameters: Mapping[str, Placed], name: str) -> torch.Tensor:
    """Returns the parameter of a name, or the slice of it that the name means: a view, through which gradient flows."""
    tensor = parameters[whole_name(name)].tensor
    return sliced(tensor, name) if type(name) is SliceName else tensor


def sliced(tensor: torch.Tensor, name: SliceName) -> torch.Tensor:
    """Returns what `name` means of a parameter, by its own memory."""
    with DisableTorchFunction(), torch.enable_grad():
        return tensor.narrow(name.dim, name.begin, name.end - name.begin)


@final
class Leaf(ModuleTarget):
    """A module placed wholly on one stage."""

    __slots__ = (
        "__weakref__",
        "around",
        "attributes",
        "buffers",
        "foreign",
        "has_buffers",
        "has_been_called",
        "is_resolved",
        "is_open",
        "is_repeating",
        "key",
        "leaves_trace",
        "module",
        "modules",
        "name",
        "num_extra",
        "own_objects",
        "own_parameters",
        "parameter_names",
        "placed",
        "receivers",
        "runs_code_backward",
        "settings",
        "stage",
        "state",
        "surroundings",
        "tables",
        "versions",
    )

    def __init__(self, name: str, module: nn.Module, stage: int, placed: list[Placed]) -> None:
        self.name = name
        self.key = key_of(name)
        """The name of the leaf in the paths of what is drawn inside."""
        self.module = module
        self.stage = stage
        self.modules = tuple(part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule))
        self.placed = tuple(placed)
        """All parameters and buffers below that the plan has placed."""
        self.tables = Tables(self.modules, {id(item.tensor) for item in placed})
        self.state: tuple[Any, ...] | None = None
        """Kept until a flag of one of the modules or parameters is set."""
        self.is_open = False
        """True if its parts are called one by one instead, since it reaches outside itself."""
        self.leaves_trace = False
        """True if it is open since it prints, or the like."""
        self.is_repeating = False
        """True if it computes calls of another one again, and is given all that these write into."""
        self.is_resolved = False
        """True if the result of a call was known only when it ran, since it depends on data: another run may differ."""
        self.runs_code_backward = False
        """True if a backward of one of its calls runs Python of the program's: that of an autograd function, or what a
        checkpoint computes again."""
        self.attributes: dict[str, None] = {}
        """The attributes that its calls have been seen to write on its modules."""
        self.settings: dict[str, Any] = {}
        """The attributes that the program has set on its modules since, by number and name: equal where predictions
        are."""
        self.around = -1
        """The number of the latest snapshot of its surroundings: equal where predictions are."""
        self.surroundings: Any = None
        """The surroundings that its code can read; found when it is called, shared by all leaves of the same code."""
        self.buffers = tuple(item for item in placed if not item.is_parameter)
        self.own_objects: Any = None
        """The objects in attributes that are not in `attributes`; made when it is called."""
        self.versions: tuple[int, ...] = ()
        """The versions of the plain tensors in `own_objects` when it was called last."""
        self.has_buffers = any(item.stage == stage for item in self.buffers)
        self.foreign = tuple(item for item in placed if item.stage != stage)
        """The parameters that another stage owns (tied ones): they come as values, gradients flow back."""
        self.num_extra = len(self.foreign) + self.tables.num_slot_tensors
        """Number of tensors that a call has after its arguments: see `extra_tensors`."""
        own = [item for item in placed if item.is_parameter and item.stage == stage]
        self.parameter_names = frozenset(item.name for item in own)
        self.own_parameters = own
        self.receivers = self._receivers()
        """The receivers of gradient besides a call's arguments: all its own parameters, and shared ones by name."""
        self.has_been_called = False

    def begin(self) -> list[str]:
        """Prepares the leaf for its first call.

        Returns:
            The names of parameters of which only now another leaf that holds them is called.
        """
        self.has_been_called = True
        shared: list[str] = []
        for item in self.own_parameters:
            if item.user is None:
                item.user = self
            elif not item.is_shared:
                item.is_shared = True
                item.user.receivers = item.user._receivers()
                shared.append(item.name)
        self.receivers = self._receivers()
        return shared

    def extra_tensors(self) -> list[torch.Tensor]:
        """Returns what a call uses besides its arguments and its own parameters: those of other stages, and what else
        the program has put into the modules' tables.
        """
        tensors = [item.tensor for item in self.foreign]
        return tensors + self.tables.slot_tensors() if self.tables.slots else tensors

    def holding(
        self, extra: Sequence[torch.Tensor], replacement: Mapping[int, torch.Tensor] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Let the modules hold what they held when the leaf was made, for a call.

        Args:
            extra: What `extra_tensors` gave, or what stands for it.
            replacement: By id, what stands for its own parameters and buffers.
        """
        values = dict(replacement or {})
        values.update((id(item.tensor), value) for item, value in zip(self.foreign, extra, strict=False))
        return self.tables.holding(values, extra[len(self.foreign) :])

    def _receivers(self) -> tuple[Any, ...]:
        return (self, *(item.name for item in self.own_parameters if item.is_shared))

    def state_key(self) -> tuple[Any, ...]:
        """Returns what a call's metadata depends on besides its arguments: `flags`, what has been set, `around`, and
        which of the tensors that it finds in objects and around its code require grad.
        """
        if self.state is None:
            seen = (self.own_objects, None if self.surroundings is None else self.surroundings.snapshot)
            self.state = (
                (
                    tuple([module.training for module in self.modules]),
                    tuple([item.tensor.requires_grad for item in self.placed]),
                ),
                tuple(self.settings.items()),
                self.around,
                tuple([tensor.requires_grad for objects in seen if objects is not None for tensor in objects.tensors]),
            )
        return self.state

    @property
    def flags(self) -> tuple[Any, ...]:
        """Train or eval, and what is frozen: equal on all ranks, unlike settings (`module.verbose = rank == 0`)."""
        flags: tuple[Any, ...] = self.state_key()[0]
        return flags

    def __str__(self) -> str:
        return self.name or type(self.module).__name__


Target: TypeAlias = Leaf | Callable[..., Any]
"""What a call calls: a module on one stage, or a function."""


@contextlib.contextmanager
def swapped(modules: tuple[nn.Module, ...], replacement: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let `modules` see other tensors in the place of their parameters and buffers, by id of the original."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    flat: list[tuple[nn.RNNBase, Any]] = []
    try:
        for module in modules:
            tables: Any = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and id(tensor) in replacement:
                        undo.append((table, name, tensor))
                        table[name] = replacement[id(tensor)]
            if isinstance(module, nn.RNNBase):  # keeps a second list of its weights
                flat.append((module, module._flat_weights))
                module.__dict__["_flat_weights"] = [
                    weight if weight is None else replacement.get(id(weight), weight) for weight in module._flat_weights
                ]
        yield
    finally:
        for table, name, tensor in undo:
            table[name] = tensor
        for module, weights in flat:
            module.__dict__["_flat_weights"] = weights
