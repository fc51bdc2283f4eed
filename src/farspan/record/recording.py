"""The protocol between the parts of the recorder: each takes a `Recording`, which the recorder fulfils."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from farspan.call.draws.frame import Frame
    from farspan.call.draws.program_draws import ProgramDraws
    from farspan.call.function_call import FunctionCall
    from farspan.call.infer.entry import Entry, Unknown
    from farspan.call.infer.fallbacks import MetadataCache
    from farspan.call.leaf import Leaf, Placed, Target
    from farspan.call.modes import Modes, Regions
    from farspan.call.surroundings.moments import Moments
    from farspan.graph import Backward, Graph, Meta, Template, Value
    from farspan.record.lanes.batches import Batches
    from farspan.record.runtime import Engine

__all__ = ["Recorded", "Recording", "SplitStages"]


class Computing(Protocol):
    """Runs deferred calls for real."""

    def running(self) -> AbstractContextManager[None]: ...


class DeferredCalls(Protocol):
    """Calls that run only when their results are wanted."""

    @property
    def computing(self) -> Computing: ...
    def can_run(self, target: Target, tensors: Sequence[torch.Tensor]) -> bool: ...
    def run_here(self, target: Target, template: Template, tensors: Sequence[torch.Tensor]) -> tuple[Any] | None: ...
    def take(self, view: Any, template: Template, tensor: Any) -> Any: ...
    def record_all(self, arguments: Sequence[Any]) -> None: ...
    def record_one(self, tensor: Any) -> None: ...
    def computed(self, tensor: Any) -> Any: ...


class ParameterCopies(Protocol):
    """Plain tensors of the program that share the memory of parameters."""

    by_storage: dict[int, Any]
    epoch: int

    def add(self, tensor: torch.Tensor, placed: Placed) -> None: ...
    def holds(self, tensor: torch.Tensor) -> bool: ...
    def fill(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def refresh(self, used: Any) -> None: ...
    def leave(self, placed: Placed) -> None: ...
    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool: ...
    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class ParameterHooks(Protocol):
    """Hooks of the program on the gradients of parameters."""

    @property
    def hooked(self) -> Mapping[str, Any]: ...

    @property
    def are_there(self) -> bool: ...
    @property
    def are_running(self) -> bool: ...
    def add(self, placed: Placed, hook: Any, *, is_post: bool) -> RemovableHandle: ...
    def check_backward(self, backward: Backward) -> None: ...
    def run_backward(self, backward: Backward, reason: str) -> None: ...
    def commit(self) -> None: ...
    def check_read(self, placed: Placed) -> None: ...


class ParameterGradients(Protocol):
    """The gradients of parameters, as every rank sees them."""

    def refresh(self, kept: Any) -> None: ...
    def get(self, placed: Placed) -> torch.Tensor | None: ...
    def set(self, placed: Placed, gradient: Any) -> None: ...
    def accumulate(self, placed: Placed, gradient: Any) -> None: ...
    def in_slices(self) -> list[Any]: ...


class OutsideTensors(Protocol):
    """Plain tensors of the program that gradient flows to."""

    is_used: bool

    def has(self, tensor: torch.Tensor) -> bool: ...
    def is_gradient(self, tensor: torch.Tensor) -> bool: ...
    def note_gradient(self, gradient: Any) -> None: ...


class Held(Protocol):
    """Objects of the program that the code of leaves reads beside its arguments."""

    moments: Moments
    are_marked: bool

    def see_function(self, call: FunctionCall) -> None: ...
    def before_freezing(self, tensor: torch.Tensor) -> None: ...
    def before_write(self, function: Any, args: Any, kwargs: Any) -> None: ...


class Draws(Protocol):
    """The places at which recorded calls have drawn random numbers in the program's own code."""

    def note(self, function: Any) -> None: ...


class SlicesOfMembers(Protocol):
    """The slices of parameters that members of split stages own themselves."""

    slices: dict[str, tuple[Placed, ...]]
    whole_names: dict[str, str]
    is_looked_at: bool
    come_home: Callable[[str], None]
    note_written: Callable[[Iterable[str]], None]

    def need_whole(self, placed: Placed, what: str) -> None: ...
    def spread(self, items: Iterable[Placed]) -> list[Placed]: ...
    def whole_gradient(self, gradient: Any) -> Any: ...
    def gradient_of(self, recorder: Any, placed: Placed, parts: Sequence[Any], known: object) -> Any: ...


