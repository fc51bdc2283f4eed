"""A script that every rank runs: `train_in_groups.py "NUM_GROUPS [SHARD]" CASE...`; it prints differences by case, as
JSON. The variable IN_ONE_PROCESS may name a file of what `as_numbers` gave of one process, which saves finding it."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.data_axis.lockstep import Found, GroupCase, difference, in_groups, known_or_in_one_process
from torch import Tensor, nn

import farspan

NUM_STEPS = 4


def batches(step: int, group: int, num_micro_batches: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Those of a step, other ones in each group."""
    generator = torch.Generator().manual_seed(1000 * step + group)
    return [
        (torch.randn(3, 8, generator=generator), torch.randint(4, (3,), generator=generator))
        for _ in range(num_micro_batches)
    ]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


WIDE = {"0": "rank:0+rank:1", "1": "rank:0+rank:1", "2": "rank:0+rank:1", "3": "rank:1", "4": "rank:1"}
HALVES = {"0": "rank:0", "1": "rank:0", "2": "rank:0", "3": "rank:1", "4": "rank:1"}


def accumulate(model: Any, given: list[tuple[Tensor, Tensor]]) -> Tensor:
    """An accumulation loop; the loss of all of it."""
    losses = []
    for x, y in given:
        loss = F.cross_entropy(model(x), y) / len(given)
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def plain(model: Any, group: int, found: Found) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        found[f"loss {step}"] = accumulate(model, batches(step, group))
        yield
        optimizer.step()


def whole_batches(model: Any, group: int, found: Found) -> Iterator[None]:
    """A loop without accumulation; its batches may be cut."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x, y = (torch.cat(each) for each in zip(*batches(step, group, 4), strict=True))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        found[f"loss {step}"] = loss.item()
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def clipped(model: Any, group: int, found: Found) -> Iterator[None]:
    """The loss is read before the step: nothing is averaged then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(NUM_STEPS):
        found[f"loss {step}"] = accumulate(model, batches(step, group)).item()
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def read_between(model: Any, group: int, found: Found) -> Iterator[None]:
    """Gradients are read, and changed, after each backward, and go on being added to."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(batches(step, group, 3)):
            F.cross_entropy(model(x), y).backward()
            yield
            found[f"gradient {step} {number}"] = model[0].weight.grad.abs().sum()
            for item in model.parameters():
                item.grad.mul_(0.7)
        optimizer.step()


def kept_between(model: Any, group: int, found: Found) -> Iterator[None]:
    """A gradient and a view of it are kept over steps, and used where losses alone have been read since a backward."""
    optimizer, kept, row = torch.optim.SGD(model.parameters(), lr=0.1), None, None
    for step in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = accumulate(model, batches(step, group))
        if step % 2:
            found[f"loss {step}"] = loss.item()
        yield
        if kept is None or row is None:
            kept = model[0].weight.grad
            row = kept.t()[1]
        found[f"row {step}"] = row.abs().sum() if step < 2 else sum(row.tolist())
        found[f"kept {step}"] = (kept * 2).sum()
        kept.mul_(0.5)
        optimizer.step()


def unequal(model: Any, group: int, found: Found) -> Iterator[None]:
    """Groups with another number of micro-batches each, of other sizes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        given = [(x[: 1 + step % 3], y[: 1 + step % 3]) for x, y in batches(step, group, 1 + group + step % 2)]
        found[f"loss {step}"] = accumulate(model, given)
        yield
        optimizer.step()


class Heads(nn.Module):
    """Uses the head that it is told to; the third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


HEADS_APART = {"body": "rank:0", "heads.0": "rank:1", "heads.1": "rank:0", "heads.2": "rank:1"}


def unused(model: Any, group: int, found: Found) -> Iterator[None]:
    """Each group uses a head of its own in some steps: where the other has no gradient, it counts as zeros."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in batches(step, group):
            F.cross_entropy(model(x, group if step % 2 else 0), y).backward()
        yield
        found.update({f"has {step} {name}": float(item.grad is not None) for name, item in model.named_parameters()})
        optimizer.step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def tied(model: Any, group: int, found: Found) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + group)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for tokens in torch.randint(11, (2, 3, 5), generator=generator):
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def two_optimizers(model: Any, group: int, found: Found) -> Iterator[None]:
    """One for the body and one for the rest, which step in turn, after backwards of their own."""
    body, head = (torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model[:3], model[3:]))
    for step in range(NUM_STEPS):
        for optimizer in (body, head):
            optimizer.zero_grad()
            found[f"loss {step}"] = accumulate(model, batches(step, group))
            yield
            optimizer.step()


