"""What modules do besides returning: to the lists, dictionaries and objects they are given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import SEQUENCES, Y, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.comm.channels import Channels
from farspan.errors import FarspanError


class Memory:
    """As a key-value cache: objects in a list, made by whoever comes first."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.num_seen = 0

    def update(self, keys: Tensor, number: int) -> Tensor:
        while len(self.layers) <= number:
            self.layers.append(Layer())
        layer = self.layers[number]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys], 1)
        if number == 0:
            self.num_seen += keys.shape[1]
        return layer.keys

    def length(self, number: int) -> int:
        keys = self.layers[number].keys if number < len(self.layers) else None
        return 0 if keys is None else keys.shape[1]


@dataclass
class Layer:
    keys: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class Attends(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        keys = memory.update(self.k(x), self.number)
        memory.layers[self.number].notes["length"] = keys.shape[1]
        return x + F.scaled_dot_product_attention(self.q(x), keys, keys)


class Remembers(nn.Module):
    """Passes one memory through all its blocks, twice, and reads from it what Python would."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attends(number) for number in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        memory = Memory()
        for half in x.chunk(2, 1):
            y = half
            for block in self.blocks:
                y = block(y, memory)
        assert memory.num_seen == memory.length(3) == memory.layers[2].notes["length"] == x.shape[1]
        keys = [layer.keys for layer in memory.layers]
        return self.head(y[:, -1]) + sum(key.mean() for key in keys if key is not None) * memory.num_seen


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: list[Tensor], table: dict[str, Tensor], found: OrderedDict[str, Any]) -> Any:
        seen.append(self.linear(x))
        if len(seen) > 2:
            seen.pop(0)
        table["sum"] = table.get("sum", 0) + seen[-1]
        found[f"after {len(found)}"] = seen
        found.move_to_end("first")
        return torch.tanh(seen[-1]), seen, table


class Lists(nn.Module):
    """Lists and dictionaries that are filled, handed back, and stay the caller's own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Appends() for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = [x[:, 0]]
        table: dict[str, Tensor] = {}
        found: OrderedDict[str, Any] = OrderedDict(first=seen)
        y = x[:, 0]
        for part in self.parts:
            y, back, same = part(y, seen, table, found)
            assert back is seen and same is table
        assert len(seen) == 2 and list(found)[-1] == "first" and all(item is seen for item in found.values())
        return self.head(y + seen[0] + table["sum"])


class PassesOn(nn.Module):
    """Hands its argument on beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), extra


class Relay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.parts = nn.ModuleList([PassesOn() for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        extra = self.first(x)
        y = x
        for part in self.parts:
            y, passed = part(y, extra)
            assert passed is extra
        return self.head(y * extra)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("build", [Remembers, Lists, Relay])
def test_arguments_that_a_module_changes_are_changed_everywhere(build: Callable[[], nn.Module], num_ranks: int) -> None:
    whole = {f"{part}.{i}": f"rank:{i * num_ranks // 4}" for part in ("blocks", "parts") for i in range(4)}
    names = dict(build().named_children())
    plan = {name: rank for name, rank in whole.items() if name.split(".")[0] in names}
    plan |= {name: f"rank:{num_ranks - 1}" for name in ("head", "first") if name in names}
    assert_same_as_plainly(build, lambda model: train(model, SEQUENCES), num_ranks, plan=plan)


def test_what_is_only_passed_by_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the first rank's blocks lie in the memory that the second rank's blocks are given."""
    num_sent: list[int] = []
    send = Channels.send

    def counting(self: Channels, message: Any, tensors: Any, metas: Any) -> None:
        num_sent.append(len(tensors))
        send(self, message, tensors, metas)

    class Forgets(Remembers):
        def forward(self, x: Tensor) -> Tensor:
            memory = Memory()
            for block in self.blocks:
                x = block(x, memory)
            return self.head(x[:, -1])

    models = [Forgets() for _ in range(2)]
    plan = {f"blocks.{number}": f"rank:{number // 2}" for number in range(4)} | {"head": "rank:1"}

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank], plan=plan)
        F.cross_entropy(model(SEQUENCES), Y).backward()
        farspan.flush()

    monkeypatch.setattr(Channels, "send", counting)
    run_threads(2, program)
    assert num_sent == [1, 1]  # one activation, one gradient


class LooksAtPlaceAndKind(nn.Module):
    """Needs no data of its first argument, as tables of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        return places * self.scale.to(device=x.device)


class WithPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.places, self.last = nn.Linear(8, 8), LooksAtPlaceAndKind(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.places(x))


def test_what_is_only_passed_by_has_its_place_and_kind() -> None:
    plan = {"first": "rank:0", "places": "rank:1", "last": "rank:0"}
    assert_same_as_plainly(WithPlaces, train, 2, plan=plan)


class DependsOnData(nn.Module):
    """What it does to its argument follows from the data, which the run on fakes cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: list[Any]) -> Tensor:
        if type(x).__name__ == "Tensor":  # the real run
            seen.append(1)
        return self.linear(x)


def test_a_change_that_was_not_foreseen_is_a_named_error() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = DependsOnData(), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x, []))

    models = [Model() for _ in range(2)]

    def program(rank: int) -> None:
        model = farspan.distribute(models[rank])
        model(SEQUENCES).sum().backward()
        farspan.flush()

    with pytest.raises(FarspanError, match="something else to its arguments"):
        run_threads(2, program)


class Balanced(nn.Module):
    """Keeps what it has computed beside its result, as routers keep their balance losses; and a running state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.loss: Any = None
        self.seen: list[Tensor] = []
        self.num_calls = 0
        self.kind = "none"
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.loss = y.square().mean()
        if self.num_calls:
            y = y + self.state * 0.1  # what the call before has left
        self.state = y.detach().mean(0)
        self.seen.append(y)
        self.num_calls += 1
        self.kind = f"call {self.num_calls}"
        self.mean = 0.9 * self.mean + 0.1 * self.state
        return y


class Router(nn.Module):
    """A module whose sub-module keeps the attributes; its caller reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Balanced(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([Router() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for router in self.routers:
            x = router(router(x))
        routers: Any = self.routers
        kept: Any = [router.inner[0] for router in routers]
        assert [item.kind for item in kept] == [f"call {item.num_calls}" for item in kept]
        assert all(len(item.seen) % 2 == 0 for item in kept)
        total = sum(item.loss + item.seen[-2].mean() for item in kept) * kept[0].num_calls
        for item in kept:
            item.seen.clear()
        return self.head(x) + total


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_a_module_writes_on_itself_is_seen_everywhere(num_ranks: int) -> None:
    plan = {f"routers.{i}": f"rank:{i * num_ranks // 3}" for i in range(3)} | {"head": f"rank:{num_ranks - 1}"}

    def program(model: Any) -> Any:
        result = train(model)
        kept = [router.inner[0] for router in model.routers]
        return result, [(item.num_calls, item.kind, item.loss.item(), item.state.tolist()) for item in kept]

    assert_same_as_plainly(Mixture, program, num_ranks, plan=plan)
