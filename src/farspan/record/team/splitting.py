"""Records the operations of split stages: part by part where that gives the same, else on the whole.

    q = F.linear(x, W)          column    q0 = F.linear(x, W[:h])          q1 = F.linear(x, W[h:])
    q.view(b, t, heads, -1)               q0.view(b, t, heads / 2, -1)     q1.view(b, t, heads / 2, -1)
    F.linear(y, V)              row       p0 = F.linear(y0, V[:, :h])      p1 = F.linear(y1, V[:, h:])
                                          p0 + p1                          p0 + p1

Nothing is found by names. A product with a matrix is split by columns where each member has x, by rows where each has
a part of it. Where a part is needed as a whole, it is gathered, which is right, and what has split it stays whole from
then on: so what is left is what people split by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.function_call import FunctionCall
from farspan.call.infer.entry import Recent, Unknown, meta_of
from farspan.call.leaf import LeakError, WholeError
from farspan.call.modes import current_modes
from farspan.call.naming import PASS_THROUGH, READERS, SHOWS, name_of
from farspan.call.pytree.template import flatten, flatten_arguments, map_tensors, rebuild
from farspan.record.ops.explicit_placement import PLAIN_TO
from farspan.record.ops.overrides import HANDLERS
from farspan.record.team.apart import Operand, Trial, tried
from farspan.record.team.matrices import Matrices
from farspan.record.team.sizes import TAKES_SIZES, sections_asked_for, sizes_of_part
from farspan.record.team.team_tensor import SplitStage, TeamTensor, joined, used
from farspan.record.team.wholes import Writes, on_whole
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from farspan.call.modes import Modes
    from farspan.graph import Meta, Template, Value
    from farspan.record.recording import Recording

__all__ = ["Splitting"]

_LIKE_ANOTHER: dict[Any, Any] = {
    torch.Tensor.view_as: torch.Tensor.view,
    torch.Tensor.reshape_as: torch.Tensor.reshape,
    torch.Tensor.expand_as: torch.Tensor.expand,
}
_T: Any = torch.Tensor
_WRITES = frozenset([_T.data.__set__, _T.apply_, _T.map_, _T.map2_])


class Splitting:
    """The split stages of one rank's program."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.takes_operations: Any = recorder
        """Takes what is recorded: the recorder itself, while no stage is split."""
        self.stages: dict[int, SplitStage] = {}
        """The split stages, by the id of the module that is placed on each."""
        self.opened: set[int] = set()
        """Ids of modules that are called part by part for no other reason."""
        self.current: SplitStage | None = None
        """The stage of the module that is running."""
        self.is_inside = False
        """Whether a module runs that the program has called."""
        self.matrices = Matrices(recorder, self, self._record, self._everywhere)
        self._ways = Recent()
        """How operations are done part by part, or why not, by what they are and are given."""
        self._copies: dict[Value, TeamTensor] = {}
        """What each member has of values from elsewhere, in the current graph."""

    def enter(self, module_id: int) -> SplitStage | None:
        """Let operations be those of a module; returns the stage of the one around it."""
        around = self.current
        self.current = self.stages.get(module_id, around)
        return around

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Records whole operations in the body."""
        before, self.takes_operations = self.takes_operations, self.recorder
        try:
            yield
        finally:
            self.takes_operations = before

    def end_graph(self) -> None:
        """The micro-batch that has been recorded ends."""
        self._copies.clear()
        self.matrices.end_graph()

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function of which an argument is a team's tensor, or that runs in a module of a split
        stage."""
        if not (self.recorder.is_recording or self.recorder.is_in_optimizer):
            raise LeakError("a module uses a tensor of another module that it is not given.")
        if function in PASS_THROUGH and function not in SHOWS:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function in _LIKE_ANOTHER:
            other = kwargs.get("other") if len(args) < 2 else args[1]
            function, args, kwargs = _LIKE_ANOTHER[function], (args[0], other.shape), {}  # type: ignore[union-attr]
            if type(args[0]) is torch.Tensor and id(args[0]) not in self.recorder.placed:
                return function(*args)
        result = self.matrices.product(function, args, kwargs, self.current)
        if result is not NotImplemented:
            return result
        template, tensors = flatten_arguments(args, kwargs)
        team = next((item for item in tensors if type(item) is TeamTensor), None)
        if team is None:
            return self.recorder.dispatch(function, args, kwargs)
        if function is torch.autograd.grad:
            outputs = [joined(item) for item in (args[0] if isinstance(args[0], (list, tuple)) else [args[0]])]
            return self.recorder.dispatch(function, (outputs, *args[1:]), kwargs)
        if function is torch.Tensor.detach:
            parts = [self.recorder.dispatch(function, (part,), {}) for part in used(team)._parts]
            return TeamTensor.of(self, team._split, parts, team._dim, team._weights, sections=team._sections)
        if kwargs.get("out") is not None:
            raise _refusal(function)
        if _has_rules(function, args, kwargs):
            return self._part_by_part(function, args, kwargs, template, tensors, team)
        if type(args[0]) is TeamTensor and _writes_apart(function):
            raise _refusal(function)
        return self._on_whole(function, args, kwargs, name_of(function))

    def join(self, item: Any, reason: str) -> Any:
        """Returns the tensor that `item` is as a whole; what has split it stays whole from now on."""
        if type(item) is not TeamTensor:
            return item
        for name in used(item)._weights:
            self.matrices.keep_whole(name, reason)
        return item.join()

    def left(self, result: Any) -> Any:
        """Returns what the program gets of a module that it has called itself: its tensors as wholes, but for those in
        objects inside (caches)."""
        if type(result) is TeamTensor:
            if result._dim is not None or not result._is_used:
                whole = self.join(result, "the program gets what it gives")
                return self.gathered(result) if whole._is_torn else whole
            return self._record(torch.clone, (result.join(),), result._split.home)  # with the whole gradient
        if isinstance(result, tuple):
            parts = [self.left(item) for item in result]
            if any(part is not item for part, item in zip(parts, result, strict=True)):
                return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        elif isinstance(result, (list, dict)):
            for key, item in list(result.items() if isinstance(result, dict) else enumerate(result)):
                part = self.left(item)
                if part is not item:
                    result[key] = part
        return result

    def gathered(self, tensor: TeamTensor) -> LazyTensor:
        """Returns the parts behind each other, where what is not split runs."""
        assert tensor._dim is not None
        dim, home, parts = tensor._dim, tensor._split.home, list(tensor._parts)
        if tensor._sections == 1:
            return self._record(torch.cat, (parts, dim), home)
        apart = [self._record(torch.unflatten, (part, dim, (tensor._sections, -1)), home) for part in parts]
        return self._record(torch.flatten, (self._record(torch.cat, (apart, dim + 1), home), dim, dim + 1), home)

    def _everywhere(self, x: Any, split: SplitStage) -> TeamTensor:
        """Returns `x` as each member has it: a copy of its own, whose gradient comes back once."""
        if type(x) is TeamTensor and x._split == split and x._dim is None:
            return x
        whole = x.join() if type(x) is TeamTensor else x
        value: Any = self.recorder.argument(whole)
        found = self._copies.get(value)
        if found is None or found._split != split:
            parts = [self._record(torch.clone, (whole,), stage) for stage in split.members]
            found = self._copies[value] = TeamTensor.of(self, split, parts, None)
        return found

    def _part_by_part(
        self, function: Any, args: Any, kwargs: Any, template: Template, tensors: Sequence[Any], team: TeamTensor
    ) -> Any:
        split, num_parts, recorder = team._split, len(team._split.members), self.recorder
        kinds: list[Any] = []
        for item in tensors:
            if type(item) is TeamTensor:
                numbers = item._value.meta.number, item._parts[0]._value.meta.number
                kinds.append((*numbers, item._dim, item._sections, item._split == split))
            elif type(item) is LazyTensor:
                kinds.append((item._value.meta.number, type(item._value.call).__name__))
            else:
                placed = recorder.placed.get(id(item))
                kinds.append((meta_of(item).number, -1 if placed is None else placed.is_parameter))
        modes = current_modes()
        key = (function, template, tuple(kinds), modes, num_parts)
        way = self._ways.get(key)
        part_template = template
        if function in TAKES_SIZES and tensors[0] is team and team._dim is not None:
            sizes = sizes_of_part(function, args, kwargs, team.shape, team._dim, num_parts, team._sections)
            part_template = None if sizes is None else flatten_arguments((args[0], *sizes), {})[0]
        if way is None:
            way = self._ways[key] = self._found(function, template, part_template, tensors, split, modes)
        if isinstance(way, str):
            falls = tensors[0] is team and self._falls_into(function, args, kwargs, team)
            return self._on_whole(function, args, kwargs, None if falls else way)
        weights = frozenset[str]()
        columns: list[Sequence[Any]] = []
        for item, dim in zip(tensors, way.dims, strict=True):
            if type(item) is TeamTensor:
                weights |= used(item)._weights
            columns.append(self._operand(item, dim, split))
        results: list[Any] = []
        for member, stage in enumerate(split.members):
            given = [column[member] for column in columns]
            own_args, own_kwargs = rebuild(part_template, given)
            results.append(self._record(function, own_args, stage, own_kwargs))
        found = [flatten(result) for result in results]
        made = [*zip(*(parts for _, parts in found), strict=True)]
        axes, metas = way.results or ((None, 1),) * len(made), way.metas or (None,) * len(made)
        known = {id(column[0]): item for column, item in zip(columns, tensors, strict=True)}
        whole = [
            known[id(parts[0])]
            if id(parts[0]) in known
            else TeamTensor.of(self, split, parts, dim, weights, meta, sections)
            for parts, (dim, sections), meta in zip(made, axes, metas, strict=False)
        ]
        return rebuild(found[0][0], whole)

    def _falls_into(self, function: Any, args: Any, kwargs: Any, team: TeamTensor) -> bool:
        """Returns whether an operation takes a product apart into equal sections (a fused q, k and v); from the next
        call on the members have a share of each."""
        if team._dim is None or team._sections > 1 or team._dim != team.dim() - 1 or len(team._weights) != 1:
            return False
        number = sections_asked_for(function, args, kwargs, team.shape, team._dim)
        return self.matrices.let_fall(next(iter(team._weights)), number, len(team._parts))

    def _found(
        self,
        function: Any,
        template: Template,
        part_template: Template,
        tensors: Sequence[Any],
        split: SplitStage,
        modes: Modes,
    ) -> Trial | str:
        """Returns how an operation is done part by part; why not, if it is not."""
        recorder = self.recorder
        if any(type(item) is TeamTensor and item._split != split for item in tensors):
            return "two teams"
        metas = [item._value.meta if isinstance(item, LazyTensor) else self._meta_of(item) for item in tensors]
        entry = recorder.predict(function, template, metas, modes)
        if isinstance(entry, Unknown) or not entry.has_tensors_only or not entry.metas:
            return name_of(function)
        kind = Writes if any(type(tensors[number]) is TeamTensor for number in entry.mutated) else str
        if entry.is_random:
            return kind(f"{name_of(function)} draws random numbers")
        copies = set(map(id, self._copies.values()))
        if any(id(tensors[number]) in copies for number in entry.mutated):
            raise _refusal(function)
        if any(type(tensors[number]) is not TeamTensor for number in entry.mutated):
            return kind(name_of(function))
        if any(shared >= 0 and type(tensors[shared]) is not TeamTensor for shared in entry.shares):
            return kind(f"{name_of(function)} gives a view of what the ranks have copies of")
        placed = [recorder.placed.get(id(item)) for item in tensors]
        outside = [
            item for item, known in zip(tensors, placed, strict=True) if type(item) is torch.Tensor and not known
        ]
        if any(item.requires_grad for item in outside):
            return kind(f"{name_of(function)} with a tensor from outside that gets gradient")
        if any(item is not None and item.is_parameter and len(item.meta.shape) > 1 for item in placed):
            return kind(f"{name_of(function)} with a parameter")
        operands = [
            Operand(
                whole=meta,
                dim=item._dim if type(item) is TeamTensor else None,
                part=item._parts[0]._value.meta if type(item) is TeamTensor else meta,
                data=item if known is None and not isinstance(item, LazyTensor) else None,
                is_fixed=not isinstance(item, LazyTensor),
                sections=item._sections if type(item) is TeamTensor else 1,
            )
            for item, meta, known in zip(tensors, metas, placed, strict=True)
        ]
        if all(operand.dim is None for operand in operands):
            return Trial((None,) * len(tensors), ())
        if part_template is None:
            return kind(name_of(function))
        for dims in _candidates(operands):
            trial = recorder.cache.aside(
                self._aside, function, template, part_template, operands, dims, entry.mutated, len(split.members)
            )
            if trial is not None:
                return replace(trial, metas=entry.metas)
        return kind(name_of(function))

    def _aside(self, *args: Any) -> Trial | None:
        self.recorder.is_recording = False
        try:
            return tried(*args)
        finally:
            self.recorder.is_recording = True

    def _meta_of(self, item: Any) -> Meta:
        placed = self.recorder.placed.get(id(item))
        return meta_of(item) if placed is None else placed.meta

    def _operand(self, item: Any, dim: int | None, split: SplitStage) -> Sequence[Any]:
        """Returns what each member takes of an operand."""
        num_parts = len(split.members)
        if type(item) is TeamTensor and item._dim not in (None, dim):
            item = self.join(item, "others of an operation are split otherwise")
        if type(item) is TeamTensor and item._dim == dim:
            return item._parts
        placed = self.recorder.placed.get(id(item))
        if dim is None:
            return self._everywhere(item, split)._parts if type(item) is LazyTensor else [item] * num_parts
        if placed is not None and placed.is_parameter:
            return [self.matrices.slice_of(placed, dim, member, num_parts) for member in range(num_parts)]
        size = item.shape[dim] // num_parts
        wholes = self._everywhere(item, split)._parts if isinstance(item, LazyTensor) else [item] * num_parts
        places = [(dim, member * size, size) for member in range(num_parts)]
        if not isinstance(item, LazyTensor) and placed is None:
            return [torch.narrow(one, *place) for one, place in zip(wholes, places, strict=True)]
        return [
            self._record(torch.narrow, (one, *place), stage)
            for one, place, stage in zip(wholes, places, split.members, strict=True)
        ]

    def _on_whole(self, function: Any, args: Any, kwargs: Any, reason: str | None) -> Any:
        """Do it once, on whole tensors; None: what has split them is split on, in another way."""
        if function in READERS or function in SHOWS:
            args, kwargs = map_tensors((args, kwargs), lambda item: item.read() if type(item) is TeamTensor else item)
            return function(*args, **kwargs)
        return on_whole(self, self._record, function, args, kwargs, reason)

    def _record(self, function: Any, args: tuple[Any, ...], stage: int, kwargs: dict[str, Any] | None = None) -> Any:
        self.recorder.number = -1  # it draws nothing
        return self.recorder.record_call(function, args, kwargs or {}, stage)


