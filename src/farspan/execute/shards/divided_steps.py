"""A step of an optimizer whose state is divided over the groups.

    peers at one position   p0       p1       p2       p3
    group 0                step     step      -        -         a stand-in for the optimizer has these alone
    group 1                 -        -       step     step
    then                    0 ->     0 ->    <- 1     <- 1       new values, from home to the others

The gradients are the same in all groups, so what a home group makes of a parameter is what each would have made. It
holds for optimizers that treat each parameter by itself; others keep their whole state in each group, and it is said.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.comm.tensor_bytes import raw_bytes
from farspan.execute.data_axis.first_group import COMPARED_EVERY, find_different, groups_differ, sample_of
from farspan.execute.optimizers.own_share import (
    broadcast_numbers,
    is_at_owners,
    stand_in,
    treats_each_parameter,
)
from farspan.execute.optimizers.shown import keeps_beside_state
from farspan.torch_private import DisableTorchFunction, has_step_hooks, raw_grad

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.comm.collectives import Pending
    from farspan.execute.data_axis.reduction import Reduction
    from farspan.execute.engine import Engine
    from farspan.execute.shards.homes import ShardHomes
    from farspan.execute.shards.optimizer_states import DividedStates
    from farspan.execute.shards.parameters import AwayParameters
    from farspan.execute.shards.peer_pulls import PeerPulls

__all__ = ["DividedSteps"]

_BROADCAST_BYTES = 8 << 20
"""What is sent at once, of parameters that are smaller."""
_MOST_ON_THE_WAY = 2
"""So many of these at a time: each has memory of its own."""


@dataclass(frozen=True)
class _Sent:
    """New values of some parameters, on their way to the other groups.

    Attributes:
        part: The parameters.
        flat: Their data behind each other; nothing if it goes from and to the parameter's own memory.
        work: The broadcast.
    """

    part: Sequence[Placed]
    flat: torch.Tensor | None
    work: Pending


class DividedSteps:
    """The divided steps of one rank.

    Args:
        engine: This rank's.
        groups: Its data axis.
        homes: Which group steps what.
        states: What optimizers keep.
        peers: Counts the steps.
        parameters: Those that are away, where parameters are sharded.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Reduction,
        homes: ShardHomes,
        states: DividedStates,
        peers: PeerPulls,
        parameters: AwayParameters | None,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._homes = homes
        self._states = states
        self._peers = peers
        self._parameters = parameters
        self._said: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._running: Optimizer | None = None
        self._is_whole = False
        """Whether each group steps all parameters, which are sharded."""

    @property
    def is_running(self) -> bool:
        """Returns whether a step is divided that runs."""
        return self._running is not None

    def take(self, optimizer: Optimizer, placed: Sequence[Placed]) -> Any:
        """Begins a step; all ranks of all groups call it.

        Args:
            optimizer: It is about to step.
            placed: All its parameters.

        Returns:
            A stand-in with the parameters at home here alone; None where each group steps all of its own.
        """
        self._running, self._is_whole = None, False  # a step before may have raised what the program has caught
        self._give_homes(placed)
        reason = _why_whole(optimizer, placed) or self._why_apart(optimizer)
        self._agree(f"a step of {type(optimizer).__name__} ({reason or 'sharded'})")
        if reason:
            self._gather(optimizer)
            if self._parameters is not None:
                self._parameters.begin_write(f"a step of {type(optimizer).__name__}")
                self._is_whole = True
            if optimizer not in self._said:
                self._said.add(optimizer)
                kind = type(optimizer).__name__
                self._engine.console.warn(f"farspan: each group keeps the whole state of {kind}: {reason}.")
            return None
        self._compare_gradients(placed)
        self._states.divide(optimizer)
        self._running = optimizer
        ids = {id(item.tensor) for item in placed if self._homes.is_here(item)}
        return stand_in(optimizer, lambda tensors: [tensor for tensor in tensors if id(tensor) in ids])

    def _why_apart(self, optimizer: Optimizer) -> str:
        """Returns why the owner of a parameter cannot step it alone; "" if it can. What a divided step has left can."""
        engine = self._engine
        if engine.num_ranks == 1 or self._states.is_divided(optimizer):
            return ""
        if is_at_owners(engine, optimizer):
            return ""
        return "the program has given a parameter what it kept for one of another rank"

    def _compare_gradients(self, placed: Sequence[Placed]) -> None:
        """One group alone steps with a gradient that all have: samples of them are compared, often at first.

        Raises:
            DivergenceError: A group has written something else into an averaged gradient.
        """
        number, groups = self._peers.clock, self._groups
        if number & (number - 1) and number % COMPARED_EVERY:
            return
        own = [item for item in placed if item.is_owned and item.meta.numel]
        with self._engine.executing():
            different = find_different(own, groups.peers, groups.wait, _sample_of_gradient)
            if different:
                raise groups_differ("gradients", different, f"{number} steps")

    def end(self, placed: Sequence[Placed]) -> None:
        """Ends a step: gives all groups the values that are new."""
        optimizer, self._running = self._running, None
        is_whole, self._is_whole = self._is_whole, False
        if is_whole and self._parameters is not None:
            self._parameters.end_write()
        if optimizer is None:
            return
        own = [item for item in placed if item.is_owned and raw_grad(item.tensor) is not None]
        if self._parameters is not None:
            own = [item for item in own if not self._parameters.is_divided(item)]
            self._parameters.changed()
        with self._engine.executing(), torch.no_grad(), DisableTorchFunction():
            self._broadcast(own)
        self._peers.advance()

    def begin_load(self, optimizer: Optimizer) -> None:
        """All groups load its state; none asks for the old one any more."""
        self._agree(f"{type(optimizer).__name__}.load_state_dict()")

    def has_loaded(self, optimizer: Optimizer, placed: Sequence[Placed]) -> None:
        """Its whole state has been loaded, in all groups."""
        self._give_homes(placed)
        if not _why_whole(optimizer, placed):
            self._states.divide(optimizer)
        self._peers.advance()

    def _give_homes(self, placed: Sequence[Placed]) -> None:
        """Parameters of a copied model have none until an optimizer of theirs is stepped or loaded."""
        self._homes.add([item for item in placed if not self._homes.knows(item)])

    def _agree(self, what: str) -> None:
        """All groups are about to change what is held: none asks for what it was any more."""
        if self._parameters is not None:
            self._parameters.settle()
        self._groups.agree(what)
        self._states.forget()

    def _gather(self, optimizer: Optimizer) -> None:
        if self._states.become_whole(optimizer) and self._engine.num_ranks > 1:
            broadcast_numbers(self._engine, optimizer)

    def _broadcast(self, items: Sequence[Placed]) -> None:
        """Lets each parameter be what its home group has made of it."""
        sent: deque[_Sent] = deque()
        for home, part in _parts_of(items, self._homes):
            if len(sent) == _MOST_ON_THE_WAY:
                self._finish(sent.popleft())
            flat = None if len(part) == 1 and part[0].tensor.is_contiguous() else self._flat_of(part)
            data = part[0].tensor.detach() if flat is None else flat
            sent.append(_Sent(part, flat, self._groups.peers.broadcast(raw_bytes(data), home)))
        while sent:
            self._finish(sent.popleft())

    def _flat_of(self, part: Sequence[Placed]) -> torch.Tensor:
        """Returns memory for the data of several parameters, with those that are this group's."""
        if self._homes.is_here(part[0]):
            return torch.cat([_flat_of(item) for item in part])
        tensor = part[0].tensor
        return torch.empty(sum([item.meta.numel for item in part]), dtype=tensor.dtype, device=tensor.device)

    def _finish(self, sent: _Sent) -> None:
        self._groups.wait(sent.work)
        if self._homes.is_here(sent.part[0]):
            return
        if sent.flat is None:
            torch.autograd.graph.increment_version(sent.part[0].tensor)
            return
        for item, data in zip(sent.part, sent.flat.split([item.meta.numel for item in sent.part]), strict=True):
            item.tensor.detach().copy_(data.view(item.meta.shape))


