"""A step that treats each parameter by itself: every rank steps its own parameters, and runs nothing for the others'.

                 p0       p1       p2       p3
    rank 0      own      own       -        -        a stand-in for the optimizer has these alone; what is
    rank 1       -        -       own      own       kept for the others' are recorded tensors without data

torch's own optimizers are of this kind, but for a few. What `step_view` does for the others is done here once, in their
first step: then every rank knows what is kept for which parameter, and later steps only change what it holds. Where a
step might keep something new (a parameter that had no gradient before, another setting) the whole view sees it again.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.call.infer.entry import meta_of
from farspan.execute.agreement.broadcast import broadcast_tensors
from farspan.execute.optimizers.kept_state import parts_of_state, raw_state
from farspan.execute.optimizers.own import is_own, make_own, make_replicated
from farspan.graph import Value
from farspan.record.tensor import LazyTensor, StubParameter
from farspan.torch_private import has_step_hooks, poisoned

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.execute.engine import Engine

__all__ = ["OwnShares", "broadcast_numbers", "is_at_owners", "stand_in", "treats_each_parameter"]

_OF_EACH_PARAMETER = frozenset(
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ]
)
"""Their steps make what a parameter becomes, and what is kept for it, of that parameter, its gradient and what was kept
for it alone. LBFGS looks at all parameters together; SparseAdam is for gradients that every rank has.
"""


@dataclass(slots=True)
class _Known:
    """What a step of an optimizer in the whole view has shown."""

    names: frozenset[str]
    """The parameters that took part in it."""
    parameters: list[Any]
    """All its parameters, and how many each group has."""
    kept: list[Any]
    """What the optimizer kept for each parameter after that step."""
    values: list[Any]
    """The values of the optimizer's parameter groups after that step."""
    settings: list[Any]


class OwnShares:
    """The optimizers of one rank whose steps can be taken so.

    While it is known what an optimizer keeps, all of that is the parameters' owners' alone, numbers too; on every rank.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._have_same_hooks: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether all ranks, or none, had hooks around its first step. Where some had, all stay in the whole view."""

    def has_stepped(self, engine: Engine, optimizer: Optimizer, placed: Sequence[Placed]) -> None:
        """A step in the whole view is over, which was given no closure."""
        is_whole = len(placed) == sum([len(group["params"]) for group in optimizer.param_groups])
        if type(optimizer) not in _OF_EACH_PARAMETER or not is_whole:
            return
        values = _values_of(optimizer)
        if _has_tensor(values) or not is_at_owners(engine, optimizer):  # whose they are, the whole view says
            return
        is_plain = _is_plain(optimizer)
        if optimizer not in self._have_same_hooks:
            found = engine.gather("whether a step has hooks", b"" if is_plain else b"1")
            self._have_same_hooks[optimizer] = len(set(found)) == 1
        if not self._have_same_hooks[optimizer] or not is_plain:
            return
        names = frozenset([item.name for item in placed if engine.has_gradient(item)])
        kept, settings = _kept_of(optimizer, placed), _settings_of(optimizer)
        self._known[optimizer] = _Known(names, _parameters_of(optimizer, placed), kept, values, settings)
        _divide(engine, optimizer)

    def needs_hooks_everywhere(self, optimizer: Optimizer) -> bool:
        """Returns whether the next step has hooks, and must have some on all ranks: they get the whole view."""
        return self._have_same_hooks.get(optimizer, False) and not _is_plain(optimizer)

    def take(
        self, engine: Engine, optimizer: Optimizer, placed: Sequence[Placed], *, is_as_left: bool, has_closure: bool
    ) -> Any:
        """The optimizer whose step is this rank's share; all ranks find one, or none.

        Args:
            engine: This rank's.
            optimizer: It is about to step.
            placed: All its parameters.
            is_as_left: Whether the program has not asked for what it keeps since its last step.
            has_closure: Whether the step is given a closure, which sees the optimizer itself.

        Returns:
            A stand-in with the own parameters alone; None where the step needs the whole view.
        """
        known = self._known.get(optimizer)
        if (
            known is None
            or has_closure
            or not _is_plain(optimizer)
            or not self._is_like(known, engine, optimizer, placed, is_as_left=is_as_left)
            or not (is_as_left or is_at_owners(engine, optimizer))
        ):
            engine.slices.bring_home(optimizer, placed)
            if self._known.pop(optimizer, None) is not None:
                broadcast_numbers(engine, optimizer)
            return None
        if not is_as_left:  # what the program has put in its place is every rank's
            _divide(engine, optimizer)
        if engine.masks.owned.slices:
            return stand_in(optimizer, engine.slices.spread, engine.slices.states())
        ids = {id(item.tensor) for item in placed if item.is_owned}
        return stand_in(optimizer, lambda tensors: [tensor for tensor in tensors if id(tensor) in ids])

    @staticmethod
    def _is_like(
        known: _Known, engine: Engine, optimizer: Optimizer, placed: Sequence[Placed], *, is_as_left: bool
    ) -> bool:
        """Returns whether a step would keep nothing but what one in the whole view has kept."""
        engine.masks.resolve()
        if engine.masks.sparse or _parameters_of(optimizer, placed) != known.parameters:
            return False
        if len(known.names) < len(placed) and any(
            item.name not in known.names and engine.has_gradient(item) for item in placed
        ):
            return False
        values = _values_of(optimizer)
        if len(values) != len(known.values) or not all(map(operator.is_, values, known.values)):
            if _settings_of(optimizer) != known.settings:
                return False
            known.values = values
        return is_as_left or _kept_of(optimizer, placed) == known.kept

    def has_loaded(self, engine: Engine, optimizer: Optimizer) -> None:
        """What it keeps has been loaded, of dictionaries that may hold the tensors of steps, which are not alike."""
        if type(optimizer) in _OF_EACH_PARAMETER and engine.num_ranks > 1:
            self._known.pop(optimizer, None)
            broadcast_numbers(engine, optimizer)