class SplitMatrices(Protocol):
    """How the matrices of split stages are split."""

    kept_whole: dict[str, str]
    sliced: set[str]

    @property
    def owned(self) -> SlicesOfMembers: ...


class Crossings(Protocol):
    """What goes from one stage to the members of another."""

    def add(self, splits: Iterable[Any], plain: Iterable[int]) -> None: ...


class SplitStages(Protocol):
    """The split stages of the program."""

    takes_operations: Any
    stages: dict[int, Any]
    opened: set[int]
    inside: Any
    unit: object | None
    again: set[int]
    is_inside: bool

    @property
    def crossings(self) -> Crossings: ...
    @property
    def matrices(self) -> SplitMatrices: ...
    def enter(self, module_id: int) -> Any: ...
    def paused(self) -> AbstractContextManager[None]: ...

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def join(self, item: Any, reason: str) -> Any: ...
    def left(self, result: Any) -> Any: ...


class Recording(Protocol):
    """One rank's program as it is being recorded. `Recorder` says what each attribute is."""

    engine: Engine
    is_recording: bool
    is_in_optimizer: bool
    is_writing: bool
    placed: dict[int, Placed]
    leaves: dict[int, Leaf]
    variants: dict[Any, Leaf]
    leaf_parts: set[int]
    roots: dict[int, str]
    keep_alive: list[Any]
    cache: MetadataCache
    pending: list[Graph]
    current: Graph
    num_graphs: int
    num_pending_backwards: int
    batches: Batches
    num_copies: int
    runs_each_backward: bool
    has_hooked_calls: bool
    regions: Regions
    reached: Any
    outermost: Any
    here: tuple[int, ...]
    root: Frame
    frame: Frame
    draws: ProgramDraws
    number: int
    transfer: Any
    step_view: Any

    @property
    def splitting(self) -> SplitStages: ...
    @property
    def deferred(self) -> DeferredCalls: ...
    @property
    def copies(self) -> ParameterCopies: ...
    @property
    def hooks(self) -> ParameterHooks: ...
    @property
    def gradients(self) -> ParameterGradients: ...
    @property
    def outside(self) -> OutsideTensors: ...
    @property
    def held_objects(self) -> Held: ...
    @property
    def noted_draws(self) -> Draws: ...
    @property
    def position(self) -> tuple[int, int]: ...

    def call_leaf(
        self, leaf: Leaf, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_number: bool = False
    ) -> Any: ...
    def dispatch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def record(
        self,
        target: Target,
        template: Template,
        tensors: list[torch.Tensor],
        stage: int | None,
        *,
        key: Any = None,
        given: tuple[Any, ...] = ...,
    ) -> Any: ...
    def predict(self, target: Target, template: Template, metas: Sequence[Meta], modes: Modes) -> Entry | Unknown: ...
    def argument(self, tensor: torch.Tensor) -> Value | torch.Tensor: ...
    def value_of(self, placed: Placed, *, is_alias: bool = False) -> Value: ...
    def record_call(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], stage: int | None) -> Any: ...
    def backward(self, tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> None: ...
    def begin_module(self, module: nn.Module) -> None: ...
    def leave_optimizer(self) -> None: ...
    def next_graph(self) -> None: ...
    def has_pending(self) -> bool: ...
    def flush_before_change(self, reason: str) -> None: ...
    def forget_states(self) -> None: ...
    def become_leaf(self, lazy: Any) -> None: ...
    def is_evaluation(self, module: nn.Module) -> bool: ...
    def read(self, lazy: Any) -> torch.Tensor: ...
    def before_read(self, tensor: Any) -> None: ...
    def read_parameter(self, stub: Any) -> torch.Tensor: ...
    def refuse(self, what: str, *, why: str = "", hint: str = "") -> NoReturn: ...


class Recorded(Protocol):
    """A lazy tensor, for those who need not know its class."""

    _value: Value
    _recorder: Recording
    grad: Any

    @property
    def requires_grad(self) -> bool: ...
