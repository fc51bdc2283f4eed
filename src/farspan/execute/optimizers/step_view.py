"""Shows an optimizer's step all parameters, gradients and state, of which this rank has a part.

Every rank runs the step's Python with every parameter. A tensor in a step is one of three kinds:

    replicated    every rank has it and computes with it            step counts, learning rates, broadcast values
    own           this rank alone has it: made of its parameters    computed at once, by torch itself
    elsewhere     another rank has it: a recorded tensor            its metadata is foreseen, nothing is computed

    p.grad.norm()  rank 0: own        rank 1: elsewhere
    torch.stack(all norms)            of several ranks: broadcast first, the result is replicated
    if norm > 1:                      what is read is broadcast first

So what a step reads is what it reads in one process, and an optimizer that reads one parameter at a time runs
without a word between the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from farspan.call.infer.entry import Unknown, intern, meta_of
from farspan.call.leaf import Placed
from farspan.call.modes import current_modes
from farspan.call.naming import name_of
from farspan.call.pytree.template import flatten_arguments, map_tensors, rebuild
from farspan.comm.tensor_bytes import sparse_tensor
from farspan.execute.agreement.broadcast import broadcast_tensors
from farspan.execute.optimizers.functions import (
    ASKS,
    COMPUTES,
    INDEXES,
    LIKE,
    LISTS,
    READS,
    WRITES,
    has_mask,
    kind_of,
    kind_of_call,
    over_lists,
    shape_of,
    shape_only,
    small_tensor,
    sparse_sizes,
    writes_by_name,
)
from farspan.execute.optimizers.own import is_own, make_own, make_replicated
from farspan.graph import Meta, Value
from farspan.record.memory.exchanged import become_plain
from farspan.record.ops.overrides import NUMBERS
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import DisableTorchFunctionSubclass, has_memory_of_its_own, raw_grad

if TYPE_CHECKING:
    from farspan.execute.engine import Engine
    from farspan.graph import Template

__all__ = ["StepView"]

_T: Any = torch.Tensor
_RECORDED = (LazyTensor, StubParameter)
_FEW, _LARGE = 3, 4096
"""A function of so few tensors runs where the largest is, if that has more elements than this; else everywhere."""
_MOST_KNOWN = 4096


class StepView(TorchFunctionMode):
    """Answers the torch functions of a step. It may call any function itself: it does not see those."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.recorder = engine.recorder
        self._placed = engine.recorder.placed
        self.me = 1 << engine.rank
        self._bits = [1 << team.leader.rank for team in engine.teams]
        """A bit mask for each stage, with the bit of the rank that owns its parameters."""
        self._writes: set[Any] = set()
        """Functions that have been seen to write into their first argument, and to return it as it is."""
        self._known: dict[Any, Any] = {}
        self._used: set[Value] = set()
        """Values of the program with which this step has computed: it may have written into them, or views of them."""
        self._sparse: dict[str, torch.Tensor] = {}
        """Sparse gradients that this step has asked for, by parameter."""
        self._kinds: dict[Any, int] = {}

    def begin(self) -> None:
        """A step begins, until `leave_optimizer` of the recorder."""
        self._bits = [1 << team.leader.rank for team in self.engine.teams]  # stages may have been added
        self._sparse.clear()
        self._used.clear()
        self.__enter__()

    # What a step calls.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kinds.get(func) or self._kinds.setdefault(func, kind_of(func))
        if kind == ASKS:
            if not types and not kwargs:
                return func(*args)
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if kind == LIKE and len(args) == 2:
            args, kind = (args[0], shape_only(self._meta(args[1]))), COMPUTES
        ranks = self.ranks_of(args)
        if kwargs:
            in_kwargs = self.ranks_of(kwargs.values())
            if in_kwargs:
                ranks, kwargs = self._with_numbers(ranks, kwargs)
        else:
            kwargs = {}
        if not ranks:
            return func(*args, **kwargs)
        if self._sparse and any(type(item) is torch.Tensor and item.layout is torch.sparse_coo for item in args):
            return self._with_sparse(kind, func, args, kwargs)
        if kind <= WRITES:
            if kind == WRITES and self.stays_replicated(args[0]):
                args, kwargs = self.with_broadcast(args, kwargs)
                return func(*args, **kwargs)
            if ranks == self.me and not types:
                return self._kept_own(kind, func(*args, **kwargs), args)
            if ranks != self.me and func in self._writes and not ranks & (ranks - 1) and type(args[0]) in _RECORDED:
                for item in args:
                    self.used(item)
                return args[0]
        return self._seldom(kind, func, args, kwargs, ranks)

    def _seldom(self, kind: int, func: Any, args: Any, kwargs: Any, ranks: int) -> Any:
        """Handles all that is neither computed here at once, nor written into on another rank."""
        if kind == READS or (kind == INDEXES and has_mask(args[1])):
            args, kwargs = self.with_broadcast(args, kwargs)
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if kind == LISTS:
            return over_lists(self, func, name, args, kwargs)
        if ranks & (ranks - 1):
            args, kwargs, ranks = self._brought_together(func, name, args, kwargs)
            if not ranks:
                return func(*args, **kwargs)
        if ranks != self.me:
            return self.elsewhere(func, args, kwargs)
        args, kwargs = map_tensors((args, kwargs), self.data)  # what was recorded outside the step
        return self._kept_own(kind, func(*args, **kwargs), args)

    @staticmethod
    def _kept_own(kind: int, result: Any, args: Any) -> Any:
        """Returns the result of a function of own tensors."""
        if kind == WRITES:
            make_own(args[0])
        elif any(item is result for item in args):
            return result  # as `x.to(its own dtype)`: what it was
        return make_own(result)

    def _with_numbers(self, ranks: int, kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Arguments for which torch takes numbers only are broadcast."""
        single = [name for name in NUMBERS if name in kwargs and self.ranks_of([kwargs[name]])]
        kwargs = {**kwargs, **{name: self._broadcast([kwargs[name]])[0] for name in single}}
        return ranks | self.ranks_of(kwargs.values()), kwargs

    def ranks_of(self, items: Iterable[Any]) -> int:
        """Returns the bits of the ranks of which one alone has some tensor among `items`; 0 if all are replicated."""
        found = 0
        for item in items:
            kind = type(item)
            if kind is torch.Tensor or kind is nn.Parameter:
                if item._farspan_is_own or id(item) in self._placed:
                    found |= self.me
            elif kind is LazyTensor:
                found |= self._bits[item._value.stage]
            elif kind is StubParameter:
                found |= self._bits[self._placed[id(item)].stage]
            elif kind is list or kind is tuple:
                found |= self.ranks_of(item)
            elif isinstance(item, torch.Tensor):
                if item._farspan_is_own or id(item) in self._placed:  # type: ignore[attr-defined]
                    found |= self.me
            elif isinstance(item, (list, tuple)):
                found |= self.ranks_of(item)
            elif isinstance(item, dict):
                found |= self.ranks_of(item.values())
        return found

    # Tensors that all must know.

    def stays_replicated(self, tensor: Any) -> bool:
        """Returns whether a tensor that every rank has must have on each what is written into it: others see its
        memory."""
        is_plain = type(tensor) is torch.Tensor and not is_own(tensor) and tensor.layout is torch.strided
        return is_plain and id(tensor) not in self._placed and not has_memory_of_its_own(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the data of a recorded tensor or a stub, which the step asks for on every rank."""
        if self._is_known_to_all(tensor):
            return self.engine.read(tensor._value)  # type: ignore[attr-defined]
        return self._broadcast([tensor])[0]

    def _is_known_to_all(self, tensor: Any) -> bool:
        """Returns whether it is as the program has recorded it: each rank can ask for it alone. A gradient is its
        owner's."""
        is_recorded = type(tensor) is LazyTensor and not tensor._is_gradient and tensor._value not in self._used
        return is_recorded and (tensor._value.call is not None or tensor._value.index > 0)

    def used(self, tensor: Any) -> Any:
        """Notes that its owner computes with a tensor in this step, and returns it: what this rank has got is old."""
        if self._is_known_to_all(tensor):
            self._used.add(value := tensor._value)
            if self._bits[value.stage] != self.me:
                value.data = value.ticket = None
        return tensor

    def with_broadcast(self, args: Any, kwargs: Any, *, but: int = 0) -> tuple[Any, Any]:
        """Returns the arguments with replicated tensors in place of all others, but of those of the ranks in `but`."""
        template, tensors = flatten_arguments(args, kwargs)
        single = [item for item in tensors if self.ranks_of([item]) & ~but]
        broadcast = iter(self._broadcast(single))
        changed = {id(item): next(broadcast) for item in single}
        args, kwargs = rebuild(template, [changed.get(id(item), item) for item in tensors])
        return args, kwargs

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replicated copies of tensors of single ranks; every rank calls it."""
        unknown = [item for item in tensors if not self._is_known_to_all(item)]
        owners = [self.ranks_of([item]).bit_length() - 1 for item in unknown]
        broadcast: dict[int, torch.Tensor] = {}
        for item, rank in zip(unknown, owners, strict=True):
            meta = self._meta(item)
            broadcast[id(item)] = (
                make_replicated(self.data(item).detach())
                if rank == self.engine.rank
                else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            )
        if unknown:
            broadcast_tensors(self.engine, "what a step reads", [broadcast[id(item)] for item in unknown], owners)
        return [broadcast[id(item)] if id(item) in broadcast else self.engine.read(item._value) for item in tensors]  # type: ignore[attr-defined]

    def _brought_together(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, int]:
        """Arguments of several ranks become those of one rank and replicated ones.

        Returns:
            The arguments, and the bit of the rank; 0 if all are replicated.
        """
        _, tensors = flatten_arguments(args, kwargs)
        single = [item for item in tensors if self.ranks_of([item])]
        home = 0
        if "out" in kwargs:
            home = self.ranks_of([kwargs["out"]])
        elif writes_by_name(name) and isinstance(args[0], torch.Tensor):
            home = self.ranks_of(args[:1]) or self.ranks_of(single[:1])
        elif len(single) <= _FEW:
            largest = max(single, key=lambda item: self._meta(item).numel)
            home = self.ranks_of([largest]) if self._meta(largest).numel > _LARGE else 0
        args, kwargs = self.with_broadcast(args, kwargs, but=home)
        return args, kwargs, home

    # Tensors of other ranks.

    def gradient(self, placed: Placed) -> torch.Tensor | None:
        """`parameter.grad` in a step."""
        self.engine.masks.resolve()
        if placed.name in self.engine.masks.sparse and self.engine.has_gradient(placed):
            if placed.name not in self._sparse:
                self._sparse[placed.name] = self._broadcast_sparse(placed)
            return self._sparse[placed.name]
        if not placed.is_owned:
            return self.recorder.gradients.get(placed)
        gradient = raw_grad(placed.tensor)
        if gradient is not None:
            gradient._farspan_is_own = True
        return gradient

    def _broadcast_sparse(self, placed: Placed) -> torch.Tensor:
        """Replicates a sparse gradient: returns its owner's own one, and copies of it."""
        gradient, owner = raw_grad(placed.tensor), self.engine.teams[placed.stage].leader.rank
        parts = [] if gradient is None else [gradient._indices(), gradient._values()]
        sizes = [*parts[1].shape, parts[0].shape[0], int(gradient.is_coalesced())] if gradient is not None else []
        blob = self.engine.agreement.broadcast("a sparse gradient", json.dumps(sizes).encode(), owner)
        if gradient is None:
            meta = placed.meta
            *shape, num_sparse, is_coalesced = sparse_sizes(blob, meta)
            parts = [
                torch.empty(num_sparse, shape[0], dtype=torch.int64, device=meta.device),
                torch.empty(shape, dtype=meta.dtype, device=meta.device),
            ]
        broadcast_tensors(self.engine, "the data of a sparse gradient", parts, [owner, owner])
        if gradient is not None:
            return gradient
        return sparse_tensor(parts[0], parts[1], placed.meta.shape, bool(is_coalesced))

    def _with_sparse(self, kind: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function that is given a sparse gradient: what a rank alone has of it is written into there, or
        broadcast."""
        home = self.ranks_of(args[:1]) if kind == WRITES else 0
        args, kwargs = self.with_broadcast(args, kwargs, but=home)
        if home not in (0, self.me):
            return args[0]
        return self._kept_own(kind, func(*args, **kwargs), args) if home else func(*args, **kwargs)

    def set_gradient(self, placed: Placed, gradient: torch.Tensor | None) -> None:
        """`parameter.grad = gradient` in a step."""
        ranks = 0 if gradient is None else self.ranks_of([gradient])
        if gradient is not None and ranks and ranks != self._bits[placed.stage]:
            gradient, ranks = self._broadcast([gradient])[0], 0
        if type(gradient) is LazyTensor:
            gradient = self.data(gradient) if placed.is_owned else gradient
        self.recorder.gradients.put(placed, gradient, is_owners=ranks != 0)

    def known_only(self, meta: Meta, stage: int) -> LazyTensor:
        """Returns a tensor without data that a rank of `stage` has: this rank knows its metadata only."""
        meta = Meta(meta.shape, meta.stride, meta.dtype, meta.device, False)
        return LazyTensor.make(Value(intern(meta), stage), self.recorder)

    def elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of tensors of one other rank without data: returns what it gives there."""
        kwargs = self._numbers(kwargs)
        tensors: list[Any] = []
        shape = kind_of_call(args, kwargs, tensors)
        template = None
        if shape is None:
            template, tensors = flatten_arguments(args, kwargs)
            shape = shape_of(template)
        stage = next(self.stage_of(item) for item in tensors if self.ranks_of((item,)))
        key = (func, shape, tuple([id(self._meta(item)) for item in tensors]), current_modes())
        entry = self._known.get(key)
        if entry is None:
            entry = self._foresee(func, template or flatten_arguments(args, kwargs)[0], tensors)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = entry
        if entry.is_random:  # the rank that has them draws as many numbers, from the same generator
            args, kwargs = rebuild(
                template or flatten_arguments(args, kwargs)[0], [small_tensor(self._meta(item)) for item in tensors]
            )
            func(*args, **kwargs)
        for number in entry.mutated:
            self.becomes_known_only(tensors[number], stage)
        for tensor in tensors:
            self.used(tensor)
        results = [
            tensors[same] if same >= 0 else self.known_only(meta, stage)
            for same, meta in zip(entry.same_as, entry.metas[: entry.num_results], strict=True)
        ]
        return rebuild(entry.template, results)

    def _numbers(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments for which torch takes numbers only, and reads what it gets."""
        is_tensor = [name for name in kwargs if name in NUMBERS and isinstance(kwargs[name], torch.Tensor)]
        return {**kwargs, **{name: kwargs[name].item() for name in is_tensor}} if is_tensor else kwargs

    def _foresee(self, func: Any, template: Template, tensors: Sequence[torch.Tensor]) -> Any:
        metas = [self._meta(item) for item in tensors]
        entry = self.recorder.cache.lookup(func, template, metas, current_modes())
        if isinstance(entry, Unknown):
            if entry.is_refused:  # it raises what its owner's call does, if that is wrong for real
                args, kwargs = rebuild(template, [small_tensor(meta) for meta in metas])
                func(*args, **kwargs)
            self.recorder.refuse(
                f"an optimizer's step calls {name_of(func)}, and what it gives depends on data of another rank",
                hint="give it replicated tensors: read what it takes first, tensor.tolist()",
            )
        for number, meta in zip(entry.mutated, entry.metas[entry.num_results :], strict=True):
            if meta.shape != metas[number].shape:
                self.recorder.refuse(
                    f"an optimizer's step changes the shape of a tensor in place ({name_of(func)})",
                    hint="use the function that returns a new tensor",
                )
        is_first = entry.mutated == (0,) and entry.same_as == (0,) and not entry.is_random
        if is_first and writes_by_name(getattr(func, "__name__", "")):
            self._writes.add(func)
        return entry

    def becomes_known_only(self, tensor: torch.Tensor, stage: int) -> None:
        """A replicated tensor has been written into with data of another rank."""
        if self.ranks_of([tensor]):
            return
        if isinstance(tensor, nn.Parameter):
            self.recorder.refuse(
                "an optimizer's step writes what it computes of one rank's parameters into one outside the model",
                hint="make it a parameter of the model that is distributed",
            )
        become_plain(self.recorder, self.known_only(meta_of(tensor), stage), tensor)

    def _meta(self, tensor: torch.Tensor) -> Meta:
        """Returns its metadata, as of a tensor that needs no gradient."""
        if type(tensor) is LazyTensor:
            meta = tensor._value.meta
        else:
            placed = self._placed.get(id(tensor))  # which may be elsewhere than the program has it
            meta = meta_of(tensor) if placed is None else placed.meta
        if meta.requires_grad or meta.is_parameter:
            meta = intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False))
        return meta

    def stage_of(self, tensor: torch.Tensor) -> int:
        if type(tensor) is LazyTensor:
            return tensor._value.stage
        return self._placed[id(tensor)].stage

    def data(self, tensor: Any) -> Any:
        """Returns what this rank computes with in place of a recorded tensor of its own."""
        if type(tensor) is LazyTensor and self._bits[tensor._value.stage] == self.me:
            return make_own(self.engine.read(self.used(tensor)._value))
        return tensor
