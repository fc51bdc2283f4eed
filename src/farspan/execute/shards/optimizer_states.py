"""The states of optimizers, divided over the groups: each parameter's is kept by its home group alone.

    optimizer.step()          state of the parameters at home here; nothing is kept for others
    optimizer.state_dict()    whole: the rest is pulled from where it is, into the dictionary
    optimizer.state           whole, too, and kept so until the next step: the program may look at it, and change it

Where the program holds the whole state, all groups do the same with it. A slower one may still ask for what there was:
copies of what is at home here wait for it. What is answered before that is a copy, too: the program may write into the
state before the answer has gone.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer

from farspan.call.infer.entry import intern
from farspan.call.pytree.template import rebuild
from farspan.call.wire.structure import structure_from_json
from farspan.comm.pulls.answers import Answer
from farspan.execute.optimizers.kept_state import change_tensors, raw_state
from farspan.execute.optimizers.own import make_own, without_marks
from farspan.execute.optimizers.states import OptimizerStates, placed_in
from farspan.graph import Meta, Value
from farspan.record.tensor import LazyTensor

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.execute.engine import Engine
    from farspan.execute.shards.homes import ShardHomes
    from farspan.execute.shards.peer_pulls import PeerPulls

__all__ = ["DividedStates"]

_one: dict[str, object] = {"user": {}}
_NUM_REFERENCES = sys.getrefcount(_one["user"])
"""As this Python counts those to something in one dictionary, and nowhere else."""


def _has_other_user(state: Any, key: Any) -> bool:
    return sys.getrefcount(state[key]) > _NUM_REFERENCES


def _copy_of(kept: Any) -> Any:
    """Returns what the program gets of what is kept."""
    return change_tensors(copy.deepcopy(kept), without_marks)


class DividedStates:
    """The states of one rank's optimizers, as far as they are divided.

    Args:
        engine: This rank's.
        homes: Which group keeps what.
        peers: Asks other groups.
    """

    def __init__(self, engine: Engine, homes: ShardHomes, peers: PeerPulls) -> None:
        self._engine = engine
        self._homes = homes
        self._peers = peers
        self._divided: dict[int, Any] = {}
        """The states that are divided, by number of an optimizer, which may be given another one: also of those that
        the program has released, while another group may ask for them."""
        self._sharded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those whose latest step was divided, even if this group has looked at the whole state since."""
        self._parameters: weakref.WeakKeyDictionary[Optimizer, dict[str, Placed]] = weakref.WeakKeyDictionary()
        """By name those that each has had: what is kept for one that has left its groups stays, as in torch."""
        self._copying = threading.Lock()
        """Held by who takes from states what is asked for: the program has a state whole only when that is done."""
        self._as_they_were: dict[int, dict[str, Any]] = {}
        """By number of an optimizer whose whole state the program holds: what was at home here, by parameter."""
        peers.answer_with({"state": lambda what: self._state(*what), "structure": lambda what: self._structure(*what)})
        engine.values.optimizers.elsewhere = self._elsewhere
        engine.values.optimizers.waits_for_groups = True

    def is_divided(self, optimizer: Optimizer) -> bool:
        number = self._engine.values.optimizers.number_of(optimizer)
        return number in self._divided and self._divided[number] is raw_state(optimizer)

    def forget(self) -> None:
        """All groups are here: none asks any more for what an optimizer has kept that the program has released."""
        optimizers = self._engine.values.optimizers
        optimizers.forget()
        for number in [number for number in self._divided if not optimizers.keeps(number)]:
            del self._divided[number]
            self._as_they_were.pop(number, None)

    def is_held(self, optimizer: Optimizer) -> bool:
        """Returns whether the program holds a divided state, or what is in it for a parameter, at the end of a step."""
        state = raw_state(optimizer)
        num_known = 3 + self._engine.values.optimizers.num_users(optimizer)  # optimizer, its stand-in, `_divided`
        if sys.getrefcount(state) > num_known + _NUM_REFERENCES:
            return True
        return any(map(_has_other_user, repeat(state), state))

    def is_saved_here(self, optimizer: Optimizer, item: Placed) -> bool | None:
        """Returns whether this group saves what is kept for a parameter; None where groups save it together."""
        return self._homes.is_here(item) if optimizer in self._sharded else None

    def become_whole(self, optimizer: Optimizer) -> bool:
        """Each group steps all parameters.

        Returns:
            Whether the latest step was divided: numbers too are their owners' alone then.
        """
        if self.is_divided(optimizer):
            self.gather(optimizer)
        was_sharded = optimizer in self._sharded
        self._sharded.discard(optimizer)
        return was_sharded

    def divide(self, optimizer: Optimizer) -> None:
        """Drops what is kept for parameters that are not at home here."""
        state = raw_state(optimizer)
        for item in self._parameters_of(optimizer):
            if not self._homes.is_here(item):
                state.pop(item.tensor, None)
        self._divided[self._number_of(optimizer)] = state
        self._sharded.add(optimizer)
        self._as_they_were.pop(self._number_of(optimizer), None)

    def gather(self, optimizer: Optimizer) -> None:
        """Lets its state be whole, as without sharding; what ranks of this group own is known to them alone."""
        engine, number = self._engine, self._number_of(optimizer)
        placed = self._parameters_of(optimizer)
        state = raw_state(optimizer)
        own = {item.name: state[item.tensor] for item in placed if item.tensor in state and self._homes.is_here(item)}
        with self._copying:
            self._as_they_were[number] = {name: copy.deepcopy(kept) for name, kept in own.items()}
        found = self._fetched(number, [item for item in placed if item.is_owned])
        found.update(self._described(number, [item for item in placed if not item.is_owned]))
        found.update(own)
        if engine.num_ranks > 1:
            for item in [item for item in placed if item.is_owned and item.name in found]:
                found[item.name] = change_tensors(found[item.name], make_own)
        strays = {key: kept for key, kept in state.items() if id(key) not in engine.recorder.placed}
        state.clear()
        state.update({item.tensor: found[item.name] for item in placed if item.name in found})
        state.update(strays)
        self._divided.pop(number, None)

    def whole(self, optimizer: Optimizer) -> defaultdict[Any, Any]:
        """Returns a copy of its whole state, with the data of all ranks of all groups."""
        placed = self._parameters_of(optimizer)
        state, whole = raw_state(optimizer), defaultdict[Any, Any](dict)
        fetched = self._fetched(self._number_of(optimizer), placed)
        for item in placed:
            kept = state.get(item.tensor) if self._homes.is_here(item) else fetched.get(item.name)
            if kept is not None:
                whole[item.tensor] = _copy_of(kept) if self._homes.is_here(item) else kept
        whole.update((key, _copy_of(kept)) for key, kept in state.items() if key not in whole)
        return whole

    def _elsewhere(self, number: int, state: Any, name: str) -> Any:
        """Returns what another group keeps for a parameter, for a rank of this one that asks this one: by parameter,
        or None where this rank has it."""
        item = self._engine.parameters.get(name)
        if item is None or self._divided.get(number) is not state or self._homes.is_here(item):
            return None
        return {item.tensor: self._fetched(number, [item]).get(name)}

    def _parameters_of(self, optimizer: Optimizer) -> list[Placed]:
        known = self._parameters.setdefault(optimizer, {})
        known.update((item.name, item) for item in placed_in(optimizer, self._engine.recorder.placed))
        return list(known.values())

    def _number_of(self, optimizer: Optimizer) -> int:
        number = self._engine.values.optimizers.number_of(optimizer)
        assert number is not None
        return number

    # Asking, and answering.

    def _fetched(self, number: int, items: Iterable[Placed]) -> dict[str, Any]:
        """Returns by name what is kept for parameters that are not at home here, if something is."""
        found: dict[str, Any] = {}
        for item in items:
            if not self._homes.is_here(item):
                header, tensors = self._peers.ask(self._homes.rank_of(item), "state", [number, item.name])
                kept = OptimizerStates.unpack(header, tensors, item.meta.device)
                if kept is not None:
                    found[item.name] = kept
        return found

    def _described(self, number: int, items: Iterable[Placed]) -> dict[str, Any]:
        """Returns the same for parameters that other ranks of this group own, with tensors that they alone have."""
        found: dict[str, Any] = {}
        by_rank: dict[int, list[Placed]] = {}
        for item in items:
            by_rank.setdefault(self._homes.rank_of(item), []).append(item)
        for rank, theirs in by_rank.items():
            header, _ = self._peers.ask(rank, "structure", [number, [item.name for item in theirs]])
            for item, (structure, is_beside) in zip(theirs, header["structures"], strict=True):
                template, metas = structure_from_json(structure.encode())
                pairs = zip(metas, is_beside, strict=True)
                kept = rebuild(template, [self._known_only(meta, item, is_near=is_near) for meta, is_near in pairs])
                if kept is not None:
                    found[item.name] = kept
        return found

    def _known_only(self, meta: Meta, item: Placed, *, is_near: bool) -> LazyTensor:
        meta = Meta(meta.shape, meta.stride, meta.dtype, item.meta.device if is_near else meta.device, False)
        return LazyTensor.make(Value(intern(meta), item.stage), self._engine.recorder)

    def _state(self, number: int, name: str) -> Answer:
        with self._copying:
            header, tensors = self._packed(number, name)
            return header, [tensor.clone() for tensor in tensors]

    def _packed(self, number: int, name: str) -> Answer:
        known = self._as_they_were.get(number)
        if known is None:
            return self._engine.values.optimizers.answer(number, name)
        return OptimizerStates.pack(known.get(name), self._engine.parameters[name].tensor.device)

    def _structure(self, number: int, names: list[str]) -> Answer:
        heads = [self._packed(number, name)[0] for name in names]
        return {"structures": [(head["structure"], head["is_beside"]) for head in heads]}, []
