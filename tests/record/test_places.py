"""Places that the program names: `with farspan.on(...)` and `x.to("rank:...")`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.places import Named, engine, rank_of, ranks, same_with_places
from tests.support.plainly import SEQUENCES, X, Y, assert_same_as_plainly, train
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import PlanError
from farspan.graph import Graph
from farspan.plan import Plan
from farspan.record.parameters.copying import plan_by_model


class Glued(Named):
    """Ops between modules in places of their own, nested, left by an exception; a write in place; a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.activation = nn.GELU()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with self.on(1):
            y = torch.tanh(x) * self.scale
            assert self.is_at(y, 1)
            with self.on(2):
                z = self.activation(y)  # a module that the plan places nowhere
                assert self.is_at(z, 2)
                inside = self.b(z)
                assert self.is_at(inside, 0)
            with contextlib.suppress(KeyError), self.on(0):
                raise KeyError
            w = y + z
            assert self.is_at(w, 1)
            first, second = torch._foreach_mul([w, x], 0.5)
            assert self.is_at(first, 1) and self.is_at(second, 1)
            inside += first
            assert self.is_at(inside, 0)  # a write stays with what it writes
        last = torch.relu(inside) + second
        assert self.is_at(last, 0)
        return self.c(last)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ops_between_modules_run_where_the_program_says(num_ranks: int) -> None:
    plan = {"a": "rank:0", "b": "rank:0", "scale": "rank:0"}
    plan |= {"c": f"rank:{num_ranks - 1}"}
    if num_ranks == 3:
        plan["scale"] = "rank:1"
    same_with_places(Glued, train, num_ranks, ranks(num_ranks, 0, 1, 2), plan=plan)


def test_the_loss_runs_where_the_program_says() -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)) for _ in range(3)]

    def program(rank: int) -> list[int]:
        model = farspan.distribute(models[rank], plan={"0": "rank:0", "1": "rank:1"} | {"1.bias": "rank:2"})
        out = model(X)
        found = [rank_of(F.cross_entropy(out, Y))]
        for place in ("rank:0", "rank:2", "rank:1/cpu"):
            with farspan.on(place):
                found.append(rank_of(F.cross_entropy(out, Y)))
        found.append(rank_of(F.cross_entropy(out, Y)))
        farspan.flush()
        return found

    assert all(found[1:4] == [0, 2, 1] and found[0] == found[4] for found in run_threads(3, program))


def test_moving_gives_a_copy_and_keeps_what_is_there() -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)) for _ in range(2)]

    def program(rank: int) -> Any:
        model: Any = farspan.distribute(models[rank], plan={"0": "rank:0", "1": "rank:1"})
        h = model[0](X)
        assert h.to("rank:0") is h and h.to("rank:0/cpu") is h
        copied, there, wide = h.to("rank:0", copy=True), h.to("rank:1"), h.to(device="rank:1/cpu", dtype=torch.float64)
        again = h.to("rank:1", torch.float16, True)
        assert copied is not h and [rank_of(item) for item in (copied, there, wide, again)] == [0, 1, 1, 1]
        assert (wide.dtype, again.dtype, there.dtype) == (torch.float64, torch.float16, torch.float32)
        there.add_(1)
        assert rank_of(there) == 1
        mask = (X > 0).to("rank:1")  # plain: every rank has it
        assert rank_of(mask) == 1 and rank_of(mask.sum()) == 1
        weight = model[0].weight.to("rank:1")
        assert rank_of(weight) == 1 and weight.requires_grad
        (there.sum() + wide.sum() + weight.sum() + copied.sum()).backward()
        first = model[0]
        same = torch.equal(there, h + 1), torch.equal(wide, h.double()), torch.equal(again, h.half())
        return same, mask.tolist() == (X > 0).tolist(), first.weight.grad.tolist(), first.bias.grad.tolist()

    same, masks, weight, bias = zip(*run_threads(2, program), strict=True)
    assert set(same) == {(True, True, True)} and all(masks)
    assert weight[0] == weight[1] and bias[0] == bias[1] == [18.0] * 8
    assert torch.allclose(torch.tensor(weight[0]), X.sum(0) * 3 + 1)