def _has_rules(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a function is recorded like any other, so that it may be recorded for each part."""
    if function is PLAIN_TO:
        given = (*args[1:], *kwargs.values())
        return all(isinstance(item, (torch.dtype, bool, torch.Tensor, torch.memory_format)) for item in given)
    if type(function) is FunctionCall or function in HANDLERS or function.__name__.startswith("_foreach_"):
        return False
    return not (getattr(function, "__module__", None) or "").startswith("torch.distributed")


def _writes_apart(function: Any) -> bool:
    """Returns whether a function writes into its first argument in a way of its own."""
    return function in _WRITES or (name_of(function).startswith("_foreach_") and name_of(function).endswith("_"))


def _refusal(function: Any) -> WholeError:
    """Returns the error of what can be done by a module that is called as one unit."""
    return WholeError(
        f"{name_of(function)} writes into a tensor of which the ranks of a stage have parts.",
        why="it cannot be done part by part, and the parts would not see it.",
        hint="write out of place (y = y + 1), or leave out tensor_parallel= of farspan.distribute",
    )


def _candidates(operands: Sequence[Operand]) -> list[tuple[int | None, ...]]:
    """Returns ways to cut the operands, the best first, once each.

    What lies beside the split dimension of another operand is cut along it, or is not; and where several operands are
    split, those that are split otherwise may have to be gathered.
    """
    found: dict[tuple[int | None, ...], None] = {}
    own = tuple([operand.dim for operand in operands])
    split = [operand for operand in operands if operand.dim is not None]
    for is_gathering in (False, True) if len(split) > 1 else (False,):
        for anchor in split:
            beside = [_beside(operand, anchor) for operand in operands]
            kept = [dim if not is_gathering or dim == near else None for dim, near in zip(own, beside, strict=True)]
            kept = [anchor.dim if operand is anchor else dim for operand, dim in zip(operands, kept, strict=True)]
            cut = [near if dim is None else dim for dim, near in zip(kept, beside, strict=True)]
            found.update(dict.fromkeys([tuple(cut), tuple(kept)]))
    return list(found)


def _beside(operand: Operand, anchor: Operand) -> int | None:
    """Returns the dimension of an operand that lies beside the one along which `anchor` is split, if it is as long.

    What modules pass on from one to the next lies there with its last dimension: it is not cut, for then all that comes
    after would be.
    """
    assert anchor.dim is not None
    behind = len(anchor.whole.shape) - anchor.dim
    dim = len(operand.whole.shape) - behind
    if dim < 0 or operand.whole.shape[dim] != anchor.whole.shape[anchor.dim]:
        return None
    return dim if behind > 1 or operand.is_fixed or operand.dim == dim else None
