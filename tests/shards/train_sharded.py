"""A script that every rank runs: `train_sharded.py "NUM_GROUPS SHARD" FOLDER CASE...`; it prints, as JSON, how far each
case is from one process that averages, and which part of all optimizer state this rank keeps."""

from __future__ import annotations

import copy
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.data_axis.lockstep import Found, GroupCase, difference, in_groups, in_one_process
from tests.data_axis.train_in_groups import HALVES, Tied, accumulate, batches
from torch import Tensor, nn

import farspan
from farspan.execute.optimizers.kept_state import raw_state

NUM_STEPS = 4
FOLDER = ""
kept_bytes: dict[str, int] = {}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def steps(model: Any, group: int, found: Found, optimizer: Any, begin: int = 0) -> Iterator[None]:
    """A few ordinary steps."""
    for step in range(begin, begin + NUM_STEPS):
        optimizer.zero_grad()
        found[f"loss {step}"] = accumulate(model, batches(step, group))
        yield
        optimizer.step()


def note_bytes(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Counts what this rank keeps, without asking for it."""
    tensors = [item for kept in raw_state(optimizer).values() for item in kept.values() if type(item) is Tensor]
    kept_bytes[name] = sum(item.numel() * item.element_size() for item in tensors if item.dim())


def trained_by(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any, int, Found], Iterator[None]]:
    def program(model: Any, group: int, found: Found) -> Iterator[None]:
        optimizer = make(model.parameters())
        yield from steps(model, group, found, optimizer)
        note_bytes(type(optimizer).__name__, optimizer)

    return program


def param_groups(model: Any, group: int, found: Found) -> Iterator[None]:
    """Several groups of parameters, one of which comes later, and a scheduler."""
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias], "weight_decay": 0.5}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)
    for begin in (0, NUM_STEPS):
        for _ in steps(model, group, found, optimizer, begin):
            yield
        scheduler.step()
        if not begin:
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 1e-3})
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def closures(model: Any, group: int, found: Found) -> Iterator[None]:
    """As Lightning steps: forward and backward run in a closure, which farspan averages in."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    is_distributed = model in farspan.api.plan_by_model

    def closure(step: int) -> Any:
        optimizer.zero_grad()
        return accumulate(model, batches(step, group))

    for step in range(NUM_STEPS):
        if is_distributed:
            optimizer.step(functools.partial(closure, step))
        else:
            closure(step)
            yield
            optimizer.step()


def looked_at(model: Any, group: int, found: Found) -> Iterator[None]:
    """The program looks at the state between steps, and changes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for begin in range(0, 3 * NUM_STEPS, NUM_STEPS):
        yield from steps(model, group, found, optimizer, begin)
        for number, item in enumerate(model.parameters()):
            found[f"kept {begin} {number}"] = optimizer.state[item]["exp_avg"].norm().item()
            found[f"step {begin} {number}"] = float(optimizer.state[item]["step"])
            with torch.no_grad():
                optimizer.state[item]["exp_avg"].mul_(0.5)


def asked_once(model: Any, group: int, found: Found) -> Iterator[None]:
    """The program looks at the state once, and then no more."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    found["kept"] = len(optimizer.state)
    yield from steps(model, group, found, optimizer, NUM_STEPS)
    note_bytes("asked once", optimizer)


def equal_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def exchanged(model: Any, group: int, found: Found) -> Iterator[None]:
    """The program exchanges what is kept for parameters of two ranks, and later gives it back."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for begin in range(0, 3 * NUM_STEPS, NUM_STEPS):
        yield from steps(model, group, found, optimizer, begin)
        if begin < 2 * NUM_STEPS:
            for first, last in zip(model[2].parameters(), model[4].parameters(), strict=True):
                optimizer.state[first], optimizer.state[last] = optimizer.state[last], optimizer.state[first]
    note_bytes("exchanged", optimizer)
    for number, item in enumerate(model.parameters()):
        found[f"kept {number}"] = optimizer.state[item]["exp_avg"].norm().item()


def held(model: Any, group: int, found: Found) -> Iterator[None]:
    """The program holds the state, and looks at it after later steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    state = optimizer.state
    yield from steps(model, group, found, optimizer, NUM_STEPS)
    for number, item in enumerate(model.parameters()):
        found[f"kept {number}"] = state[item]["exp_avg_sq"].norm().item()


def put_in_a_dictionary(model: Any, group: int, found: Found) -> Iterator[None]:
    """Saved whole, by all and by one rank alone, and loaded into another optimizer, which goes on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for number, kept in saved["state"].items():
        found.update({f"{number} {name}": item.double().sum().item() for name, item in kept.items()})
    if farspan.data_rank() == 1 and farspan.rank() == 0:
        alone = optimizer.state_dict()
        assert all(alone["state"][n]["exp_avg"].equal(kept["exp_avg"]) for n, kept in saved["state"].items())
    yield from steps(model, group, found, optimizer, NUM_STEPS)
    after = copy.deepcopy(optimizer.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer.load_state_dict(after)
    optimizer.load_state_dict(saved)
    found["lr"] = optimizer.param_groups[0]["lr"]
    yield from steps(model, group, found, optimizer, 2 * NUM_STEPS)
    note_bytes("put in a dictionary", optimizer)


def with_hooks(model: Any, group: int, found: Found) -> Iterator[None]:
    """Its steps get hooks after some, and lose them again: the state is whole meanwhile."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    seen: list[float] = []
    handle = optimizer.register_step_post_hook(
        lambda hooked, *_: seen.append(float(sum(kept["step"] for kept in hooked.state.values())))
    )
    yield from steps(model, group, found, optimizer, NUM_STEPS)
    handle.remove()
    found["seen"] = sum(seen)
    yield from steps(model, group, found, optimizer, 2 * NUM_STEPS)


class Together(torch.optim.Optimizer):
    """Reads what it keeps for other parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        items = [item for each in self.param_groups for item in each["params"] if item.grad is not None]
        for item in items:
            kept = self.state[item].setdefault("mean", torch.zeros_like(item))
            kept.lerp_(item.grad, 0.5)
        scale = 1.0 / (1.0 + sum(self.state[item]["mean"].norm() for item in items))
        for item in items:
            item.sub_(self.state[item]["mean"] * scale)


class Apart(nn.Module):
    """Two heads, of which each group uses its own in some steps, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 16).requires_grad_(False)
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.frozen(x)))


