"""The state of an optimizer while a thread copies it: nobody can reach it but through a gate that waits for the copy.

    vars(optimizer)["state"]    {parameter: {"exp_avg": tensor}}    as ever
                                LentState                           while it is lent: who uses it gets the state itself,
                                                                    when it has been copied

Lent is only what has no other user: the dictionaries on the way to a tensor, the tensor, its memory. So there is no
way to it past the gate, for whatever code: a step of any optimizer, a list of the program's, a view, an array. What has
another user is copied at once. Python counts references, torch the users of a tensor and of its memory.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import weakref
from collections import defaultdict
from threading import Event, Lock
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from farspan.errors import DeadlineError
from farspan.torch_private import DisableTorchFunction, has_memory_of_its_own, has_other_users

__all__ = ["LentState", "Loan", "lend", "state_in"]

_LEAST_BYTES = 64 << 10
"""What is smaller is copied faster than it is lent."""
_one: dict[str, object] = {"user": object()}
_NUM_REFERENCES = sys.getrefcount(_one["user"])
"""As this Python counts those to something in one dictionary, and nowhere else."""
_COUNTS_AT_ONCE = not sysconfig.get_config_var("Py_GIL_DISABLED")


class Loan:
    """The state of one optimizer, lent to who copies it.

    Args:
        attributes: Those of the optimizer.
        ids: Those of the tensors that are lent.
        deadline_s: How long a copy may take.

    Attributes:
        state: The optimizer's.
    """

    def __init__(self, attributes: dict[str, Any], ids: set[int], deadline_s: float) -> None:
        self.state: Any = attributes["state"]
        self._attributes = attributes
        self._ids = ids
        self._deadline_s = deadline_s
        self._process = os.getpid()
        self._lock = Lock()
        self._is_begun = False
        self._copied = Event()
        attributes["state"] = LentState(self)  # which alone knows the loan: it goes when the state is back

    def begin(self) -> set[int]:
        """Returns the ids of what is still lent; from now on who wants it waits until `end` is called."""
        with self._lock:
            self._is_begun = True
            return self._ids

    def end(self) -> None:
        """All has been copied, or never will be."""
        self._copied.set()

    def give_back(self) -> Any:
        """Returns the state to who wants to use it: when it has been copied, or at once if that has not begun.

        Raises:
            DeadlineError: The copy takes too long.
        """
        if os.getpid() == self._process:  # in a child process nobody copies it
            self._wait()
        gate = self._attributes.get("state")
        if type(gate) is LentState and gate.is_of(self):
            self._attributes["state"] = self.state
        return self.state

    def _wait(self) -> None:
        with self._lock:
            if not self._is_begun:
                self._ids = set()
        if self._ids and not self._copied.wait(self._deadline_s):
            raise DeadlineError(
                f"the state of an optimizer has not been copied for a checkpoint in {self._deadline_s:g} s.",
                why="the machine has no memory left, or was stopped.",
                hint="farspan.save(..., wait=True), or FARSPAN_DEADLINE=seconds",
            )


class LentState:
    """Stands in an optimizer's attributes for its state; whatever is done with it is done with the state."""

    __slots__ = ("_loan",)

    def __init__(self, loan: Loan) -> None:
        self._loan = loan

    def is_of(self, loan: Loan) -> bool:
        return self._loan is loan

    def give_back(self) -> Any:
        return self._loan.give_back()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loan.give_back(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._loan.give_back().__reduce_ex__(protocol)


def _forward(name: str) -> None:
    def method(self: LentState, *args: Any) -> Any:
        return getattr(self.give_back(), name)(*args)

    setattr(LentState, name, method)


for _name in ("contains", "delitem", "eq", "getitem", "ior", "iter", "len", "ne", "or", "repr", "reversed", "setitem"):
    _forward(f"__{_name}__")


def state_in(attributes: dict[str, Any]) -> Any:
    """Returns the state that an optimizer with these attributes keeps; waits until it is copied, if it is lent.

    Raises:
        KeyError: It keeps none.
    """
    state = attributes["state"]
    return state.give_back() if type(state) is LentState else state


def lend(optimizer: Optimizer, num_known_users: int, deadline_s: float) -> Loan | None:
    """Lend what an optimizer keeps in tensors that nobody else can reach.

    Args:
        optimizer: Keeps its state where torch's do.
        num_known_users: How many other references to its state there are, which only read it.
        deadline_s: How long a copy may take.

    Returns:
        None if there is nothing to lend.
    """
    attributes = vars(optimizer)
    state_in(attributes)  # an earlier loan is over
    if not _COUNTS_AT_ONCE or type(attributes["state"]) not in (dict, defaultdict):
        return None
    if sys.getrefcount(attributes["state"]) != _NUM_REFERENCES + num_known_users:
        return None
    ids: set[int] = set()
    with DisableTorchFunction():
        for key in attributes["state"]:
            ids |= _lendable(attributes["state"], key)
    return Loan(attributes, ids, deadline_s) if ids else None


def _lendable(state: Any, key: Any) -> set[int]:
    """Returns the ids of the tensors kept for a parameter that have no other user: no name here may be one."""
    if type(state[key]) is not dict or sys.getrefcount(state[key]) != _NUM_REFERENCES:
        return set()
    kept = state[key]
    names = [name for name in kept if sys.getrefcount(kept[name]) == _NUM_REFERENCES]
    return {id(kept[name]) for name in names if _is_lendable(kept[name])}


def _is_lendable(item: Any) -> bool:
    """Returns whether it is a tensor that is copied byte by byte, and nobody else uses it or its memory."""
    return (
        type(item) is torch.Tensor
        and item.layout is torch.strided
        and item.device.type == "cpu"
        and item.nbytes >= _LEAST_BYTES
        and item.is_contiguous()
        and not (item.is_conj() or item.is_neg() or item.is_shared())
        and has_memory_of_its_own(item)
        and not weakref.getweakrefcount(item.untyped_storage())
        and not has_other_users(item)
    )
