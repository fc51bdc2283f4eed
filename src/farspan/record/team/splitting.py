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

from farspan.call.infer.entry import Recent, Unknown, meta_of
from farspan.call.leaf import LeakError
from farspan.call.modes import current_modes
from farspan.call.naming import PASS_THROUGH, READERS, SHOWS, name_of
from farspan.call.pytree.template import flatten, flatten_arguments, map_tensors, rebuild
from farspan.record.team.kinds import HAS_LIMIT, LIKE_ANOTHER, has_rules, is_matrix, refusal, writes_apart
from farspan.record.team.matrices import Matrices
from farspan.record.team.parameter_views import CHANGES_VIEW, ParameterView
from farspan.record.team.parts.apart import Operand, Trial, has_indices, tried
from farspan.record.team.parts.cuts import candidates
from farspan.record.team.parts.repeated import Repeated
from farspan.record.team.parts.shares import extent_of, share_of
from farspan.record.team.parts.sizes import PICKS, sections_asked_for, templates_of_parts
from farspan.record.team.rules import RULES
from farspan.record.team.rules.channels.batch_norm import batch_norm
from farspan.record.team.stages.crossings import Crossings
from farspan.record.team.stages.inside import Inside
from farspan.record.team.team_tensor import SplitStage, TeamTensor, joined, settled, used
from farspan.record.team.wholes import Reads, Views, Writes, on_whole
from farspan.record.tensor import LazyTensor
from farspan.record.unrecorded import unrecorded
from farspan.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from farspan.call.leaf import Leaf
    from farspan.call.modes import Modes
    from farspan.graph import Meta, Template
    from farspan.record.recording import Recording

__all__ = ["Splitting"]

_DETACHES = frozenset([torch.Tensor.detach, torch.detach, torch.Tensor.detach_, torch.detach_])
_STAYS = _DETACHES | {torch.autograd.grad}