APART = {"frozen": "rank:0", "heads.0": "rank:1", "heads.1": "rank:0", "heads.2": "rank:1"}


def some_unused(model: Any, group: int, found: Found) -> Iterator[None]:
    """Parameters get their first gradient late, or in one group alone, or never."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in batches(step, group):
            F.cross_entropy(model(x, group if step == 2 else 0), y).backward()
        yield
        optimizer.step()
    found["kept"] = len(optimizer.state_dict()["state"])


def tied(model: Any, group: int, found: Found) -> Iterator[None]:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * step + group))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def checkpointed(model: Any, group: int, found: Found) -> Iterator[None]:
    """A checkpoint is saved, and loaded into the model and another optimizer, which go on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    is_distributed = model in farspan.api.plan_by_model
    weights, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    if is_distributed:
        assert farspan.data_rank() or len(optimizer.state)  # one group alone has looked at it
        farspan.save(FOLDER, model=model, optimizer=optimizer)
    yield from steps(model, group, found, optimizer, NUM_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if is_distributed:
        farspan.load(FOLDER, model=model, optimizer=optimizer)
    else:
        model.load_state_dict(weights)
        optimizer.load_state_dict(kept)
    yield from steps(model, group, found, optimizer, 2 * NUM_STEPS)
    note_bytes("checkpointed", optimizer)


def copied(model: Any, group: int, found: Found) -> Iterator[None]:
    """A copy of the model goes on, with what was kept for the model; on the same batches in all groups."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    other = copy.deepcopy(model)
    taken = torch.optim.AdamW(other.parameters(), lr=1e-2)
    taken.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield from steps(other, 0, found, taken, NUM_STEPS)
    found.update({f"copied {name}": item.norm().item() for name, item in other.named_parameters()})


def left_out(model: Any, group: int, found: Found) -> Iterator[None]:
    """Parameters leave the optimizer, and come again: what was kept for them is there. All of it can be saved."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    torch.save(optimizer.state_dict(), io.BytesIO())
    all_of_them = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = all_of_them[:-3]
    yield from steps(model, group, found, optimizer, NUM_STEPS)
    found["kept"] = len(optimizer.state)
    optimizer.param_groups[0]["params"] = all_of_them
    yield from steps(model, group, found, optimizer, 2 * NUM_STEPS)


def kept_in_a_list(model: Any, group: int, found: Found) -> Iterator[None]:
    """LBFGS has the list of its parameters among its attributes, and steps with all of them together."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = accumulate(model, batches(step, group))
        yield
        optimizer.step(lambda loss=loss: loss)


def case(program: Any, build: Any = net, plan: Any = HALVES) -> GroupCase:
    return GroupCase(build, program, plan)


CASES = {
    "AdamW": case(trained_by(lambda items: torch.optim.AdamW(items, lr=1e-2, foreach=True))),
    "SGD": case(trained_by(lambda items: torch.optim.SGD(items, lr=0.1))),
    "Adafactor": case(trained_by(lambda items: torch.optim.Adafactor(items, lr=1e-2))),
    "tensor lr": case(trained_by(lambda items: torch.optim.Adam(items, lr=torch.tensor(1e-2)))),
    "param groups": case(param_groups),
    "closures": case(closures),
    "looked at": case(looked_at),
    "asked once": case(asked_once),
    "exchanged": case(exchanged, equal_layers),
    "held": case(held),
    "put in a dictionary": case(put_in_a_dictionary),
    "hooks": case(with_hooks),
    "together": case(trained_by(Together)),
    "LBFGS": case(kept_in_a_list),
    "unused": case(some_unused, Apart, APART),
    "tied": case(tied, Tied, {"embed": "rank:0", "body": "rank:1", "head": "rank:0"}),
    "checkpointed": case(checkpointed),
    "copied": case(copied),
    "left out": case(left_out),
}


def main(num_groups: int, shard: str | None, names: list[str]) -> None:
    differences: dict[str, float] = {}
    parts: dict[str, float] = {}
    for name in names:
        wanted = in_one_process(CASES[name], num_groups)
        whole = dict(kept_bytes)
        kept_bytes.clear()
        found = in_groups(CASES[name], num_groups, shard)
        differences[name] = difference(found, wanted[farspan.data_rank()])
        parts.update({key: held / whole[key] for key, held in kept_bytes.items() if whole[key]})
        kept_bytes.clear()
    print(json.dumps({"differences": differences, "parts": parts}))


if __name__ == "__main__":
    FOLDER = sys.argv[2]
    said_groups, _, said_shard = sys.argv[1].partition(" ")
    main(int(said_groups), said_shard or None, sys.argv[3:])
