"""With a seed given, dropout and other random numbers are the same for every plan and number of ranks, bit for bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.programs import randomness
from tests.support.cases import Case
from tests.support.parity import History, train, train_distributed
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

import farspan
from farspan.call.draws.drawing_functions import DRAWS
from farspan.call.draws.generators import GENERATORS
from farspan.execute.step.generator_states import load_generators, save_generators

_generator = torch.Generator().manual_seed(11)
STEPS = [[(torch.randn(6, 4, 8, generator=_generator),) for _ in range(2)] for _ in range(2)]
X = STEPS[0][0][0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.b(self.drop(torch.tanh(self.a(x)))))


class Stack(nn.Module):
    """Blocks, walked in any order; one of them twice."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for number in [*torch.randperm(3).tolist(), 1] if self.is_shuffled else [0, 1, 2, 1]:
            x = self.blocks[number](x)
        return self.head(x)

    is_shuffled = False


class Functional(Block):
    """Drawn by functions: of recorded and of plain tensors, new ones and in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.2, self.training)
        x = F.dropout(x, 0.5, training=False) + 0.1 * torch.randn_like(x)
        x = x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7) * torch.empty(8).uniform_(0.5, 1.5)
        return self.b(F.dropout(x, 0.2)) + torch.normal(0.0, 0.1, (8,)) + F.dropout(torch.ones(8))


class StochasticDepth(Block):
    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.rand(x.shape[0], 1, 1) < 0.6).float()
        return x + kept * self.b(self.a(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.4)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Noise.apply(self.a(x))) + Noise.apply(x) + 0.1 * torch.rand_like(x)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)


def shuffled() -> nn.Module:
    model = Stack()
    model.is_shuffled = True
    return model


class Unchecked(Stack):
    def __init__(self) -> None:
        super().__init__(Functional)
        self.first = nn.Linear(8, 8)

    order = (0, 1, 2, 1)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.run(self.blocks[number], x)
        return self.head(F.dropout(x, 0.1))


class Checkpointed(Unchecked):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[return-value]


class Nested(Unchecked):
    """A checkpoint in a checkpoint, and torch's own restoring of generators switched off."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        def twice(x: Tensor) -> Any:
            return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

        return checkpoint(twice, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


class Reentrant(Unchecked):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)  # type: ignore[return-value]


def jitter(x: Tensor) -> Tensor:
    """A function of a library that torch has never heard of."""
    if has_torch_function_unary(x):
        return handle_torch_function(jitter, (x,), x)
    return x * torch.rand_like(x) + torch.rand_like(x)


class Foreign(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(jitter(self.a(x))) + jitter(torch.tanh(x))


class SeedsItself(Block):
    """The same noise every time, because it says so; and what it draws from a generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            noise = torch.randn(8)
        return self.b(self.a(x) + noise) + torch.rand(8, generator=torch.Generator().manual_seed(5))


def case(build: Callable[[], nn.Module]) -> Case:
    return Case(name="", build=build, batches=lambda: STEPS, loss=lambda model, batch: model(batch[0]).square().mean())


def plans(model: nn.Module, num_ranks: int) -> dict[str, Any]:
    """On one rank all is one leaf; on two, blocks are leaves, or containers; on three, also by the automatic plan."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    dealt = {name: f"rank:{number % num_ranks}" for number, name in enumerate(owners)}
    parts = dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in owners)
    whole = {name: f"rank:{number % num_ranks}" for number, name in enumerate(parts)}
    return [{"auto": "auto"}, {"dealt": dealt, "whole": whole}, {"auto": "auto", "dealt": dealt}][num_ranks - 1]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def histories(make: Callable[[], nn.Module], num_ranks: int) -> Iterator[tuple[str, History]]:
    for name, plan in plans(make(), num_ranks).items():
        models = [build(make) for _ in range(num_ranks)]
        for rank, history in enumerate(
            run_threads(num_ranks, lambda rank: train_distributed(models[rank], case(make), plan, seed=0))  # noqa: B023
        ):
            yield f"{num_ranks} ranks, plan {name}, rank {rank}", history


