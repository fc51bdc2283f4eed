"""The same training loop, plainly and distributed, compared to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.cases import CASES, Case
from torch import nn

import farspan

__all__ = ["History", "all_plans", "build", "compare_all", "last_plan", "train", "train_distributed", "train_plainly"]


@dataclass
class History:
    """What a training run leaves: compared with ==, so every bit counts."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, bytes | None]] = field(default_factory=list)
    state: dict[str, bytes] = field(default_factory=dict)

    def differences(self, other: History) -> list[str]:
        """In words, what differs; empty if nothing does."""
        found: list[str] = []
        for step, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            found += [f"step {step}: gradient of {name}" for name in theirs if mine[name] != theirs[name]]
        found += [f"losses {self.losses} != {other.losses}"] if self.losses != other.losses else []
        found += [f"norms {self.norms} != {other.norms}"] if self.norms != other.norms else []
        found += [f"state {name}" for name in other.state if self.state.get(name) != other.state[name]]
        return found


def train(model: nn.Module, case: Case) -> History:
    """Three steps of AdamW with clipping, gradient accumulation over the case's micro-batches."""
    history = History()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in case.batches():
        optimizer.zero_grad()
        losses = []
        for batch in step:
            loss = case.loss(model, batch) / len(step)
            loss.backward()
            losses.append(loss)
        history.gradients.append({name: _bytes(item.grad) for name, item in model.named_parameters()})
        history.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        history.losses.append([loss.item() for loss in losses])
    history.state = {name: _some_bytes(item) for name, item in model.state_dict().items()}
    return history


def build(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.build()


def train_plainly(case: Case) -> History:
    return train(build(case), case)


def train_distributed(
    model: nn.Module, case: Case, plan: Any, *, schedule: str | None = None, seed: int | None = None
) -> History:
    """`model` must be this rank's own copy."""
    return train(farspan.distribute(model, plan=plan, schedule=schedule, seed=seed), case)


def all_plans(case: Case, num_ranks: int) -> dict[str, Any]:
    """The automatic plan and the case's own ones."""
    automatic = {"auto": "auto"} if num_ranks <= case.most_stages else {}
    return {**automatic, **{name: make(num_ranks) for name, make in case.plans.items()}}


def last_plan(case: Case, num_ranks: int) -> dict[str, Any]:
    """The last of these, which is the most unusual one."""
    return dict(list(all_plans(case, num_ranks).items())[-1:])


def compare_all(names: Sequence[str], num_ranks: int) -> dict[str, list[str]]:
    """Train each of the named cases under its last plan on this rank; what differs from the plain loop, by case."""
    found: dict[str, list[str]] = {}
    for name in names:
        case = CASES[name]
        wanted = train_plainly(case)
        for plan_name, plan in last_plan(case, num_ranks).items():
            got = train_distributed(copy.deepcopy(build(case)), case, plan)
            found[f"{name}/{plan_name}"] = got.differences(wanted)
    return found


def _bytes(tensor: Any) -> bytes | None:
    return None if tensor is None else _some_bytes(tensor)


def _some_bytes(tensor: Any) -> bytes:
    plain = tensor.read() if hasattr(tensor, "read") else tensor.detach()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