def stand_in(
    optimizer: Optimizer, own: Callable[[list[torch.Tensor]], list[torch.Tensor]], states: Mapping[Any, Any] = {}
) -> Any:
    """Returns an optimizer that steps, in its place, a part of its parameters.

    Args:
        optimizer: About to step.
        own: Returns, of a group's parameters, what is stepped in their place.
        states: What is kept for those that are no parameters of the program, by tensor.
    """
    groups = [{**group, "params": own(group["params"])} for group in optimizer.param_groups]
    share: Any = object.__new__(type(optimizer))
    share.__dict__.update(vars(optimizer), param_groups=[group for group in groups if group["params"]])
    if states:
        share.__dict__["state"] = defaultdict(dict, {**raw_state(optimizer), **states})
    return share


def treats_each_parameter(optimizer: Optimizer) -> bool:
    """Returns whether it is one of torch's own that treat each parameter by itself."""
    return type(optimizer) in _OF_EACH_PARAMETER and type(optimizer).step.__module__.startswith("torch.optim.")


def _is_plain(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's step is torch's own, without hooks around it."""
    return type(optimizer).step.__module__.startswith("torch.optim.") and not has_step_hooks(optimizer)


def is_at_owners(engine: Engine, optimizer: Optimizer) -> bool:
    """Returns whether all that is kept for a parameter is its owner's, or known to all: alike on every rank."""
    found, placed = True, engine.recorder.placed

    def look(tensor: torch.Tensor, owner: int) -> torch.Tensor:
        nonlocal found
        if isinstance(tensor, (LazyTensor, StubParameter)):
            stage = tensor._value.stage if isinstance(tensor, LazyTensor) else placed[id(tensor)].stage
            found = found and engine.teams[stage].leader.rank == owner
        elif is_own(tensor) or id(tensor) in placed:
            found = found and engine.rank == owner
        return tensor

    for _, item, part in parts_of_state(optimizer, placed):
        if item is not None:
            owner = engine.teams[item.stage].leader.rank
            part.change(lambda tensor, owner=owner: look(tensor, owner))
    return found


def _parameters_of(optimizer: Optimizer, placed: Sequence[Placed]) -> list[Any]:
    return [*[len(group["params"]) for group in optimizer.param_groups], *[item.name for item in placed]]


def _values_of(optimizer: Optimizer) -> list[Any]:
    """All that its groups hold, to see whether something has been put in its place."""
    attributes = vars(optimizer)
    values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return [attributes.get("grad_scale"), attributes.get("found_inf"), *values]


def _settings_of(optimizer: Optimizer) -> list[Any]:
    """Returns what decides what a step keeps: of a number whether it is zero (a momentum), all else as it is."""
    scaling = [_kind_of(vars(optimizer).get(name)) for name in ("grad_scale", "found_inf")]
    groups = [{name: _kind_of(group[name]) for name in group if name != "params"} for group in optimizer.param_groups]
    return [scaling, groups]


def _kind_of(setting: Any) -> Any:
    if isinstance(setting, (int, float)):
        return bool(setting)
    if isinstance(setting, torch.Tensor):
        return object()  # like no other
    return tuple(map(_kind_of, setting)) if isinstance(setting, (tuple, list)) else setting


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values) or any(
        _has_tensor(value) for value in values if isinstance(value, (tuple, list))
    )


def _kept_of(optimizer: Optimizer, placed: Sequence[Placed]) -> list[Any]:
    """Returns by parameter the names of what is kept, and whether there is something: a step makes what is None."""
    state = raw_state(optimizer)
    kept = [state.get(item.tensor) or {} for item in placed]
    return [[(name, value is None) for name, value in each.items()] for each in kept]


def _divide(engine: Engine, optimizer: Optimizer) -> None:
    """Numbers too, all of which every rank has had so far, become their owners'."""
    for _, item, part in parts_of_state(optimizer, engine.recorder.placed):
        if item is not None:
            part.change(lambda tensor, item=item: _of_owner(engine, item, tensor))


def _of_owner(engine: Engine, item: Placed, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is LazyTensor:
        return tensor
    if item.is_owned:
        return make_own(tensor)
    return LazyTensor.make(Value(meta_of(tensor), item.stage), engine.recorder)


def broadcast_numbers(engine: Engine, optimizer: Optimizer) -> None:
    """Let every rank have what the owner of a parameter has of the numbers that are kept for it; all ranks call it."""
    small: list[tuple[torch.Tensor, int]] = []

    def change(item: Placed, tensor: torch.Tensor) -> torch.Tensor:
        meta = tensor._value.meta if type(tensor) is LazyTensor else meta_of(tensor)
        if meta.shape:
            return tensor
        rank = engine.teams[item.stage].leader.rank
        if type(tensor) is LazyTensor:
            rank = engine.teams[tensor._value.stage].leader.rank
            data = tensor._value.data  # at its owner, where the program has got it
            tensor = poisoned((), meta.dtype, meta.device).clone() if data is None else data.detach()
        elif is_own(tensor):  # the program may have given a parameter what was kept for another rank's
            rank = engine.rank
        small.append((make_replicated(tensor), rank))
        return tensor

    for _, item, part in parts_of_state(optimizer, engine.recorder.placed):
        if item is not None:
            part.change(lambda tensor, item=item: change(item, tensor))
    if small:
        tensors, owners = zip(*small, strict=True)
        broadcast_tensors(engine, "numbers that an optimizer keeps", tensors, owners)