def _why_whole(optimizer: Optimizer, placed: Sequence[Placed]) -> str:
    """Returns why a step is not divided; "" if it is."""
    if not treats_each_parameter(optimizer):
        return "farspan does not know whether it treats each parameter by itself, as torch's own do"
    if len(placed) < sum([len(group["params"]) for group in optimizer.param_groups]):
        return "it has parameters that are not of a distributed model"
    if has_step_hooks(optimizer):
        return "its steps have hooks, which may look at it"
    if keeps_beside_state(optimizer):
        return "its settings are tensors of one rank"
    return ""


def _sample_of_gradient(tensor: torch.Tensor) -> torch.Tensor:
    gradient = raw_grad(tensor)
    return torch.empty(0) if gradient is None else sample_of(gradient)


def _flat_of(item: Placed) -> torch.Tensor:
    return item.tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _parts_of(items: Sequence[Placed], homes: ShardHomes) -> list[tuple[int, list[Placed]]]:
    """Returns what is sent together, each with its home: parameters of one type and device, in the model's order."""
    parts: list[tuple[int, list[Placed]]] = []
    open_parts: dict[tuple[int, torch.dtype, torch.device], tuple[list[Placed], int]] = {}
    for item in items:
        home = homes.group_of(item)
        size = item.meta.size_bytes
        key = (home, item.tensor.dtype, item.tensor.device)
        part, size_bytes = open_parts.get(key, ([], _BROADCAST_BYTES))
        if size_bytes + size > _BROADCAST_BYTES:
            part, size_bytes = [], 0
            parts.append((home, part))
        part.append(item)
        open_parts[key] = (part, size_bytes + size)
    return parts
