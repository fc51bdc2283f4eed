"""Activations computed again in the backward: the same losses, gradients, weights and buffers, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.promises.test_randomness import MODELS
from tests.promises.test_randomness import build as build_seeded
from tests.promises.test_randomness import case as case_of
from tests.support.cases import CASES
from tests.support.loop import on_ranks
from tests.support.parity import build, last_plan, train, train_plainly
from tests.support.plainly import X, Y, assert_same_as_plainly
from tests.support.plainly import train as train_twice
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import PlanError
from farspan.plan import Plan
from farspan.torch_private.calls import recompute_through

CHOICES: dict[str, Any] = {"all": True, "every leaf": ["*"]}
FINER = {
    "gpt": ["blocks.*"],
    "gpt_tied": ["blocks.?.mlp", "head"],
    "unet": ["down.*", "up.1"],
    "encoder_decoder": ["*.?.self_attn", "decoder"],
    "batchnorm": ["blocks.*"],
    "structures": ["parts.*"],
    "siamese": ["layers"],
    "no_parameters": ["squash"],
}


def assert_same(build: Callable[[], nn.Module], program: Callable[[Any], Any], num_ranks: int, **options: Any) -> None:
    """`program(model)` gives on every rank what it gives without remat."""
    torch.manual_seed(0)
    model = build()

    def run(**options: Any) -> list[Any]:
        models = [copy.deepcopy(model) for _ in range(num_ranks)]
        torch.manual_seed(1)
        return run_threads(num_ranks, lambda rank: program(farspan.distribute(models[rank], **options)))

    remat = options.pop("remat")
    assert run(**options, remat=remat) == run(**options)


# Same numbers.


@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_one_process(name: str) -> None:
    case, num_ranks = CASES[name], 2
    wanted = train_plainly(case)
    for choice, remat in {**CHOICES, **({"finer": FINER[name]} if name in FINER else {})}.items():
        for plan_name, plan in last_plan(case, num_ranks).items():
            models = [build(case) for _ in range(num_ranks)]

            def program(rank: int) -> Any:
                return train(farspan.distribute(models[rank], plan=plan, remat=remat), case)  # noqa: B023

            for rank, history in enumerate(run_threads(num_ranks, program)):
                assert history.differences(wanted) == [], f"{choice}, plan {plan_name}, rank {rank}"


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *itertools.product(list(MODELS), (True, ["blocks.*"])),
        ("dropout", ["blocks.0", "blocks.1.a", "head"]),
    ],
)
def test_the_same_random_numbers_are_drawn_again(name: str, remat: Any) -> None:
    make, case = MODELS[name], case_of(MODELS[name])
    for num_ranks in (1, 2) if remat is True else (2,):

        def program(remat: Any, num_ranks: int = num_ranks) -> Any:
            models = [build_seeded(make) for _ in range(num_ranks)]
            torch.manual_seed(1)
            return run_threads(num_ranks, lambda rank: train(farspan.distribute(models[rank], remat=remat), case))

        for history, wanted in zip(program(remat), program(False), strict=True):
            assert history.differences(wanted) == []


class Statistics(nn.Module):
    """Counts and statistics of every kind; the output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("set_again", torch.ones(8))
        self.register_buffer("by_data", torch.ones(8))
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        mean: Any = self.mean
        mean.mul_(0.9).add_(x.detach().mean(0))
        self.by_data.data.mul_(1.1)  # type: ignore[operator]
        self.set_again = self.set_again * 1.01  # type: ignore[operator]
        self.times += 1
        return torch.tanh(self.linear(self.norm(x)) * self.by_data * self.set_again + mean * self.times)


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Statistics() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


@pytest.mark.parametrize(("remat", "num_ranks"), list(itertools.product([True, ["parts.*"], ["parts"], ["*"]], [1, 2])))
def test_running_statistics_and_counts_are_updated_once(remat: Any, num_ranks: int) -> None:
    def program(model: Any) -> Any:
        found = train_twice(model)
        if num_ranks == 1:
            assert [part.times for part in model.parts] == [8, 8, 8]
            assert model.parts[0].norm.num_batches_tracked.item() == 8
        return found

    assert_same_as_plainly(WithStatistics, program, num_ranks, remat=remat)


# It takes place.


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x * 2.0)).exp()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.make("first"), self.make("second")
        self.head = nn.Linear(8, 5)

    def make(self, name: str) -> Part:
        return Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


CALLS: list[str] = []


