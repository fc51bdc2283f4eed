"""A model's calls on whole batches, recorded as several lanes where that gives the same.

    distribute(model, micro_batches=4)
    out = model(x)          x [32, ..] is cut into 4 lanes; the model's Python runs once for each

Whether a model may be cut is examined at its first call of a kind, and said once if it may not: its rows are followed
through all operations, forward and backward (`call.rows`). With FARSPAN_SANITIZE outputs and gradients are compared,
too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farspan.call.infer.entry import meta_of
from farspan.call.infer.symbolic import Numbers
from farspan.call.leaf import Placed, TraceError
from farspan.call.module_tables import has_user_hooks
from farspan.call.naming import find_where, format_where
from farspan.call.pytree.canonical import canonical, is_plain
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.rows.follow import RowsError
from farspan.call.rows.trace import SAME, RowsApart, follow_rows
from farspan.call.rows.work import RowsWork
from farspan.call.side_effects.attributes import own_attributes
from farspan.call.side_effects.rehearsal import rehearsed
from farspan.call.wire.users_line import describe, place_of_error
from farspan.launch.rank.interrupts import signals_held
from farspan.record.lanes.batches import Lanes, NotInLanesError
from farspan.record.lanes.examination import Lane, counting, cut_tensors, difference
from farspan.record.lanes.kinds import Around, Cut, Kind
from farspan.record.lanes.lane_tensor import LaneTensor, join_all
from farspan.record.lanes.losses import LOSSES, divisor_of
from farspan.record.lanes.window import Window
from farspan.record.surgery.attempt import Attempt
from farspan.record.tensor import LazyTensor
from farspan.record.unrecorded import unrecorded
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.graph import Meta, Template
    from farspan.record.recording import Recording

__all__ = ["BatchedModel", "ChoosesLanes", "call_batch", "called_parts", "note_rows"]

ChoosesLanes = Callable[[Sequence[RowsWork], int], int]
"""Gives the number of lanes for the work of a batch and its number of rows; 1 for a batch that is not worth cutting."""

_MOST_CANDIDATES = 4
_MOST_KINDS = 24
_LEAST_ROWS = 2
"""Rows of a micro-batch: a single one is treated otherwise in many places."""
_FIRST_CALLS = 1
"""How many calls may set attributes of modules without a word, as first calls do."""
_TOLERANCE = 1e-3
"""Tolerance for the difference of outputs and gradients, relative to their size, in single precision; more for less
precision."""


def call_batch(recorder: Recording, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module of a model as the program does, from outside any other.

    Args:
        recorder: Records it; some of its models have their batches cut into lanes.
        module: Which.
        call: Calls it as a whole.
        args: What the program gives.
        kwargs: And by name.
    """
    batched = recorder.batches.models.get(id(module))
    recorder.batches.is_inside = True
    try:
        if batched is not None:
            return batched.call(recorder, call, args, kwargs)
        if torch.is_grad_enabled() and module.training:
            for model in recorder.batches.models.values():
                model.note_part(module)
        join_all((args, kwargs))
        return call(*args, **kwargs)
    finally:
        recorder.batches.is_inside = False


