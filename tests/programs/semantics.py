"""One rank: runs programs distributed, some of them plainly too, and prints what they give, by name.

python semantics.py silent_failures
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.support.models import GPT
from torch import Tensor, nn

import farspan

__all__ = ["GROUPS"]

_generator = torch.Generator().manual_seed(11)
X = torch.randn(6, 8, generator=_generator)
Y = torch.randint(5, (6,), generator=_generator)
IDS = torch.randint(17, (2, 8), generator=_generator)

GROUPS: dict[str, dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]]] = {}


def program(group: str, build: Callable[[], nn.Module]) -> Callable[[Callable[[Any], Any]], Any]:
    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        GROUPS.setdefault(group, {})[function.__name__] = (build, function)
        return function

    return register


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def loss_of(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), Y)


def train(model: Any, loss: Callable[[Any, Tensor], Tensor] = loss_of) -> Any:
    """Losses, gradients and state of two steps of three micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, gradients = [], []
    for _ in range(2):
        optimizer.zero_grad()
        for shift in range(3):
            losses.append(loss(model, X + shift))
            losses[-1].backward()
        gradients.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        optimizer.step()
    return [loss.item() for loss in losses], gradients, state(model)


def state(model: nn.Module) -> Any:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


# What torch.distributed.pipelining 2.13 gets wrong without a word.


@program("silent_failures", lambda: GPT(tied=True))
def tied_weights_stay_tied(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
    found = state(model)
    return model.head.weight is model.embed.weight, found["head.weight"] == found["embed.weight"], found


@program("silent_failures", Layers)
def accumulated_gradients_are_not_rescaled(model: Any) -> Any:
    found = []
    for _ in range(3):  # never zeroed: each goes on top
        for shift in range(4):
            loss_of(model, X + shift).backward()
        found.append([p.grad.tolist() for p in model.parameters()])
    return found


@program("silent_failures", Layers)
def evaluation_with_a_second_batch_size_is_new(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return [model(X[:size] + size).tolist() for size in (6, 3, 5, 6, 1)]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8, affine=False)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norms[2](self.norms[1](self.b(self.norms[0](self.a(x))))))


@program("silent_failures", Normed)
def batchnorm_counts_real_batches_alone(model: Any) -> Any:
    first = train(model)
    model.eval()
    evaluated = train(model)
    model.train()
    return first, evaluated, train(model), [norm.num_batches_tracked.item() for norm in model.norms]


class Dropping(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(self.layers[0](x)))


@program("silent_failures", Dropping)
def dropout_is_off_after_eval(model: Any) -> Any:
    with torch.no_grad():
        training = model(X).tolist()
        model.eval()
        evaluated = [model(X).tolist(), model(X).tolist()]
        return evaluated, evaluated[0] != training, model.train()(X).tolist() != evaluated[0]


# Autocast.


class Shared(nn.Module):
    """Uses its parameters several times: in one autocast region each is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.a(torch.tanh(self.a(x))))
        return self.head(self.b(torch.tanh(self.b(x))))


def lower(cache: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)


@program("autocast", Shared)
def autocast_around_model_and_loss(model: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        with lower():
            return loss_of(model, x)

    return train(model, loss)


@program("autocast", Shared)
def autocast_around_the_model_alone(model: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        with lower():
            out = model(x)
        return F.cross_entropy(out.float(), Y)

    return train(model, loss)


@program("autocast", Shared)
def autocast_without_cache(model: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        with lower(cache=False):
            return loss_of(model, x)

    return train(model, loss)


@program("autocast", Shared)
def two_regions_in_one_micro_batch(model: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        with lower():
            first = loss_of(model, x)
        with lower():
            return first + loss_of(model, x + 1)

    return train(model, loss)


@program("autocast", Shared)
def one_region_around_two_calls(model: Any) -> Any:
    def loss(model: Any, x: Tensor) -> Tensor:
        with lower():
            with torch.no_grad():
                model(x)
            return loss_of(model, x) + loss_of(model, x + 1)

    return train(model, loss)


@program("autocast", Shared)
def backward_inside_the_region(model: Any) -> Any:
    for _ in range(2):
        with lower():
            for shift in range(3):
                with torch.autocast("cpu", enabled=False):
                    hidden = model.a(X + shift)  # its backward, in float32, runs under autocast
                F.cross_entropy(model.head(model.b(hidden)), Y).backward()
    return [p.grad.tolist() for p in model.parameters()]


class Inside(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with lower():
            x = torch.tanh(self.a(x)) @ self.scale
            with torch.autocast("cpu", enabled=False):
                x = torch.tanh(self.b(x.float()))
        return self.head(x.float())


@program("autocast", Inside)
def autocast_inside_the_model(model: Any) -> Any:
    return train(model)


class Decorated(Shared):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@program("autocast", Decorated)
def autocast_as_a_decorator(model: Any) -> Any:
    return train(model, lambda model, x: F.cross_entropy(model(x).float(), Y))


# Choices drawn by the host.


class Skips(Layers):
    """LayerDrop by three generators."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            draws = (random.random, lambda: torch.rand([]), np.random.rand)
            if not self.training or draws[number % 3]() < 0.6:
                x = x + torch.tanh(layer(x))
        return self.head(x)


