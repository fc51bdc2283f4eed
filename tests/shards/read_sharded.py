"""A script that every rank runs: `read_sharded.py "NUM_GROUPS SHARD" FOLDER CASE...`; it prints how far a case is from
one process. Programs use parameters other than by calling modules, and modules use them in their own ways."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.data_axis.lockstep import Found, GroupCase, difference, in_groups, in_one_process
from tests.data_axis.train_in_groups import HALVES, accumulate, batches
from tests.shards.train_sharded import net, steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farspan


def is_distributed(model: Any) -> bool:
    return model in farspan.api.plan_by_model


def trained(model: Any, group: int, found: Found) -> Iterator[None]:
    yield from steps(model, group, found, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with torch.no_grad():
        found["after"] = sum(model(x).square().sum().item() for x, _ in batches(99, group, 1 + group))


class Attending(nn.Module):
    """Attention, whose output layer is never called, recurrence, convolution, norms with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recur = nn.LSTM(8, 8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([x, x * 2, x - 1], 1)
        y = y + self.attend(y, y, y, need_weights=False)[0]
        y = self.norm(y + self.recur(y)[0])
        y = y + self.conv(y.transpose(1, 2)).transpose(1, 2)
        return self.scale(y.mean(1))


class Shifted(nn.Module):
    """Uses a view of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x + self.shift[: len(x)]))


def inferred(model: Any, group: int, found: Found) -> Iterator[None]:
    """Evaluation in inference mode, and training on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for begin in (0, 4):
        yield from steps(model, group, found, optimizer, begin)
        with torch.inference_mode():
            found[f"inferred {begin}"] = sum(model(x).square().sum().item() for x, _ in batches(9, group))


ATTENDING = {"attend": "rank:0", "recur": "rank:1", "conv": "rank:1", "norm": "rank:0", "scale": "rank:1"}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Again(nn.Module):
    """Parts of it are computed again in the backward, in both of torch's ways; a function of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + checkpoint(self.second, x, use_reentrant=False)
        first: Any = self.second[0]
        x = checkpoint(lambda y: F.linear(y, first.weight).tanh(), x, use_reentrant=False)
        return self.last(Scaled.apply(x, self.factor))


def written(model: Any, group: int, found: Found) -> Iterator[None]:
    """The program writes into parameters between steps, in its own ways, and trains on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for begin in (0, 4, 8):
        yield from steps(model, group, found, optimizer, begin)
        with torch.no_grad():
            for item in model.parameters():
                item.mul_(0.9)
                item.data.add_(0.01)
            model[0].weight[0] = 0.5
            model[4].bias.copy_(torch.arange(4.0))
            model[2].weight.view(-1)[3:20].mul_(0.5)
            row = model[0].weight.data[1]
            row.sub_(0.1)
            nn.init.constant_(model[2].bias, 0.25)
        with torch.inference_mode():
            found[f"inferred {begin}"] = model(batches(7, group)[0][0]).sum().item()
        found[f"sum {begin}"] = sum(item.abs().sum().item() for item in model.parameters())
        found[f"vector {begin}"] = nn.utils.parameters_to_vector(model.parameters()).norm().item()


def averaged(model: Any, group: int, found: Found) -> Iterator[None]:
    """A moving average of the weights takes their place while it is evaluated; groups evaluate as much as they like."""
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for begin in (0, 4):
        yield from steps(model, group, found, optimizer, begin)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.5)
            kept = [item.clone() for item in model.parameters()]
            for item, ours in zip(model.parameters(), average.parameters(), strict=True):
                item.copy_(ours)
            model.eval()
            found[f"average {begin}"] = sum(
                model(x).square().sum().item() for x, _ in batches(50, group, 1 + 2 * group)
            )
            model.train()
            for item, ours in zip(model.parameters(), kept, strict=True):
                item.copy_(ours)


