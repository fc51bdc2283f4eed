"""The lanes of one batch while they are recorded: a graph for each, in which the program's next operations go on.

    graph 7   model(x[0:8])    loss / 4     backward          the program:  out = model(x)
    graph 8   model(x[8:16])   loss / 4     backward                        loss = F.cross_entropy(out, y)
    graph 9   ...                                                           loss.backward()

An operation that treats each row by itself is recorded in every lane. Any other joins them, in a graph behind theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import meta_of
from farspan.call.modes import current_modes
from farspan.call.naming import PASS_THROUGH, READERS, SHOWS, name_of
from farspan.call.pytree.template import flatten, flatten_arguments, map_tensors, rebuild
from farspan.record.lanes.lane_tensor import LaneTensor, join_all, lane_tensors
from farspan.record.lanes.rules import RULES
from farspan.record.memory.parameter_copies import what_is_written
from farspan.record.ops.views import is_shared
from farspan.record.recorded_backward import record_backward
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from farspan.graph import Graph, Meta
    from farspan.record.recording import Recording

__all__ = ["Window"]

_BACKWARD = torch.autograd.backward


class Window:
    """The graphs of the lanes of one batch.

    Attributes:
        sizes: How many rows of the batch each lane has.
    """

    def __init__(self, recorder: Recording, sizes: Sequence[int]) -> None:
        self.recorder = recorder
        self.sizes = tuple(sizes)
        self.graphs: list[Graph] = []
        self._has_ended = False

    @property
    def is_open(self) -> bool:
        """Returns whether what the program does next can still be recorded in the lanes: none of them has run or has
        ended."""
        pending = self.recorder.pending
        return not self._has_ended and all(any(graph is each for each in pending) for graph in self.graphs)

    def record(self, lanes: Sequence[Any]) -> list[Any]:
        """Record each of `lanes`, functions without arguments, in the graph of its own; what they give."""
        recorder, results = self.recorder, list[Any]()
        if self.graphs:
            for number, lane in enumerate(lanes):
                with self.inside(number):
                    results.append(lane())
            return results
        recorder.next_graph()
        for lane in lanes:
            results.append(lane())
            self.graphs.append(recorder.current)
            recorder.next_graph()
        return results

    def can_use(self, tensors: Sequence[Any]) -> bool:
        """Returns whether what is recorded in the lanes next may use `tensors`: they are not recorded behind the
        lanes."""
        for item in tensors:
            call = item._value.call if type(item) is LazyTensor else None
            if call is not None and item._value.pending and call.graph.index >= self.graphs[0].index:
                return False
        return True

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Records in a lane what the body records."""
        recorder, graph = self.recorder, self.graphs[number]
        place = next(i for i, each in enumerate(recorder.pending) if each is graph)
        behind, recorder.current = recorder.current, graph
        del recorder.pending[place]
        try:
            yield
        finally:
            if recorder.current is graph:
                recorder.pending.insert(place, graph)
                recorder.current = behind
            elif behind.calls:  # the lanes have run meanwhile, for something was read
                recorder.pending.insert(0, behind)

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function that is given lane tensors: lane by lane, or on the whole."""
        if function in PASS_THROUGH and function not in SHOWS:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function is torch.Tensor.backward or function is _BACKWARD:
            roots = args[0] if args else kwargs["tensors"]
            given = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
            options = [kwargs.get(name) for name in ("retain_graph", "create_graph", "inputs")]
            listed = [
                [item] if item is None or isinstance(item, torch.Tensor) else list(item) for item in (roots, given)
            ]
            if len(args) <= 2 and self.backward(*listed, *options):
                return None
        elif function in READERS or function in SHOWS:
            args, kwargs = map_tensors((args, kwargs), lambda item: item.read() if type(item) is LaneTensor else item)
            return function(*args, **kwargs)
        elif self.is_open:
            rule = RULES.get(function)
            is_usable = rule is not None and self.can_use(flatten_arguments(args, kwargs)[1])
            found = rule(self, function, args, kwargs) if rule is not None and is_usable else None
            if found is not None:
                result = self._in_lanes(function, args, kwargs, *found)
                if result is not NotImplemented:
                    return result
        elif function is torch.Tensor.detach and args[0]._dim is None:  # a loss that is kept after its backward
            return LaneTensor.of(self, [lane.detach() for lane in args[0]._lanes], None)
        if function is torch.autograd.grad:
            for tensor in lane_tensors((args[1:], kwargs.get("inputs", ()))):
                tensor.check_unused("torch.autograd.grad")
        self._check_written(function, args, kwargs)
        join_all((args, kwargs))
        return function(*args, **kwargs)

    def _check_written(self, function: Any, args: Any, kwargs: Any) -> None:
        """Refuse to write into what other tensors share the memory of: joined, they would not see it."""
        for tensor in lane_tensors(what_is_written(function, args, kwargs)):
            if any(is_shared(lane) or lane._is_torn for lane in tensor._lanes):
                self.recorder.refuse(
                    f"{name_of(function)} writes into a tensor of the whole batch that has views",
                    hint="write out of place (y = y + 1), or leave out micro_batches= of farspan.distribute",
                )

    def _in_lanes(self, function: Any, args: Any, kwargs: Any, calls: Sequence[Any], is_sum: bool) -> Any:
        """Record a function lane by lane; NotImplemented if its results are not what they are for the whole batch.

        Args:
            function: Which.
            args: What the program has given, of the whole batch.
            kwargs: And by name.
            calls: For each lane a function that calls it with what it gets.
            is_sum: Whether what it gives for the batch is the sum of what it gives for the lanes.
        """
        whole = None if is_sum else self._whole_metas(function, args, kwargs)
        if whole is None and not is_sum:
            return NotImplemented
        results: list[Any] = []
        for number, call in enumerate(calls):
            with self.inside(number):
                results.append(call())
        return self.gathered(results, whole)

    def _whole_metas(self, function: Any, args: Any, kwargs: Any) -> Sequence[Meta] | None:
        """Returns the metadata of what a function gives for the whole batch."""
        template, tensors = flatten_arguments(args, kwargs)
        metas = [item._value.meta if isinstance(item, LazyTensor) else meta_of(item) for item in tensors]
        entry: Any = self.recorder.predict(function, template, metas, current_modes())
        if not entry.metas or entry.is_random or entry.mutated or not entry.has_tensors_only:
            return None
        return entry.metas[: entry.num_results]

    def gathered(self, results: Sequence[Any], whole: Sequence[Meta] | None) -> Any:
        """Returns one object with the tensors of the batch, from those that the lanes have given.

        Args:
            results: Of each lane.
            whole: The metadata of the batch's tensors; None where they are the sums of the lanes'.

        Returns:
            NotImplemented where the lanes' results cannot be those of parts of a batch.
        """
        flat = [flatten(result) for result in results]
        if any(template != flat[0][0] for template, _ in flat) or any(
            type(item) is not LazyTensor for _, tensors in flat for item in tensors
        ):
            return NotImplemented
        columns = [*zip(*(tensors for _, tensors in flat), strict=True)]
        if whole is None:
            return rebuild(flat[0][0], [LaneTensor.of(self, column, None) for column in columns])
        dims = [dim_of_batch(column, meta.shape) for column, meta in zip(columns, whole, strict=True)]
        if len(whole) != len(columns) or any(dim is None for dim in dims):
            return NotImplemented
        return rebuild(
            flat[0][0], [LaneTensor.of(self, column, dim) for column, dim in zip(columns, dims, strict=True)]
        )

    def backward(self, roots: Any, given: Any, retain_graph: Any, create_graph: Any, inputs: Any) -> bool:
        """Record the backward of a loss lane by lane, if it is the sum of the lanes' losses; whether it is."""
        given = [*given, *([None] * (len(roots) - len(given)))]
        recorder = self.recorder
        is_plain = create_graph or inputs is not None or recorder.hooks.are_there or recorder.runs_each_backward
        if is_plain or recorder.has_hooked_calls or not self.is_open or self._share_history():
            return False
        if not all(type(root) is LaneTensor and root._window is self and root._dim is None for root in roots):
            return False
        for number in range(len(self.sizes)):
            with self.inside(number):
                record_backward(recorder, [root._lanes[number] for root in roots], given, retain_graph)
                recorder.num_pending_backwards += 1
        self._has_ended = True
        recorder.next_graph()
        return True

    def _share_history(self) -> bool:
        """Returns whether gradient flows from several lanes to something that was made before: one backward goes there
        once."""
        seen: set[int] = set()
        for graph in self.graphs:
            own: set[int] = set()
            todo = [graph]
            while todo:
                for value in todo.pop().sources:
                    if not value.meta.requires_grad or value.is_gradient or value.name:
                        continue
                    if value.call is None:
                        if value.data is not None and value.data.grad_fn is not None:
                            return True
                        continue
                    before: Any = value.call.graph
                    if not any(before is each for each in self.recorder.pending):
                        return True  # it has run: nobody knows any more what it was made of
                    if id(before) not in own:
                        own.add(id(before))
                        todo.append(before)
            if not seen.isdisjoint(own):
                return True
            seen |= own
        return False


def dim_of_batch(lanes: Sequence[Any], whole: Sequence[int]) -> int | None:
    """Along which dim tensors of lanes are parts of a tensor of shape `whole`; None if along none, or not certainly."""
    shapes = [tuple(lane.shape) for lane in lanes]
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    found: list[int] = []
    for dim, size in enumerate(whole):
        rest = [shape[:dim] + shape[dim + 1 :] == (*whole[:dim], *whole[dim + 1 :]) for shape in shapes]
        if all(rest) and sum(shape[dim] for shape in shapes) == size and all(shape[dim] for shape in shapes):
            found.append(dim)
    return found[0] if len(found) == 1 else None