@program("host_choices", Skips)
def layers_are_dropped_alike(model: Any) -> Any:
    """torch's draws are the model's own (another seed than the program's), so only that ranks agree is compared."""
    trained = train(model)
    return [len(part) for part in trained], all(value == value for value in trained[0])


# torch.compile.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.norm(self.a(x))))


class Blocks(nn.Module):
    def __init__(self, wrap: Callable[[Any], Any] = lambda block: block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([wrap(Block()) for _ in range(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


num_compiled = 0


def counted(graph: Any, inputs: Any) -> Any:
    global num_compiled
    num_compiled += 1
    return graph.forward


def compiled(module: Any) -> Any:
    return torch.compile(module, backend=counted, fullgraph=True)


def compiled_in_place(module: Any) -> Any:
    module.compile(backend=counted, fullgraph=True)
    return module


def trained_and_evaluated(model: Any) -> Any:
    found = train(model)
    model.eval()
    with torch.no_grad():
        return found, model(X[:4]).tolist()


@program("compiled", lambda: Blocks(compiled))
def compiled_leaves(model: Any) -> Any:
    return trained_and_evaluated(model), num_compiled > 0


@program("compiled", lambda: Blocks(compiled_in_place))
def leaves_compiled_in_place(model: Any) -> Any:
    return trained_and_evaluated(model), num_compiled > 0


@program("compiled", Blocks)
def compiled_after_distribute(model: Any) -> Any:
    return trained_and_evaluated(compiled(model))


@program("compiled", lambda: compiled(Blocks()))
def compiled_before_distribute(model: Any) -> Any:
    return trained_and_evaluated(model)


@program("compiled", Blocks)
def compiled_in_place_after_distribute(model: Any) -> Any:
    return trained_and_evaluated(compiled_in_place(model))


@program("compiled", Blocks)
def another_model_is_compiled(model: Any) -> Any:
    """It has functions that the program has not called before, and one that draws."""
    teacher = compiled(nn.Sequential(nn.Linear(8, 8), nn.ELU(), nn.Dropout(0.5), nn.Linear(8, 5)))
    losses = [F.mse_loss(model(X), teacher(X)).item() for _ in range(2)]
    return losses, num_compiled > 0, torch.rand(2).tolist()


def results(build: Callable[[], nn.Module], run: Callable[[Any], Any], *, with_plain: bool) -> list[str]:
    """What the program gives when it is distributed, before that what the plain one gives."""
    global num_compiled
    found = []
    for distribute in (lambda model: model, farspan.distribute)[not with_plain :]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        num_compiled = 0
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # it compiles the code of one class a few times only
        model = copy.deepcopy(build())
        found.append(json.dumps(run(distribute(model))))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    programs = GROUPS[sys.argv[1]].items()
    turns = [number % num_ranks == rank for number in range(len(programs))]  # what is plain is the same everywhere
    print(
        json.dumps(
            {name: results(*parts, with_plain=turn) for turn, (name, parts) in zip(turns, programs, strict=True)}
        )
    )