class Splitting(Inside):
    """The split stages of one rank's program."""

    def __init__(self, recorder: Recording) -> None:
        super().__init__(recorder)
        self.takes_operations: Any = recorder
        """Takes what is recorded: the recorder itself, while no stage is split."""
        self.opened: set[int] = set()
        """Ids of modules that are called part by part for no other reason."""
        self.crossings = Crossings(self)
        self.matrices = Matrices(recorder, self, self.record, self.crossings.everywhere)
        self._has_settled = False
        """Whether there are tensors of which the whole is used in the place of the parts."""
        self._ways = Recent()
        """How operations are done part by part, or why not, by what they are and are given."""

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
        self.crossings.clear()
        self.matrices.end_graph()

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch function of which an argument is a team's tensor, or that runs in a module of a split
        stage."""
        if not (self.recorder.is_recording or self.recorder.is_in_optimizer):
            raise LeakError("a module uses a tensor of another module that it is not given.")
        if function in PASS_THROUGH and function not in SHOWS:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if self._has_settled:
            args, kwargs = map_tensors((args, kwargs), settled)
        if function in LIKE_ANOTHER:
            other = kwargs.get("other") if len(args) < 2 else args[1]
            function, args, kwargs = LIKE_ANOTHER[function], (args[0], other.shape), {}  # type: ignore[union-attr]
            if type(args[0]) is torch.Tensor and id(args[0]) not in self.recorder.placed:
                return function(*args)
        given = args, kwargs
        if self.crossings.are_possible and function not in _STAYS:
            brought = self.crossings.brought(function, args, kwargs)
            if brought is None:
                return self._on_whole(function, args, kwargs, "what it is used with lies on another stage")
            args, kwargs = brought
        result = self.matrices.product(function, args, kwargs, self.current)
        if result is not NotImplemented:
            return result
        rule = RULES.get(function)
        if rule is not None:
            result = rule(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if function in CHANGES_VIEW and self.current is not None:
            result = self.matrices.view(function, args, kwargs)
            if result is not NotImplemented:
                return result
        template, tensors = flatten_arguments(args, kwargs)
        team = next((item for item in tensors if type(item) is TeamTensor), None)
        if team is None:
            return self.dispatch_whole(function, args, kwargs)
        if function is torch.autograd.grad:
            outputs = [joined(item) for item in (args[0] if isinstance(args[0], (list, tuple)) else [args[0]])]
            return self.recorder.dispatch(function, (outputs, *args[1:]), kwargs)
        if function in _DETACHES:
            parts = [self.recorder.dispatch(torch.Tensor.detach, (part,), {}) for part in used(team)._parts]
            cut = TeamTensor.of(self, team._split, parts, team._dim, team._weights, sections=team._sections)
            if function in (torch.Tensor.detach, torch.detach):
                return cut
            vars(team).update(_value=cut._value, _parts=cut._parts)
            return team
        if kwargs.get("out") is not None:
            raise refusal(function)
        if has_rules(function, args, kwargs):
            return self._part_by_part(function, args, kwargs, template, tensors, team)
        if type(args[0]) is TeamTensor and writes_apart(function):
            raise refusal(function)
        return self._on_whole(function, *given, name_of(function))

    def dispatch_whole(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a function of tensors that are no team's."""
        if self.current is None or not self.crossings.are_possible:
            return self.recorder.dispatch(function, args, kwargs)
        with self.crossings.placed(flatten_arguments(args, kwargs)[1]):
            return self.recorder.dispatch(function, args, kwargs)

    def call_leaf(self, leaf: Leaf, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a module that is one unit; of one that takes a team's tensor part by part, if there is a
        rule."""
        result = batch_norm(self, leaf, args, kwargs)
        return self.recorder.call_leaf(leaf, args, kwargs) if result is NotImplemented else result

    def join(self, item: Any, reason: str) -> Any:
        """Returns the tensor that `item` is as a whole; what has split it stays whole from now on, unless words do that
        are only looked at."""
        if type(item) is not TeamTensor:
            return self.matrices.owned.whole_gradient(item)
        is_looked_at = type(reason) is Reads or not item.requires_grad
        if not (is_looked_at and self.matrices.are_vocabularies(item._weights)):
            for name in item._weights:
                self.matrices.keep_whole(name, reason)
        return used(item).join()

    def left(self, result: Any) -> Any:
        """Returns what the program gets of a module that it has called itself: its tensors as wholes, but for those in
        objects inside (caches)."""
        if type(result) is TeamTensor:
            if result.requires_grad and self._may_be_words(result):
                return result  # for a loss; whatever else reads it gets it gathered
            if result._dim is not None or not result._is_used:
                whole = self.join(result, "the program gets what it gives")
                return self.gathered(result) if whole._is_torn else whole
            return self.record(torch.clone, (result.join(),), result._split.home)  # with the whole gradient
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

    def settles(self) -> bool:
        """Returns whether the whole of a tensor may be used in the place of its parts from now on."""
        self._has_settled |= not self.is_inside
        return not self.is_inside

    def _may_be_words(self, item: TeamTensor) -> bool:
        is_last = item._dim == item.dim() - 1 and item._sections == 1
        return is_last and self.matrices.are_vocabularies(item._weights) and not self.recorder.batches.is_inside

    def gathered(self, tensor: TeamTensor) -> LazyTensor:
        """Returns the parts behind each other, where what is not split runs."""
        assert tensor._dim is not None
        dim, home, parts = tensor._dim, tensor._split.home, list(tensor._parts)
        if tensor._sections == 1:
            return self.record(torch.cat, (parts, dim), home)
        apart = [self.record(torch.unflatten, (part, dim, (tensor._sections, -1)), home) for part in parts]
        return self.record(torch.flatten, (self.record(torch.cat, (apart, dim + 1), home), dim, dim + 1), home)

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
        found = self._ways.get(key)
        if found is None:
            dim = team._dim if tensors[0] is team else None
            part_templates = templates_of_parts(
                function, args, kwargs, template, team.shape, dim, num_parts, team._sections
            )
            way = self._found(function, template, part_templates, tensors, split, modes)
            found = self._ways[key] = way, [Repeated(function, each, modes) for each in part_templates]
        way, repeated = found
        if type(way) in (str, Views) and any(type(item) is TeamTensor and item.is_by_positions for item in tensors):
            self.matrices.gathered_for.add(name_of(function))
            if type(way) is str:  # no write into what is put together is to be seen in the parts
                return self.dispatch(function, *map_tensors((args, kwargs), self._with_all_positions))
        if isinstance(way, str):
            falls = tensors[0] is team and self._falls_into(function, args, kwargs, team)
            return self._on_whole(function, args, kwargs, None if falls else way)
        weights = frozenset[str]()
        columns: list[Sequence[Any]] = []
        sections = max(item._sections for item in tensors if type(item) is TeamTensor)
        for item, dim in zip(tensors, way.dims, strict=True):
            if type(item) is TeamTensor:
                weights |= used(item)._weights
            columns.append(self.operand(item, dim, split, sections))
        results: list[Any] = []
        for member, stage in enumerate(split.members):
            results.append(repeated[member].record(recorder, [column[member] for column in columns], stage))
        is_one = set(map(type, results)) == {LazyTensor}
        described = [(None, [result]) if is_one else flatten(result) for result in results]
        made = [*zip(*(parts for _, parts in described), strict=True)]
        axes, metas = way.results or ((None, 1),) * len(made), way.metas or (None,) * len(made)
        known = {id(column[0]): item for column, item in zip(columns, tensors, strict=True)}
        whole = [
            known[id(parts[0])]
            if id(parts[0]) in known
            else TeamTensor.of(self, split, parts, dim, weights, meta, sections)
            for parts, (dim, sections), meta in zip(made, axes, metas, strict=False)
        ]
        return whole[0] if is_one else rebuild(described[0][0], whole)

    def _falls_into(self, function: Any, args: Any, kwargs: Any, team: TeamTensor) -> bool:
        """Returns whether an operation takes a product apart into equal sections (a fused q, k and v); from the next
        call on the members have a share of each."""
        if team._dim is None or team._sections > 1 or len(team._weights) != 1:
            return False
        has_channels = self.matrices.have_channels(team._weights)
        if team._dim != team.dim() - 1 and function not in PICKS and not has_channels:
            return False
        number = sections_asked_for(function, args, kwargs, team.shape, team._dim)
        return self.matrices.let_fall(next(iter(team._weights)), number, len(team._parts))

    def _found(
        self,
        function: Any,
        template: Template,
        part_templates: Sequence[Template],
        tensors: Sequence[Any],
        split: SplitStage,
        modes: Modes,
    ) -> Trial | str:
        """Returns how an operation is done part by part; why not, if it is not."""
        recorder = self.recorder
        if any(type(item) is TeamTensor and item._split != split for item in tensors):
            return "two teams"
        metas = [self.meta_of(item) for item in tensors]
        entry = recorder.predict(function, template, metas, modes)
        if isinstance(entry, Unknown) or not entry.has_tensors_only or not entry.metas:
            return name_of(function)
        kind = Views if any(number >= 0 for number in (*entry.shares, *entry.same_as)) else str
        kind = Writes if any(type(tensors[number]) is TeamTensor for number in entry.mutated) else kind
        if not entry.mutated and not entry.requires_grad:
            kind = Reads
        if entry.is_random:
            return kind(f"{name_of(function)} draws random numbers")
        if function in HAS_LIMIT:
            return kind(name_of(function))
        if any(self.crossings.has_copy(tensors[number]) for number in entry.mutated):
            raise refusal(function)
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
        if any(item is not None and item.is_parameter and is_matrix(item.meta) for item in placed):
            return kind(f"{name_of(function)} with a parameter")
        sections = max(item._sections for item in tensors if type(item) is TeamTensor)
        operands = [
            Operand(
                whole=meta,
                dim=item._dim if type(item) is TeamTensor else None,
                parts=tuple([part._value.meta for part in item._parts])
                if type(item) is TeamTensor
                else (meta,) * len(split.members),
                data=item if known is None and not isinstance(item, LazyTensor) and has_indices(meta) else None,
                is_fixed=not isinstance(item, LazyTensor),
                sections=item._sections if type(item) is TeamTensor and item._dim is not None else sections,
            )
            for item, meta, known in zip(tensors, metas, placed, strict=True)
        ]
        if all(operand.dim is None for operand in operands):
            return Trial((None,) * len(tensors), ())
        if not part_templates or not all(meta.shape for meta in entry.metas):  # one number is no part
            return kind(name_of(function))
        for dims in candidates(operands):
            trial = recorder.cache.aside(
                self._aside, function, template, part_templates, operands, dims, entry.mutated, len(split.members)
            )
            if trial is not None:
                return replace(trial, metas=entry.metas)
        return kind(name_of(function))

    def _aside(self, *args: Any) -> Trial | None:
        with unrecorded(self.recorder):
            return tried(*args)

    def meta_of(self, item: Any) -> Meta:
        """Returns the metadata of a tensor: of a team's those of the whole."""
        if isinstance(item, LazyTensor):
            return item._value.meta
        placed = self.recorder.placed.get(id(item))
        return meta_of(item) if placed is None else placed.meta

    def operand(self, item: Any, dim: int | None, split: SplitStage, sections: int) -> Sequence[Any]:
        """Returns what each member takes of an operand."""
        num_parts = len(split.members)
        if type(item) is TeamTensor and item._dim not in (None, dim):
            item = self._with_all_positions(item)
            item = item if item._dim is None else self.join(item, "others of an operation are split otherwise")
        if type(item) is TeamTensor and item._dim == dim:
            return item._parts
        placed = self.recorder.placed.get(id(item))
        if dim is None:
            return self.crossings.everywhere(item, split)._parts if type(item) is LazyTensor else [item] * num_parts
        if placed is not None and placed.is_parameter:
            view = ParameterView(placed, 0, placed.meta.shape[0])
            return [self.matrices.share_of(view, dim, member, split, sections) for member in range(num_parts)]
        if not isinstance(item, LazyTensor) and placed is None:
            return [share_of(item, dim, sections, member, num_parts) for member in range(num_parts)]
        wholes = self.crossings.everywhere(item, split)._parts if isinstance(item, LazyTensor) else [item] * num_parts
        return [
            self.record(torch.narrow, (one, dim, *extent_of(item.shape[dim], member, num_parts)), stage)
            if sections == 1
            else self.record(share_of, (one, dim, sections, member, num_parts), stage)
            for member, (one, stage) in enumerate(zip(wholes, split.members, strict=True))
        ]

    def _with_all_positions(self, item: Any) -> Any:
        """Returns what each member has as a whole, if it is a tensor of which each has some positions."""
        is_apart = type(item) is TeamTensor and item.is_by_positions
        return self.crossings.everywhere(item, item._split) if is_apart else item

    def _on_whole(self, function: Any, args: Any, kwargs: Any, reason: str | None) -> Any:
        """Do it once, on whole tensors; None: what has split them is split on, in another way."""
        if function in READERS or function in SHOWS:
            args, kwargs = map_tensors((args, kwargs), lambda item: item.read() if type(item) is TeamTensor else item)
            return function(*args, **kwargs)
        return on_whole(self, self.record, function, args, kwargs, reason)

    def record(self, function: Any, args: tuple[Any, ...], stage: int, kwargs: dict[str, Any] | None = None) -> Any:
        self.recorder.number = -1  # it draws nothing
        return self.recorder.record_call(function, args, kwargs or {}, stage)