def put_in_place(model: Any, group: int, found: Found) -> Iterator[None]:
    """Other data take the place of the parameters' (an average, parts of a vector) and go again; what a state
    dictionary gives is written into."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = [item.detach().clone() for item in model.parameters()]
    for begin in (0, 4):
        yield from steps(model, group, found, optimizer, begin)
        for ours, item in zip(average, model.parameters(), strict=True):
            ours.lerp_(item.data, 0.5)
        own = [item.data for item in model.parameters()]
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        for ways in (average, own):
            for item, data in zip(model.parameters(), ways, strict=True):
                item.data = data
            found[f"placed {begin} {ways is own}"] = model(batches(7, group)[0][0]).sum().item()
            found[f"own {begin} {ways is own}"] = sum(item.abs().sum().item() for item in own)
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
        found[f"shorter {begin}"] = model(batches(7, group)[0][0]).sum().item()
        for item in model.state_dict().values():
            item.mul_(0.5)
        found[f"written {begin}"] = sum(item.abs().sum().item() for item in model.parameters())


def drawn(model: Any, group: int, found: Found) -> Iterator[None]:
    """The program initialises weights again: they are the same in all groups."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield from steps(model, group, found, optimizer)
    torch.manual_seed(7)
    for item in model.parameters():
        nn.init.normal_(item)
    found["drawn"] = [item.flatten()[0].item() for item in model.parameters()]


def saved(model: Any, group: int, found: Found) -> Iterator[None]:
    """torch's own files, of one group alone, and loading them into the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from steps(model, group, found, optimizer)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    if group == 1:
        found["alone"] = sum(item.sum().item() for item in model.state_dict().values())
    yield from steps(model, group, found, optimizer, 4)
    model.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    found["loaded"] = sum(item.sum().item() for item in model.state_dict().values())


def asked(model: Any, group: int, found: Found) -> Iterator[None]:
    """All that a program asks of parameters, in one group alone too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for item in model.parameters():
        item.register_hook(lambda gradient: gradient * 0.5)
    yield from steps(model, group, found, optimizer)
    for number, item in enumerate(model.parameters()):
        assert isinstance(item, nn.Parameter) and item.is_leaf and item.dtype is torch.float32
        found[f"numel {number}"] = float(item.numel() + sum(item.shape) + sum(item.stride()))
        found[f"list {number}"] = torch.tensor(item.tolist()).sum().item()
        found[f"array {number}"] = float(item.detach().numpy().sum())
        found[f"text {number}"] = float(len(repr(item)) > 10)
        if group == 1:
            found[f"alone {number}"] = (item - item.mean()).std().item() + item.flatten()[0].item()
    copied = copy.deepcopy(model[0].weight)
    found["copied"] = copied.sum().item()
    yield from steps(model, group, found, optimizer, 4)
    found["copied then"] = copied.sum().item()


class Twice(nn.Module):
    """Gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.inner(x)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + slope.square().sum()


def frozen(model: Any, group: int, found: Found) -> Iterator[None]:
    """Layers are frozen and trained again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        model[2].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        found[f"loss {step}"] = accumulate(model, batches(step, group))
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()


CASES = {
    "attending": GroupCase(Attending, trained, ATTENDING),
    "again": GroupCase(Again, trained, {"first": "rank:0", "second": "rank:1", "factor": "rank:1", "last": "rank:0"}),
    "written": GroupCase(net, written, HALVES),
    "inferred": GroupCase(Shifted, inferred, {"": "rank:1"}),
    "averaged": GroupCase(net, averaged, HALVES),
    "put in place": GroupCase(net, put_in_place, HALVES),
    "drawn": GroupCase(net, drawn, HALVES),
    "saved": GroupCase(net, saved, HALVES),
    "asked": GroupCase(net, asked, HALVES),
    "twice": GroupCase(Twice, trained, {"": "rank:1"}),
    "frozen": GroupCase(net, frozen, HALVES),
}


def main(num_groups: int, shard: str | None, names: list[str]) -> None:
    differences: dict[str, float] = {}
    for name in names:
        wanted = in_one_process(CASES[name], num_groups)
        found = in_groups(CASES[name], num_groups, shard)
        differences[name] = difference(found, wanted[farspan.data_rank()])
    print(json.dumps({"differences": differences}))


if __name__ == "__main__":
    said_groups, _, said_shard = sys.argv[1].partition(" ")
    main(int(said_groups), said_shard or None, sys.argv[3:])
