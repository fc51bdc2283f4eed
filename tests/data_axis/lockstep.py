"""Programs that train in groups, and the same in one process that averages the gradients of all groups itself.

A program is a generator: it yields where gradients are averaged. In groups nothing happens there, for farspan does it
by itself; in one process one copy of it runs for each group, all in lockstep, and their gradients are averaged where
they yield. What it puts into `found` is compared.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import farspan

__all__ = ["Found", "GroupCase", "as_numbers", "difference", "in_groups", "in_one_process", "known_or_in_one_process"]

Found = dict[str, Any]
"""Tensors and numbers, by name."""


@dataclass(frozen=True)
class GroupCase:
    """A model, and what trains it: `program(model, group, found)`."""

    build: Callable[[], nn.Module]
    program: Callable[[Any, int, Found], Iterator[None]]
    plan: Mapping[str, str] | str = "auto"
    """For two ranks in each group."""
    micro_batches: int | None = None


def in_one_process(case: GroupCase, num_groups: int) -> list[Found]:
    """What each group finds."""
    torch.manual_seed(0)
    first = case.build()
    models = [first, *(copy.deepcopy(first) for _ in range(num_groups - 1))]
    found: list[Found] = [{} for _ in models]
    programs = [case.program(model, group, found[group]) for group, model in enumerate(models)]
    while True:
        over = [next(program, StopIteration) is StopIteration for program in programs]
        if all(over):
            break
        assert not any(over), "the groups yield as often as each other"
        _average(models)
    for group, model in enumerate(models):
        found[group].update(_state_of(model))
    return found


def known_or_in_one_process(name: str, case: GroupCase, num_groups: int) -> list[Found]:
    """The same, from the file that the variable IN_ONE_PROCESS names, where there is one."""
    path = os.environ.get("IN_ONE_PROCESS")
    return json.loads(Path(path).read_text())[name] if path else in_one_process(case, num_groups)


def in_groups(case: GroupCase, num_groups: int, shard: str | None = None) -> Found:
    """What this rank's group finds."""
    torch.manual_seed(0)
    found: Found = {}
    plan = case.plan if len_of_group(num_groups) > 1 else "auto"
    model = farspan.distribute(
        case.build(), plan=plan, data_parallel=num_groups, shard=shard, micro_batches=case.micro_batches
    )
    for _ in case.program(model, farspan.data_rank(), found):
        pass
    found = {name: item.item() if isinstance(item, torch.Tensor) else item for name, item in found.items()}
    found.update({name: item.clone() for name, item in _state_of(model).items()})
    return found


def as_numbers(found: Found) -> Found:
    """The same without tensors, for JSON."""
    return {name: item.tolist() if isinstance(item, torch.Tensor) else item for name, item in found.items()}


def len_of_group(num_groups: int) -> int:
    """How many ranks a group has."""
    return int(os.environ["WORLD_SIZE"]) // num_groups


def difference(found: Found, wanted: Found) -> float:
    """The largest difference between two findings, relative to the largest number of each."""
    assert list(found) == list(wanted), (list(found), list(wanted))
    worst = 0.0
    for name, item in wanted.items():
        ours, theirs = (torch.as_tensor(each, dtype=torch.float64) for each in (found[name], item))
        assert ours.isfinite().equal(theirs.isfinite()), name
        if theirs.numel():
            off = (ours - theirs).nan_to_num().abs().max() / theirs.nan_to_num().abs().max().clamp(min=1e-3)
            worst = max(worst, float(off))
    return worst


def _state_of(model: nn.Module) -> Found:
    return {f"state {name}": item.detach() for name, item in model.state_dict().items() if item.is_floating_point()}


def _trained(model: nn.Module) -> list[torch.Tensor]:
    """The model's parameters, and what it has in a list of trained things outside of it."""
    outside: list[Any] = getattr(model, "outside", [])
    tensors = [list(item.parameters()) if isinstance(item, nn.Module) else [item] for item in outside]
    return [*model.parameters(), *(item for part in tensors for item in part)]


def _average(models: list[nn.Module]) -> None:
    """What a window's end means: gradients are averaged, buffers are the first group's."""
    for items in zip(*(_trained(model) for model in models), strict=True):
        gradients = [item.grad for item in items]
        there = [gradient for gradient in gradients if gradient is not None]
        if there:
            mean = torch.stack(there).sum(0) / len(models)
            for item, gradient in zip(items, gradients, strict=True):
                if gradient is None:
                    item.grad = mean.clone()
                else:
                    gradient.copy_(mean)
    for items in zip(*(model.buffers() for model in models), strict=True):
        for item in items[1:]:
            item.copy_(items[0])