def two_backwards(model: Any, group: int, found: Found) -> Iterator[None]:
    """Two losses of one forward, and one more forward, in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        (x, y), (x2, y2) = batches(step, group)
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        found[f"mean {step}"] = out.mean().item()
        out.square().mean().backward()
        F.cross_entropy(model(x2), y2).backward()
        yield
        optimizer.step()


def frozen(model: Any, group: int, found: Found) -> Iterator[None]:
    """Layers are frozen and trained again between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(NUM_STEPS):
        model[2].requires_grad_(step % 2 == 0)
        model[0].requires_grad_(step != 2)
        optimizer.zero_grad()
        found[f"loss {step}"] = accumulate(model, batches(step, group))
        yield
        found[f"norm {step}"] = nn.utils.get_total_norm([i.grad for i in model.parameters() if i.grad is not None])
        optimizer.step()


def evaluated(model: Any, group: int, found: Found) -> Iterator[None]:
    """Evaluation between steps, on as many batches as each group has, and a moving average of the weights."""
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(NUM_STEPS):
        accumulate(model, batches(step, group))
        yield
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            model.eval()
            given = batches(100 + step, group, 1 + 2 * group)
            found[f"accuracy {step}"] = sum((model(x).argmax(1) == y).sum().item() for x, y in given)
            model.train()
    found.update({f"average {name}": item.detach().sum().item() for name, item in average.named_parameters()})


def scaled(model: Any, group: int, found: Found) -> Iterator[None]:
    """Of one group the gradients overflow in one step: both skip it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for x, y in batches(step, group):
            factor = float("inf") if step == 1 and group == 1 else 1.0
            scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        yield
        scaler.unscale_(optimizer)
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5).nan_to_num(0.0, 0.0)
        scaler.step(optimizer)
        scaler.update()
        found[f"scale {step}"] = scaler.get_scale()


def normed_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
    )


NORMED_HALVES = {"0": "rank:0", "1": "rank:0", "2": "rank:0", "3": "rank:1", "4": "rank:1", "5": "rank:1"}


def by_hand(model: Any, group: int, found: Found) -> Iterator[None]:
    """No optimizer at all."""
    for step in range(NUM_STEPS):
        found[f"loss {step}"] = accumulate(model, batches(step, group))
        yield
        with torch.no_grad():
            for item in model.parameters():
                item -= 0.1 * item.grad
                item.grad = None


def hooked(model: Any, group: int, found: Found) -> Iterator[None]:
    """Hooks on parameters see the gradients of their own group."""
    next(model.parameters()).register_hook(lambda gradient: 2 * gradient)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        found[f"loss {step}"] = accumulate(model, batches(step, group))
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def penalised(model: Any, group: int, found: Found) -> Iterator[None]:
    """A penalty on gradients that `torch.autograd.grad` gives, which are the group's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (x, y), _ = batches(step, group)
        loss = F.cross_entropy(model(x), y)
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        found[f"penalty {step}"] = sum(item.square().sum().item() for item in first)
        loss.backward()
        yield
        optimizer.step()


def set_by_hand(model: Any, group: int, found: Found) -> Iterator[None]:
    """Gradients that the program has computed and sets, with no backward: those of its own group."""
    optimizer, weights = torch.optim.AdamW(model.parameters(), lr=1e-2), list(model.parameters())
    for step in range(NUM_STEPS):
        parts = [torch.autograd.grad(F.cross_entropy(model(x), y), weights) for x, y in batches(step, group)]
        for number, item in enumerate(weights):
            item.grad = parts[0][number] + 0.5 * parts[1][number]
        yield
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()