class Counting(Part):
    """Not for ranks that are threads: each would see the others' calls as a global that changes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(self.name) if type(x) is Tensor else None
        return super().forward(x)


class Counted(Parts):
    def make(self, name: str) -> Part:
        return Counting(name)


def calls_of_a_step(num_micro_batches: int = 2, **options: Any) -> dict[str, int]:
    def program(model: nn.Module) -> None:
        farspan.distribute(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            CALLS.clear()  # the first step ran on fakes too
            for _ in range(num_micro_batches):
                F.cross_entropy(model(X), Y).backward()
            optimizer.step()

    on_ranks(1, program, Counted)
    return {name: CALLS.count(name) for name in ("first", "second")}


@pytest.mark.parametrize(
    ("remat", "first", "second"),
    [
        (False, 2, 2),
        ([], 2, 2),
        (True, 4, 4),
        (["*"], 4, 4),
        ([""], 4, 4),
        (["first"], 4, 2),
        (["sec*"], 2, 4),
        (["first.inner"], 2, 2),  # saves nothing but its input and its weight, which are there anyway
        (["first", "first.inner", "second"], 4, 4),
    ],
)
def test_what_is_named_runs_once_more(remat: Any, first: int, second: int) -> None:
    assert calls_of_a_step(remat=remat) == {"first": first, "second": second}


def test_a_plan_says_it_and_the_argument_overrules() -> None:
    plan = Plan(stages=("rank:0",), placement={"": 0}, remat=("first",))
    assert calls_of_a_step(plan=plan) == {"first": 4, "second": 2}
    assert calls_of_a_step(plan=plan, remat=False) == {"first": 2, "second": 2}
    assert calls_of_a_step(plan=plan, remat=True) == {"first": 4, "second": 4}


def test_a_plan_with_it_can_be_saved_and_read_and_shows_it() -> None:
    for remat in (True, ("blocks.*", "head")):
        plan = Plan(stages=("rank:0",), placement={"": 0}, remat=remat)
        assert Plan.from_json(plan.to_json()) == plan != Plan(stages=("rank:0",), placement={"": 0})
    assert '"remat": ["blocks.*", "head"]' in plan.to_json()
    assert str(plan).splitlines()[1] == "computed again in the backward: blocks.*, head"
    assert plan.remat == ("blocks.*", "head")
    assert "remat" not in Plan(stages=("rank:0",), placement={"": 0}, remat=()).to_json()
    for wrong in ("blocks.*", 1, [1], None):
        with pytest.raises(PlanError, match="remat"):
            Plan(stages=("rank:0",), placement={"": 0}, remat=wrong)  # type: ignore[arg-type]


def test_a_name_that_matches_no_module_is_an_error_with_the_nearest() -> None:
    for wrong in (["frist"], ["head", "first.inner.weight"], ["blocks.*"]):
        with pytest.raises(PlanError, match=r"matches no module of this model") as caught:
            on_ranks(1, lambda model: farspan.distribute(model, remat=wrong), Counted)  # noqa: B023
        assert caught.value.why
    with pytest.raises(PlanError) as caught:
        on_ranks(1, lambda model: farspan.distribute(model, remat=["frist"]), Counted)
    assert caught.value.hint.startswith("nearest: 'first'")


def test_plan_of_shows_what_was_asked_for() -> None:
    def program(model: nn.Module) -> Any:
        return farspan.plan_of(farspan.distribute(model, remat=["first"])).remat

    assert on_ranks(2, program, Counted) == [("first",)] * 2


# What does not need it is left alone.


def test_what_is_not_differentiated_in_its_step_is_not_computed_again() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model, remat=True)
        for _ in range(2):
            CALLS.clear()
            with torch.no_grad():
                model(X).sum().item()
            loss = F.cross_entropy(model(X), Y)
            loss.item()
            loss.backward()
            farspan.flush()

    on_ranks(1, program, Counted)
    assert CALLS.count("first") == 2


@pytest.mark.parametrize("remat", [True, ["first", "second"]])
def test_a_second_backward_later_has_what_the_first_one_had(remat: Any) -> None:
    def program(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(2):
            x = X.clone()
            out = model(x)
            out.square().mean().backward(retain_graph=True)
            farspan.flush()
            x.zero_()
            F.cross_entropy(out, Y).backward()
            found.append([parameter.grad.tolist() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return found

    for num_ranks in (1, 2):
        assert_same(Parts, program, num_ranks, remat=remat)


class TwoHeads(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.other = Part()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.head(self.second(x)), self.other(x)


@pytest.mark.parametrize("remat", [True, ["*"], ["first", "second", "other"]])
def test_a_part_that_a_later_backward_goes_through_keeps_what_it_had(remat: Any) -> None:
    def program(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for number in range(2):
            x = X + number
            a, b = model(x)
            a.square().mean().backward(retain_graph=True)
            farspan.flush()
            with torch.no_grad():
                x.zero_()
            b.square().mean().backward()
            found.append([parameter.grad.tolist() for parameter in model.parameters()])
            optimizer.step()
        return found

    for num_ranks in (1, 2):
        assert_same(TwoHeads, program, num_ranks, remat=remat)


def test_checkpoints_of_a_torch_that_gives_the_arguments_as_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14.1 calls the generator of a checkpoint with a tuple and a dictionary, not with the arguments."""
    seen: list[Any] = []

    def generator(
        function: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool = True, debug: bool = False
    ) -> Any:
        seen.append((function(*args, **kwargs), preserve_rng_state, debug))
        yield

    name = "_checkpoint_without_reentrant_generator_impl"
    monkeypatch.setattr(torch.utils.checkpoint, name, generator, raising=False)
    recompute_through(lambda function: lambda *args: 10 * function(*args), lambda x: x == 2, contextlib.nullcontext)
    replaced = getattr(torch.utils.checkpoint, name)
    for x in (1, 2):
        list(replaced(lambda value: value, (x,), {}, preserve_rng_state=True, debug=x == 1))
    assert seen == [(10, True, True), (20, False, False)]