class Recurrent(Named):
    """Three cells that feed each other over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros(x.shape[0], 8) for _ in range(3)]
        feedback = states[0]
        for step in range(x.shape[1]):
            y = x[:, step] + feedback
            for number, cell in enumerate(self.cells):
                y = self.moved(y, number)
                assert self.is_at(y, number)
                states[number] = cell(y, states[number])
                y = states[number]
            feedback = self.moved(torch.tanh(y), 0)
        return self.head(feedback)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_feedback_over_time_through_all_ranks(num_ranks: int) -> None:
    places = ranks(num_ranks, 0, 1, 2)
    plan = {f"cells.{number}": place for number, place in enumerate(places)} | {"head": places[0]}
    same_with_places(Recurrent, lambda model: train(model, SEQUENCES), num_ranks, places, plan=plan)


class Roaming(Named):
    """Parts in another order each time, each fed by any of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.head = nn.Linear(8, 5)
        self.generator = [7]

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.generator[0])
        self.generator[0] += 1
        outputs = [x]
        free = [x]  # each is used twice at most: the order in which gradients are added does not matter
        for number in torch.randperm(6, generator=generator)[:4].tolist():
            other = free.pop(int(torch.randint(len(free), (), generator=generator)))
            place = int(torch.randint(3, (), generator=generator))
            with self.on(place):
                y = outputs[-1] + other * 0.5
                assert y is not x and (type(y) is Tensor or self.is_at(y, place))
            outputs.append(torch.tanh(self.parts[number](self.moved(y, (place + 1) % 3))))
            free.append(outputs[-1])
        return self.head(outputs[-1])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_any_order_and_connections_that_change(num_ranks: int) -> None:
    plan = {f"parts.{number}": f"rank:{number % num_ranks}" for number in range(6)} | {"head": "rank:0"}

    def program(model: Any) -> Any:
        model.generator = [7]
        return train(model)

    same_with_places(Roaming, program, num_ranks, ranks(num_ranks, 0, 1, 2), plan=plan)


class Halves(Named):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shared = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.moved(self.a(x), 0)
        with self.on(1):
            y = torch.tanh(y) + self.moved(x, 0)
        return self.shared(self.b(y))


DEVICES = ("rank:0/cpu:0", "rank:0/cpu:1")
PLANS: list[Any] = [
    {"a": DEVICES[0], "b": DEVICES[1], "shared": DEVICES[0]},
    Plan(stages=("rank:0/cpu", "rank:0/cpu"), placement={"a": 0, "b": 1, "shared": 0}),
]


@pytest.mark.parametrize("plan", PLANS)
def test_several_devices_in_one_process(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving to cpu:1 copies, as moving to another GPU would: tensors of two devices never share memory."""
    numbers: set[int] = set()
    add = Graph.add

    def adding(self: Graph, call: Any, *args: Any, **options: Any) -> None:
        numbers.add(call.stage)
        add(self, call, *args, **options)

    monkeypatch.setattr(Graph, "add", adding)
    places = DEVICES if isinstance(plan, dict) else ("rank:0/cpu", "rank:0/cpu")
    same_with_places(Halves, train, 1, (places[1], places[0]), plan=plan)
    assert numbers == {0, 1}


class Dense(nn.Module):
    """Each layer sees what all those before it have made, which is always larger than what it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8 + 2 * number, 2) for number in range(6)])
        self.head = nn.Linear(20, 5)
        self.ranks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat((x, torch.relu(layer(x))), -1)
            if self in plan_by_model:
                self.ranks.append(rank_of(x))
        return self.head(x)


def test_data_do_not_go_back_for_ops_between_modules() -> None:
    plan = {f"layers.{number}": f"rank:{number // 2}" for number in range(6)} | {"head": "rank:2"}

    def program(model: Any) -> Any:
        result = train(model)
        assert model.ranks == ([0, 0, 1, 1, 2, 2] * 8 if model in plan_by_model else [])
        return result

    assert_same_as_plainly(Dense, program, 3, plan=plan)


class Tied(nn.Module):
    """A head whose weight is that of the first module, and larger than what it is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.ranks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(torch.tanh(self.second(self.first(x))), self.first.weight.T)
        if self in plan_by_model:
            self.ranks.append(rank_of(out))
        return out


def test_a_parameter_that_is_larger_is_not_sent() -> None:
    def program(model: Any) -> Any:
        result = train(model, X[:2], lambda out: out.square().mean())
        assert set(model.ranks) <= {0}
        return result

    assert_same_as_plainly(Tied, program, 2, plan={"first": "rank:0", "second": "rank:1"})


BAD: list[tuple[str, str]] = [
    ("rank:2", "there is no rank 2"),
    ("rank1", "'rank1' is not a place"),
    ("rank:0/abc", "a device that torch does not know"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("place", "words"), BAD)
def test_a_place_that_is_not_is_a_named_error(place: str, words: str, num_ranks: int) -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)) for _ in range(2)]

    def program(rank: int) -> Any:
        plan = {"0": "rank:0", "1": f"rank:{num_ranks - 1}"}
        h = farspan.distribute(models[rank], plan=plan)[0](X)  # type: ignore[index]
        recorder = engine().recorder
        texts: list[str] = []
        for use in (lambda: h.to(place), lambda: X.to(device=place), lambda: farspan.on(place).__enter__()):
            with pytest.raises(PlanError) as caught:
                use()
            assert caught.value.why and caught.value.hint and recorder.here == ()
            texts.append(str(caught.value))
        return texts

    for texts in run_threads(num_ranks, program):
        assert all(words in text for text in texts)
        if place == "rank:2":
            known = "1 process, rank:0" if num_ranks == 1 else "2 processes, rank:0 to rank:1"
            assert all(known in text for text in texts)


def test_without_a_distributed_model_only_the_form_counts() -> None:
    with farspan.on("rank:0"):
        assert (X + 1).tolist() == (1 + X).tolist()
    with pytest.raises(PlanError, match="there is no rank 5"), farspan.on("rank:5"):
        pass
