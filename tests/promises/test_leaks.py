"""What modules reach outside themselves for: lists of others, hooks, caches; and what runs on fakes leave there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.promises.test_effects import Mixture
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn


class Board:
    def __init__(self) -> None:
        self.notes: list[Any] = []


class Tells(nn.Module):
    """Puts what it computes where its caller did not ask for it."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.board = board

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        self.board.notes.append(hidden)
        return self.b(hidden)


class Gossip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.board = Board()
        self.parts = nn.ModuleList([Tells(self.board) for _ in range(4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        assert len(self.board.notes) == 4
        extra = sum(hidden.square().mean() for hidden in self.board.notes)
        self.board.notes.clear()
        return self.head(x) * extra


def hooked(model: Any) -> Any:
    """Hooks on whole modules and inside them, that look, keep and change; registered before, removed between."""
    seen: list[Any] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output.detach().mean())

    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(output)
        return output * 1.5

    def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: Any) -> Any:
        return (args[0] + 0.25,), kwargs

    inner: Any = model.routers[0].inner
    handles = [
        model.routers[1].register_forward_hook(change),
        inner[1].register_forward_hook(keep),
        model.routers[2].inner.register_forward_pre_hook(before, with_kwargs=True),
    ]
    first = train(model)
    numbers = [float(item.detach().mean()) for item in seen]
    for handle in handles:
        handle.remove()
    return first, numbers, train(model), len(seen)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_a_module_tells_others_is_seen_everywhere(num_ranks: int) -> None:
    assert_same_as_plainly(Gossip, train, num_ranks)


class Borrows(nn.Module):
    """Uses modules and parameters that it is only given, or knows from elsewhere."""

    def __init__(self, friends: list[Any], reads: bool) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.friends = friends
        self.reads = reads

    def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        hidden = torch.tanh(self.own(x))
        if self.reads and hidden.mean().item() > 2:
            return hidden
        hidden = norm(hidden)
        if self.friends[0].weight.requires_grad:
            hidden = hidden * self.friends[0].weight.mean()
        return norm(hidden) + self.friends[0](x)


class Borrowing(nn.Module):
    """What each layer borrows lies on the first and on the last stage."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.friend = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Borrows([self.friend], reads) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.norm)
        return self.head(x)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("reads", [False, True])
def test_a_module_uses_what_belongs_to_others(reads: bool, num_ranks: int) -> None:
    """Found by the run on fakes; where that cannot get so far, by the owner's."""
    assert_same_as_plainly(lambda: Borrowing(reads), train, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_forward_hooks_see_and_change_on_every_rank(num_ranks: int) -> None:
    assert_same_as_plainly(Mixture, hooked, num_ranks)


class Caching(nn.Module):
    """Keeps a function with a cache on itself, made at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def positions(self, size: int) -> Tensor:
        return torch.arange(size) / size

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cached_positions"):
            self.cached_positions = functools.lru_cache(self.positions)
        return torch.tanh(self.linear(x) + self.cached_positions(x.shape[-1]))


@functools.lru_cache(maxsize=4)
def offsets(size: int) -> tuple[Tensor, Tensor]:
    return torch.arange(size) / size, torch.ones(size)


class CachingOutside(nn.Module):
    """Uses a function whose results are kept for the whole process, and asks for data after that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        steps, ones = offsets(x.shape[-1])
        y = self.linear(x) + steps * ones
        return torch.tanh(y) if torch.isfinite(y).all() else y


class CachedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        offsets.cache_clear()
        self.layers = nn.ModuleList([CachingOutside() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + offsets(5)[0].sum()


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Caching() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Sliced(nn.Module):
    """Slices and expanded tensors between modules: `contiguous()` is a copy there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = y.unsqueeze(1).expand(-1, 2, -1).contiguous().view(x.shape[0], -1)
        z = torch.tanh(self.b(z))[:, ::2].contiguous().view(-1)
        return self.c(y * z.mean())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("build", [Cached, CachedOutside, Sliced])
def test_what_runs_on_fakes_leave_stays_out_of_the_real_run(build: Callable[[], nn.Module], num_ranks: int) -> None:
    assert_same_as_plainly(build, train, num_ranks)
