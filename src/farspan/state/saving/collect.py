"""Collects what a program saves: what one rank alone has, what every rank has, and what is no tensor.

model=...        each tensor by its name              its owner writes it; one of all where all have it
optimizer=...    for each parameter what is kept      the parameter's owner
                 groups                               all have them
scheduler=..., extra={...}                            all have them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from farspan.call.leaf import Placed
from farspan.errors import CheckpointError
from farspan.execute.engine import Engine
from farspan.execute.optimizers.kept_state import raw_state
from farspan.execute.optimizers.lent_state import Loan, lend
from farspan.record.ops.overrides import read_data
from farspan.record.tensor import LazyTensor
from farspan.record.unrecorded import plainly
from farspan.state.generators import is_generator, one_to_json
from farspan.state.names import aliases_of, check_key, named_tensors, parameter_names, touch
from farspan.state.values import encode

__all__ = ["Collected", "collect", "has_plain_state", "is_stateful"]


@dataclass(slots=True)
class Collected:
    """The parts of what is to be saved.

    Attributes:
        objects: What every rank has alike, as JSON.
        states: What optimizers keep for parameters of this rank, as JSON: by optimizer, by parameter.
        owned: Tensors that this rank alone has, of its group.
        alone: Tensors that this rank alone has, of all groups.
        shared: Tensors that every rank has.
        loans: The states of optimizers that may be copied while the program goes on.
    """

    objects: dict[str, Any] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    owned: dict[str, torch.Tensor] = field(default_factory=dict)
    alone: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    loans: list[Loan] = field(default_factory=list)


def collect(engine: Engine, objects: Mapping[str, Any], found: Collected, *, lends: bool) -> None:
    """Take apart what the program saves; nothing may be recorded that has not run.

    Args:
        engine: This rank's.
        objects: What the program saves, by name.
        found: What is filled.
        lends: Whether optimizers lend what nobody else uses, instead of having it copied at once.

    Raises:
        CheckpointError: Something in it cannot be saved.
    """
    collector = _Collector(engine, parameter_names(engine, objects), found, lends=lends)
    found.objects = {key: collector.describe(value, key) for key, value in objects.items() if value is not None}


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def has_plain_state(value: Any) -> bool:
    """Returns whether it is an optimizer that keeps its state where torch's do, and no more than that."""
    return isinstance(value, Optimizer) and "state" in vars(value) and type(value).state_dict is Optimizer.state_dict


class _Collector:
    def __init__(self, engine: Engine, names: Mapping[int, str], found: Collected, *, lends: bool) -> None:
        self.engine = engine
        self.placed: Mapping[int, Placed] = engine.recorder.placed
        self.names = names
        self.found = found
        self.lends = lends

    def describe(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, nn.Module):
            return self.module(value, path)
        if has_plain_state(value):
            with plainly(self.engine.recorder):
                return self.optimizer(value, path)
        if is_stateful(value):
            return {"kind": "state_dict", "value": self.encode(value.state_dict(), path)}
        if is_generator(value):
            return {"kind": "generator", "value": one_to_json(value)}
        if type(value) is dict and (path == "extra" or any(self.is_object(item) for item in value.values())):
            items = {check_key(key, path): self.describe(item, f"{path}/{key}") for key, item in value.items()}
            return {"kind": "mapping", "items": items}
        return {"kind": "value", "value": self.encode(value, path)}

    def encode(self, value: Any, path: str) -> Any:
        with plainly(self.engine.recorder):
            return encode(value, path, self.share)

    def is_object(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(self.is_object(item) for item in value.values())
        return isinstance(value, nn.Module) or is_stateful(value) or is_generator(value)

    def module(self, module: nn.Module, path: str) -> dict[str, Any]:
        with plainly(self.engine.recorder):
            for name, tensor in named_tensors(module):
                self.put(f"{path}/{name}", tensor)
        extra = {
            name: self.encode(part.get_extra_state(), f"{path}/{name}/extra state")
            for name, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }
        return {"kind": "module", "aliases": aliases_of(module), "extra_state": extra}

    def optimizer(self, optimizer: Optimizer, path: str) -> dict[str, Any]:
        state = self.state(optimizer)
        groups: list[dict[str, Any]] = []
        own = self.found.states.setdefault(path, {})
        shards = self.engine.groups.shards
        for number, group in enumerate(optimizer.param_groups):
            names: list[str] = []
            for index, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter), f"group {number}/{index}")
                names.append(name)
                item = self.placed.get(id(parameter))
                is_here = None if item is None or shards is None else shards.is_saved_here(optimizer, item)
                if parameter in state and is_here is not False and (item is None or item.is_owned):
                    put = self.share if item is None else self.keep if is_here else self.own
                    own[name] = encode(_own_tensors(state[parameter]), f"{path}/{name}", put)
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append({"params": names, "settings": encode(settings, f"{path}/group {number}", self.share)})
        strays = [key for key in state if not isinstance(key, torch.Tensor)]
        other = encode({str(key): state[key] for key in strays}, f"{path}/other", self.share)
        return {"kind": "optimizer", "groups": groups, "other": other}

    def state(self, optimizer: Optimizer) -> Any:
        """Returns what it keeps, lent if that can be."""
        num_known_users = self.engine.values.optimizers.num_users(optimizer)
        loan = lend(optimizer, num_known_users, self.engine.deadline_s) if self.lends else None
        if loan is None:
            return raw_state(optimizer)
        self.found.loans.append(loan)
        return loan.state

    def put(self, name: str, tensor: torch.Tensor) -> None:
        item = self.placed.get(id(tensor))
        if item is None:
            touch(tensor)
            encode(tensor, name, self.share)
        elif item.is_owned:
            shards = self.engine.groups.shards
            if shards is None or not shards.is_divided_parameter(item):
                encode(tensor, name, self.own)
            elif not shards.is_away(item):
                encode(tensor, name, self.keep)

    def own(self, name: str, tensor: torch.Tensor) -> None:
        self._add(self.found.owned, name, tensor)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        self._add(self.found.alone, name, tensor)

    def share(self, name: str, tensor: torch.Tensor) -> None:
        self._add(self.found.shared, name, tensor)

    def _add(self, to: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        if any(name in known for known in (self.found.owned, self.found.alone, self.found.shared)):
            raise CheckpointError(f"two tensors would both be saved as {name}.", hint="other names for one of them")
        to[name] = tensor


def _own_tensors(state: Any) -> Any:
    """Returns what an optimizer keeps for a parameter of this rank, with plain tensors in place of recorded ones."""
    if isinstance(state, LazyTensor):
        data = state._value.data
        return read_data(state) if data is None else data
    if type(state) in (dict, list, tuple):
        items = state.values() if type(state) is dict else state
        plain = [_own_tensors(item) for item in items]
        return dict(zip(state, plain, strict=True)) if type(state) is dict else type(state)(plain)
    return state