def net_and_outside() -> nn.Module:
    """A model, and what is trained with it: a module, a parameter and a plain tensor."""
    model: Any = net()
    model.outside = [nn.Linear(4, 4), nn.Parameter(torch.ones(8)), torch.zeros(4, requires_grad=True)]
    return model


def learned_outside(model: Any, group: int, found: Found) -> Iterator[None]:
    """What is trained outside the model: read, clipped, stepped with the model and by an optimizer of its own."""
    head, scale, shift = model.outside
    both = torch.optim.SGD([*model.parameters(), shift], lr=0.1, momentum=0.9)
    alone = torch.optim.AdamW([*head.parameters(), scale], lr=1e-2)
    for step in range(NUM_STEPS):
        for optimizer in (both, alone):
            optimizer.zero_grad()
        for x, y in batches(step, group):
            F.cross_entropy(head(model(x * scale)) + shift, y).backward()
        yield
        if step % 2:
            found[f"norm {step}"] = nn.utils.clip_grad_norm_([*head.parameters(), scale], 0.3)
        for optimizer in (alone, both):
            optimizer.step()
        found[f"outside {step}"] = torch.cat([head.weight.flatten(), scale, shift]).detach().sum()


class Mixed(nn.Module):
    """Parameters of several types and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.wide = nn.Linear(16, 16, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.narrow = nn.Linear(16, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first((x * self.turn).abs())
        x = self.wide(x.double()).float()
        x = x + self.conv(x.view(-1, 1, 4, 4)).flatten(1)
        return self.narrow(x.bfloat16()).float()


CASES = {
    "plain": GroupCase(net, plain, HALVES),
    "clipped": GroupCase(net, clipped, HALVES),
    "read between": GroupCase(net, read_between, HALVES),
    "kept between": GroupCase(net, kept_between, HALVES),
    "unequal": GroupCase(net, unequal, HALVES),
    "unused": GroupCase(Heads, unused, HEADS_APART),
    "tied": GroupCase(Tied, tied, {"embed": "rank:0", "body": "rank:1", "head": "rank:1"}),
    "wide": GroupCase(net, clipped, WIDE),
    "wide, read between": GroupCase(net, read_between, WIDE),
    "wide and tied": GroupCase(Tied, tied, {"embed": "rank:0", "body": "rank:0+rank:1", "head": "rank:1"}),
    "cut": GroupCase(net, whole_batches, HALVES, micro_batches=4),
    "cut and wide": GroupCase(net, whole_batches, WIDE, micro_batches=4),
    "two optimizers": GroupCase(net, two_optimizers, HALVES),
    "two backwards": GroupCase(net, two_backwards, HALVES),
    "frozen": GroupCase(net, frozen, HALVES),
    "evaluated": GroupCase(net, evaluated, HALVES),
    "scaled": GroupCase(net, scaled, HALVES),
    "batch norm": GroupCase(normed_net, evaluated, NORMED_HALVES),
    "by hand": GroupCase(net, by_hand, HALVES),
    "hooked": GroupCase(net, hooked, HALVES),
    "penalised": GroupCase(net, penalised, HALVES),
    "set by hand": GroupCase(net, set_by_hand, HALVES),
    "learned outside": GroupCase(net_and_outside, learned_outside, HALVES),
    "mixed": GroupCase(
        Mixed, clipped, {"first": "rank:0", "turn": "rank:0", "wide": "rank:1", "conv": "rank:0", "narrow": "rank:1"}
    ),
}


def main(num_groups: int, shard: str | None, names: list[str]) -> None:
    differences: dict[str, float] = {}
    digest = hashlib.sha256()
    for name in names:
        wanted = known_or_in_one_process(name, CASES[name], num_groups)
        found = in_groups(CASES[name], num_groups, shard)
        differences[name] = difference(found, wanted[farspan.data_rank()])
        digest.update(repr([item.tolist() if isinstance(item, Tensor) else item for item in found.values()]).encode())
    print(json.dumps({"differences": differences, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    num_groups, _, shard = sys.argv[1].partition(" ")
    main(int(num_groups), shard or None, sys.argv[2:])