MODELS = {
    "dropout": Stack,
    "functions": lambda: Stack(Functional),
    "stochastic depth": lambda: Stack(StochasticDepth),
    "attention": lambda: Stack(Attention),
    "transformer": lambda: Stack(encoder_layer),
    "recurrent": lambda: Stack(Recurrent),
    "autograd function": lambda: Stack(Noisy),
    "checkpointed": Checkpointed,
    "a function of another library": lambda: Stack(Foreign),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_random_numbers_for_every_plan_and_number_of_ranks(name: str) -> None:
    make = MODELS[name]
    ((_, wanted),) = histories(make, 1)
    for num_ranks in (2, 3):
        for where, history in histories(make, num_ranks):
            assert history.differences(wanted) == [], where


def test_a_random_order_of_blocks_is_the_same_whether_these_are_leaves_or_containers() -> None:
    (_, wanted), *others = histories(shuffled, 2)
    for where, history in others:
        assert history.differences(wanted) == [], where


@pytest.mark.parametrize("make", [Checkpointed, Nested, Reentrant])
def test_a_checkpoint_recomputes_with_the_masks_of_the_forward(make: Callable[[], nn.Module]) -> None:
    def ordered(build: Callable[[], Any]) -> nn.Module:
        model = build()
        if make is Reentrant:
            model.order = (0, 1, 2)  # it adds up the gradients of a module's two calls in another order
        return model

    ((_, wanted),) = histories(lambda: ordered(Unchecked), 1)
    ((_, history),) = histories(lambda: ordered(make), 1)
    assert history.differences(wanted) == []


def test_who_seeds_in_the_forward_gets_what_was_asked_for() -> None:
    def make() -> nn.Module:
        return Stack(SeedsItself)

    ((_, history),) = histories(make, 1)
    assert history.differences(train(build(make), case(make))) == []


def outputs(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Of four calls in train mode, two in eval mode, and two more in train mode."""
    model = build(make)

    def program(rank: int) -> list[Any]:
        farspan.distribute(model, seed=seed)
        found: list[Any] = []
        for mode in (True, True, True, True, False, False, True, True):
            model.train(mode)
            found.append(model(X).tolist())
        return found

    return run_threads(1, program)[0]


def test_every_call_has_its_own_masks_and_eval_has_none() -> None:
    found = outputs(Stack)
    training = found[:4] + found[6:]
    assert all(a != b for i, a in enumerate(training) for b in training[:i])
    assert found[4] == found[5]
    model = build(Stack).eval()
    assert found[4] == model(X).tolist()


def test_every_draw_of_a_call_has_its_own_mask() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            ones = torch.ones_like(x)
            return torch.stack([self.drop(ones), self.drop(ones), F.dropout(ones), F.dropout(ones)])

    a, b, c, d = outputs(Twice)[0]
    assert len({repr(mask) for mask in (a, b, c, d)}) == 4


def test_the_seed_decides() -> None:
    first, again, other = outputs(Stack), outputs(Stack), outputs(Stack, seed=1)
    assert first == again
    assert first[0] != other[0]
    assert first[4] == other[4]


def test_compiled_parts_repeat_their_masks() -> None:
    def make() -> nn.Module:
        model = Stack()
        model.blocks[0].compile(backend="eager")
        return model

    assert outputs(make) == outputs(make)


def test_the_programs_own_generators_are_left_alone() -> None:
    (alone,) = run_threads(1, randomness.train)
    finished = run_processes(2, randomness.__file__)
    assert [process.stderr for process in finished if process.code] == []
    for found in [alone, *(json.loads(process.stdout.splitlines()[-1]) for process in finished)]:
        assert found["after"] == found["plainly"]
        assert found["losses"] == alone["losses"]


def test_all_that_torch_says_to_draw_is_known() -> None:
    unknown: list[str] = []
    for room in (torch, torch.Tensor, F):
        for name in dir(room):
            packet: Any = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
            overloads = [getattr(packet, item) for item in packet.overloads()] if hasattr(packet, "overloads") else []
            draws = any(torch.Tag.nondeterministic_seeded in item.tags for item in overloads)
            if draws and callable(getattr(room, name)) and getattr(room, name) not in DRAWS:
                unknown.append(f"{room.__name__}.{name}")
    assert unknown == ["torch.miopen_rnn"]  # behind torch.lstm on ROCm


def test_generators_are_set_only_while_nobody_draws() -> None:
    saved = save_generators()
    is_set = threading.Event()

    def load() -> None:
        load_generators(saved)
        is_set.set()

    with GENERATORS:
        threading.Thread(target=load, daemon=True).start()
        assert not is_set.wait(0.2)
    assert is_set.wait(20.0)
