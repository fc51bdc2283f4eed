"""A whole model as bytes, and state dictionaries that are kept: as in one process, on every rank."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, weights
from torch import Tensor, nn

import farspan


class Pickled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12)
        self.state, self.last = nn.GRU(12, 12, batch_first=True), nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.first.weight.tag = "shared"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).relu())
        return self.last(self.second(self.state(x[:, None])[0][:, 0]) * self.scale)


def pickled() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Pickled()


def train(model: nn.Module, number: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def named_in(data: bytes) -> list[Any]:
    """What of farspan a pickle refers to."""
    return [item for _, item, _ in pickletools.genops(data) if isinstance(item, str) and "farspan" in item]


def described(model: Any) -> Any:
    parameters = [
        (name, type(p).__name__, p.requires_grad, p.stride(), p.tolist())
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    shared = (model.second.weight is model.first.weight, getattr(model.first.weight, "tag", None))
    return parameters, [item.tolist() for item in model.buffers()], shared, sorted(vars(model))


def as_bytes(model: nn.Module) -> Any:
    train(model, 2)
    model(X)  # the statistics of a forward that has not run yet are written too
    data = pickle.dumps(model)
    file = io.BytesIO()
    torch.save([model, model.last, list(model.parameters()), copy.deepcopy(model)], file)
    file.seek(0)
    read = pickle.loads(data)
    saved, last, parameters, copied = torch.load(file, weights_only=False)
    found = [described(item) for item in (read, saved, copied)]
    kinds = [(type(p), p.requires_grad, p.tolist()) for p in (*parameters, *last.parameters())]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "parameters": list(model.parameters())}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)["model"]
    return named_in(data), found, kinds, train(read, 2), {name: item.tolist() for name, item in state.items()}


def kept_state(model: nn.Module) -> Any:
    kept, seen = [], []
    views = [item.view(-1) for item in model.state_dict().values()]
    for _ in range(2):
        train(model, 1)
        kept.append(model.state_dict())
        seen.append({name: item.tolist() for name, item in kept[0].items()})
    copies = copy.deepcopy(kept[0])
    average = {name: sum(state[name] for state in kept) / 2 for name in kept[0]}  # of twice the same
    own = model.state_dict()
    with torch.no_grad():
        before = model(X).sum()
        for item in own.values():
            item.mul_(0.5)  # writes into the parameters
        seen += [before.item(), model(X).sum().item()]
    seen += [weights(model), [item.tolist() for item in views], {name: item.tolist() for name, item in average.items()}]  # type: ignore[union-attr]
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    seen += [{name: item.tolist() for name, item in state.items()} for state in torch.load(file, weights_only=True)]
    model.load_state_dict(kept[0])  # is what the model has: nothing happens
    seen.append(weights(model))
    model.load_state_dict(copies)
    return seen, weights(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("story", "build"), [(as_bytes, pickled), (kept_state, mlp)], ids=["bytes", "kept state"])
def test_what_is_saved_and_kept_is_that_of_one_process(story: Any, build: Any, num_ranks: int) -> None:
    wanted = story(build())
    for rank, got in enumerate(on_ranks(num_ranks, lambda model: story(farspan.distribute(model)), build)):
        assert got == wanted, f"rank {rank}"


def test_values_with_a_gradient_are_saved_as_such() -> None:
    """The state of a recurrent network saved in a checkpoint without `detach()` came back as a constant."""

    def program(model: nn.Module) -> Any:
        out = farspan.distribute(model)(X)
        file = io.BytesIO()
        torch.save({"out": out, "mean": out.mean(), "detached": out.detach()}, file)
        file.seek(0)
        return {name: (item.requires_grad, item.is_leaf, item.tolist()) for name, item in torch.load(file).items()}

    out = mlp()(X)
    wanted = {"out": (True, True, out.tolist()), "mean": (True, True, out.mean().item())}
    for got in on_ranks(2, program):
        assert got == {**wanted, "detached": (False, True, out.tolist())}