def note_rows(recorder: Recording, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Note whether a model that is called as it is trains on batches, by its first call."""
    batches = recorder.batches
    if id(module) in batches.unseen and torch.is_grad_enabled() and module.training:
        batches.unseen.remove(id(module))
        batches.has_rows.append(_has_rows(flatten((args, kwargs))[1]))


def called_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that a program calls: a model, or those in a list or a dictionary of models."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [part for child in model.children() for part in called_parts(child)]
    return [model]


class BatchedModel:
    """A distributed model whose batches are cut into lanes.

    Args:
        model: Which.
        num_lanes: How many lanes a batch has, fewer where it has not so many rows; or what chooses that, by the work
            of the first batch that can be cut, and its number of rows.
        say: Is given what people should know, once.
    """

    def __init__(self, model: nn.Module, num_lanes: int | ChoosesLanes, say: Callable[[str], None]) -> None:
        self.model = model
        self.num_lanes = num_lanes if isinstance(num_lanes, int) else 0
        """0 until it has been chosen."""
        self._choose = None if isinstance(num_lanes, int) else num_lanes
        self._say = say
        self._kinds: dict[Any, Kind] = {}
        self._around = Around()
        self._has_cut = False
        self.is_random = False
        """True if random numbers are drawn in calls that have been cut: lanes draw others than the whole batch."""
        self.precision = 0.0
        """Precision of the least precise numbers in such calls."""
        self._num_first_calls = 0
        self.reasons: dict[str, None] = {}
        """Reasons for which batches have stayed whole."""

    @property
    def is_cut(self) -> bool:
        """Returns whether batches of some kind have been cut."""
        return self._has_cut

    def call(self, recorder: Recording, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model as the program does: in lanes where that is certain, else as a whole.

        Args:
            recorder: Records it.
            call: Calls the model as a whole.
            args: What the program gives, of the whole batch.
            kwargs: And by name.
        """
        if not (torch.is_grad_enabled() and self.model.training):
            join_all((args, kwargs))
            return call(*args, **kwargs)
        template, tensors = flatten((args, kwargs))
        num_rows = _rows_of(tensors)
        num_lanes = min(self.num_lanes or 2, num_rows // _LEAST_ROWS)
        sizes = _sizes(num_rows, num_lanes) if num_lanes > 1 else []
        cut = self._cut_of(recorder, call, template, tensors, sizes)
        if cut.is_provisional or cut.reason:
            if not cut.is_provisional:
                self._note(cut.reason)
            join_all((args, kwargs))
            return call(*args, **kwargs)
        if self._choose is not None:  # the first batch that can be cut says how much work there is
            self.num_lanes, self._choose = self._choose(cut.work, num_rows), None
            return self.call(recorder, call, args, kwargs)
        if not self._has_cut:
            self._has_cut = True
            if len(sizes) < self.num_lanes:
                self._say(
                    f"a batch of {num_rows} rows is cut into {len(sizes)} micro-batches, not {self.num_lanes}: "
                    f"each has at least {_LEAST_ROWS} rows"
                )
        return self._in_lanes(recorder, call, template, tensors, sizes, cut)

    def _cut_of(
        self,
        recorder: Recording,
        call: Callable[..., Any],
        template: Template,
        tensors: Sequence[Any],
        sizes: list[int],
    ) -> Cut:
        """Returns how a batch is cut, or why it is not: what is known of calls like this one, else an examination."""
        if self.num_lanes == 1:
            return Cut(reason="one micro-batch is likely to be about as fast as several")
        if not sizes:
            return Cut(reason="a batch of fewer than 4 rows is too small")
        modules = [*self.model.modules()]
        reason = _kept_whole_by(recorder, modules)
        if reason:
            return Cut(reason=reason)
        metas = [item._value.meta if isinstance(item, LazyTensor) else meta_of(item) for item in tensors]
        if any(len(meta.stride) != len(meta.shape) for meta in metas):
            return Cut(reason="it is given sparse tensors")
        numbers = Numbers(template, metas)
        beside = _buffers_of_containers(recorder, self.model)
        shapes = tuple([(item.name, item.meta.shape, item.meta.dtype) for item in beside])
        key = (numbers.kind, _state_of(recorder, modules), shapes, self._around.number(modules))
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            return Cut(reason="what its modules hold or read is new in each call")
        kind = self._kinds.setdefault(key, Kind())
        cut = kind.known(numbers, sizes)
        if cut is not None and not cut.is_provisional:
            return cut
        if not kind.is_worth_more:
            return Cut(reason="it is called with ever new numbers")
        recorder.flush_before_change("how a batch can be cut into micro-batches is examined")
        with _unmeasured(recorder.engine):
            placed = [*recorder.placed.values(), *beside]
            again = self._examined(recorder, call, numbers, template, metas, placed, tensors, sizes, kind)
        again.is_provisional &= self._num_first_calls < _FIRST_CALLS
        self._num_first_calls += again.is_provisional
        return kind.keep(numbers, sizes, again)

    def _in_lanes(
        self,
        recorder: Recording,
        call: Callable[..., Any],
        template: Template,
        tensors: Sequence[Any],
        sizes: Sequence[int],
        cut: Cut,
    ) -> Any:
        """Records a call lane by lane; returns for the program what the batch gives."""
        window = recorder.batches.window
        if window is None or not window.is_open or window.sizes != tuple(sizes) or not window.can_use(tensors):
            window = recorder.batches.window = Window(recorder, sizes)
        for number, item in enumerate(tensors):
            if type(item) is LaneTensor and not (number in cut.positions and item.is_cut_by(window)):
                item.join()
        lanes = [Lane(call, template, lane) for lane in cut_tensors(tensors, cut.positions, sizes)]
        if cut.is_mean:
            lanes = [counting(recorder.batches, lane) for lane in lanes]
        try:
            return _gathered(window, window.record(lanes), cut)
        except NotInLanesError as error:
            recorder.refuse(
                f"the micro-batches of one batch cannot be put together in {type(self.model).__name__}",
                why=f"{error}.",
                hint="leave out micro_batches= of farspan.distribute",
            )

    def note_part(self, module: nn.Module) -> None:
        """A module is called by itself: if it is a part of this model, which is not called as a whole, say so."""
        if not self._has_cut and not self.reasons and any(part is module for part in self.model.modules()):
            where = format_where(find_where())
            self._note(f"parts of the model are called by themselves: {describe(module)} at {where}")

    def _note(self, reason: str) -> None:
        """Say, once, why batches are not cut."""
        if reason not in self.reasons:
            self.reasons[reason] = None
            self._say(f"batches are not cut into micro-batches: {reason}")

    def _examined(
        self,
        recorder: Recording,
        call: Callable[..., Any],
        numbers: Numbers,
        template: Template,
        metas: Sequence[Meta],
        placed: Sequence[Placed],
        tensors: Sequence[Any],
        sizes: Sequence[int],
        kind: Kind,
    ) -> Cut:
        """Find out how calls like this one can be cut: by rules for all that the model does."""
        first, *others = [number for number, meta in enumerate(metas) if meta.shape and meta.shape[0] == sum(sizes)]
        if len(others) >= _MOST_CANDIDATES:
            return Cut(reason=f"{len(others) + 1} arguments could carry the batch")
        kind.see(numbers)
        leaf = recorder.leaves.get(id(self.model))
        if leaf is not None and len(leaf.modules) > 1:
            leaf.is_open = True  # a loss that it makes is seen, as where its parts are on several stages
        attempt, reasons = Attempt(recorder, self.model), list[str]()
        for chosen in [each for number in range(len(others), -1, -1) for each in combinations(others, number)]:
            positions = (first, *chosen)
            places = frozenset([numbers.place_of(metas, number) for number in positions])
            varying = sorted(kind.varying - places)
            try:
                given = (self.model, placed, numbers, metas, positions, varying, LOSSES)
                apart = rehearsed(_aside, recorder, follow_rows, *given)
                if attempt.has_changed():
                    return Cut(
                        reason="its forward changes attributes, lists or counters of its modules", is_provisional=True
                    )
            except TraceError as error:
                return Cut(reason=error.what.rstrip(".") + place_of_error(error))
            except RowsError as error:
                reasons.append(str(error))
                continue
            finally:
                attempt.undo()
            fixed = {place: value for place, value in enumerate(numbers.values) if place not in places.union(varying)}
            cut = Cut(positions, "", apart.dims, apart.is_mean, False, fixed, varying, places, apart.holds)
            cut.work = apart.work if self._choose is not None else ()
            if not cut.fits(numbers, sizes):
                reasons.append("what it does depends on the number of rows")
                continue
            # What a mean is divided by is known only when it runs.
            is_doubted = apart.is_mean or recorder.engine.sanitizer is not None
            if recorder.batches.has_numbers and is_doubted:
                worst = self._compare(recorder, call, template, tensors, cut, sizes, apart)
                if worst:
                    return Cut(reason=worst)
            self.is_random |= apart.is_random
            self.precision = max(self.precision, apart.precision)
            return cut
        return Cut(reason=reasons[0])

    def _compare(
        self,
        recorder: Recording,
        call: Callable[..., Any],
        template: Template,
        tensors: Sequence[Any],
        cut: Cut,
        sizes: Sequence[int],
        apart: RowsApart,
    ) -> str:
        """Returns why the batch is not to be cut after all, by the numbers of this one; "" if nothing is to be said."""
        tensors = [item.detach() if item.requires_grad else item for item in tensors]  # no gradient goes back beyond
        join_all(tensors)
        lanes = [Lane(call, template, lane) for lane in cut_tensors(tensors, cut.positions, sizes)]
        try:
            with recorder.splitting.paused():  # gradients of slices would not be returned
                worst = difference(recorder, self.model, Lane(call, template, tensors), lanes, apart)
        except NotInLanesError as error:
            return str(error)
        tolerance = max(_TOLERANCE, 16 * apart.precision)
        return "" if worst <= tolerance else f"its parts give other numbers (by {worst:.1e} of their size)"


@contextlib.contextmanager
def _unmeasured(engine: Any) -> Iterator[None]:
    """Let what runs in the body be no part of the program's steps; it says so where it takes long."""
    executor, engine.executor = engine.executor, engine.plain_executor()
    engine.executor.remat = executor.remat
    engine.console.is_counting = False
    try:
        with engine.console.said_if_slow("trying whether batches can be cut into micro-batches"):
            yield
    finally:
        engine.executor = executor
        engine.console.is_counting = True


def _buffers_of_containers(recorder: Recording, model: nn.Module) -> list[Placed]:
    """Returns the buffers that every rank has, such as a mask: of modules whose parts lie on several stages."""
    with DisableTorchFunction():  # questions that the function mode need not see
        return [
            Placed(f"{name}.{key}" if name else key, 0, item, meta_of(item), True, False, torch.Tensor)
            for name, module in model.named_modules()
            if id(module) not in recorder.leaf_parts
            for key, item in module.named_buffers(recurse=False)
            if type(item) is torch.Tensor and id(item) not in recorder.placed
            if item.layout is torch.strided and not item.is_nested and not item.requires_grad
        ]


def _aside(recorder: Recording, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while nothing is recorded."""
    with unrecorded(recorder), signals_held():
        return recorder.cache.aside(function, *args)


def _rows_of(tensors: Sequence[Any]) -> int:
    """Returns the size of the batch: of the first tensor that is given and has dimensions; 0 where there is none."""
    return next((int(item.shape[0]) for item in tensors if item.dim()), 0)


def _has_rows(tensors: Sequence[Any]) -> bool:
    """Returns whether what a model is given seems to be a batch that is large enough to be cut: a single vector of
    numbers is none, nor are tensors of which no two agree in their first dimension."""
    sizes = [int(item.shape[0]) for item in tensors if item.dim()]
    if _rows_of(tensors) < 2 * _LEAST_ROWS:
        return False
    is_vector = len(sizes) == 1 and all(item.dim() < 2 and item.is_floating_point() for item in tensors)
    return not is_vector and (len(sizes) == 1 or len(set(sizes)) < len(sizes))


def _sizes(num_rows: int, num_lanes: int) -> list[int]:
    """Rows of each lane: as equal as can be, the first ones the larger."""
    each, more = divmod(num_rows, num_lanes)
    return [each + (number < more) for number in range(num_lanes)]


def _kept_whole_by(recorder: Recording, modules: Sequence[nn.Module]) -> str:
    """Returns why hooks or weights keep a model's batches whole; "" if they do not."""
    hooked = next(filter(has_user_hooks, modules), None)
    if hooked is not None:
        return f"hooks on its modules would see the parts of a batch: on {describe(hooked)}"
    if recorder.hooks.are_there or recorder.has_hooked_calls:
        return "hooks on gradients would see those of the parts of a batch"
    if recorder.changing_backwards.are_there:
        return "its backward changes attributes"
    return "its weights change at each backward" if recorder.runs_each_backward else ""


def _state_of(recorder: Recording, modules: Sequence[nn.Module]) -> Any:
    """Returns what a model's forward may depend on besides its arguments: modes, what is trained, plain attributes."""
    leaves = [leaf for module in modules if (leaf := recorder.leaves.get(id(module))) is not None]
    containers = [module for module in modules if id(module) not in recorder.leaf_parts]
    attributes = [
        (number, name, canonical(item))
        for number, module in enumerate(containers)
        for name, item in own_attributes(module).items()
        if is_plain(item)
    ]
    return (
        tuple([module.training for module in modules]),
        tuple([item.requires_grad for module in modules for item in module._parameters.values() if item is not None]),
        tuple([tuple(leaf.settings.items()) for leaf in leaves if leaf.settings]),
        tuple(attributes),
    )


def _gathered(window: Lanes, results: Sequence[Any], cut: Cut) -> Any:
    """Returns for the program the tensors of the batch, in the structure that each lane has given.

    Args:
        window: The lanes.
        results: Of each; if they make losses that are means, with what these count.
        cut: How the batch was cut.
    """
    divisor, dims = 1.0, cut.dims
    if cut.is_mean:
        divisor = divisor_of([counts for _, counts in results])
        results = [result for result, _ in results]
    flat = [flatten(result) for result in results]
    template = flat[0][0]
    columns: list[Any] = [*zip(*(tensors for _, tensors in flat), strict=False)]
    if any(other != template for other, _ in flat) or len(columns) != len(dims):
        raise NotInLanesError("they give different things")
    for number, dim in enumerate(dims):
        if dim is None and divisor != 1.0:
            column, columns[number] = columns[number], list[Any]()
            for lane, loss in enumerate(column):
                with window.inside(lane):
                    columns[number].append(loss / divisor)
    found = [
        column[0] if dim == SAME else LaneTensor.of(window, column, dim)
        for column, dim in zip(columns, dims, strict=True)
    ]
    return rebuild(template, found)
