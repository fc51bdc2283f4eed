"""FARSPAN_SANITIZE finds faults that are planted here, and none in right programs, whose numbers stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.comm.local import LocalTransport
from tests.promises.test_measured_step import Cells, Used, make_texts, train_cells, train_texts, train_used
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn

import farspan
from farspan.call.infer import observe, watch
from farspan.errors import LaunchError, SanitizeError
from farspan.execute import sanitize
from farspan.execute.step import segment
from farspan.execute.step.executor import Executor
from farspan.graph import BackwardSegment, Edge, Value
from farspan.place.measure import profiling_executor
from farspan.place.measure.trial import Trial
from farspan.place.measure.working_memory import _HandedOver
from farspan.schedule import Kind, Task, drawn_name, orders_by_name
from farspan.settings import check, seed
from farspan.torch_private import fill_with_poison, num_users_of_storage


@pytest.fixture(autouse=True)
def sanitizing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_SANITIZE", "1")


# Right programs.


class InPlace(nn.Module):
    """Writes into what has come from another stage, and gives back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.activation, self.same = nn.ReLU(inplace=True), nn.Identity()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(self.activation(self.first(x)))
        z = self.second(y).mul_(2.0)
        return self.last(self.norm(y + z))


class Tied(nn.Module):
    """Two uses of one weight with another layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))[:, :5]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "layers": (mlp, train),
    "in place": (InPlace, train),
    "tied": (Tied, train),
    "states handed on": (Cells, train_cells),
    "two backwards": (Used, train_used),
    "growing tables": (make_texts, train_texts),
}


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize(("num_ranks", "number"), [(2, "1"), (2, "7"), (3, "2")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_have_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int, number: str, is_measured: bool
) -> None:
    monkeypatch.setenv("FARSPAN_SANITIZE", number)
    build, program = PROGRAMS[name]
    assert_same_as_plainly(build, program, num_ranks, **({} if is_measured else {"measure": False}))


def test_nothing_is_checked_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSPAN_SANITIZE")
    kinds: list[type] = []
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda self, *args: (kinds.append(type(self)), run(self, *args))[1])
    assert_same_as_plainly(mlp, train, 2, measure=False)
    assert set(kinds) == {Executor}


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_trial_leaves_nothing_checked_in_its_thread(is_dry: bool) -> None:
    with Trial(num_devices=lambda: 2, is_dry=is_dry) as trial:
        model = farspan.distribute(mlp())
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(9):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert trial.profile().units
    assert sanitize.current() is None


# Planted faults.


def test_released_memory_is_poisoned_once_nothing_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[list[float]] = []

    def fill(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        fill_with_poison(storage, dtype)
        filled.append(torch.empty(0, dtype=dtype).set_(storage).tolist())

    monkeypatch.setattr(sanitize, "fill_with_poison", fill)
    sanitizer = sanitize.Sanitizer(1, 0)
    whole = torch.ones(3)
    part = whole[1:]
    sanitizer.release(whole)
    del whole
    sanitizer.sweep()
    assert (filled, part.tolist()) == ([], [1.0, 1.0])  # a part of it is used
    sanitizer.release(torch.ones(2, dtype=torch.int64))
    del part
    sanitizer.sweep()
    assert sorted(map(repr, filled)) == [repr([torch.iinfo(torch.int64).min] * 2), "[nan, nan, nan]"]


def test_values_and_buffers_of_a_step_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned: list[int] = []
    monkeypatch.setattr(
        sanitize,
        "fill_with_poison",
        lambda storage, dtype: (poisoned.append(num_users_of_storage(storage)[0]), fill_with_poison(storage, dtype)),
    )
    assert_same_as_plainly(mlp, train, 2, measure=False)
    assert len(poisoned) > 50


def test_memory_handed_over_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over(part: BackwardSegment, gradients: dict[Edge, Tensor | None]) -> None:
        """As it was once: the next micro-batch gets the value by detach(), but nobody asks whether it is to read it."""
        for edge in part.incoming:
            value, gradient = edge.key, gradients[edge]
            if isinstance(value, Value) and value.segment is part.segment and gradient is not None:
                with torch.enable_grad():
                    value.data = _HandedOver.apply(value.data, [gradient])
                gradients[edge] = value.data.detach()

    monkeypatch.setattr(profiling_executor, "hand_over", hand_over)
    errors: list[str] = []
    for number in range(1, 7):  # some orders have the next micro-batch's forward before this backward
        monkeypatch.setenv("FARSPAN_SANITIZE", str(number))
        try:
            assert_same_as_plainly(Cells, train_cells, 2)
        except SanitizeError as error:
            errors.append(str(error))
    assert errors
    assert "a value has changed since it was made or received" in errors[0]
    assert "GRUCell" in errors[0] or "first" in errors[0] or "second" in errors[0]


class Frozen(nn.Module):
    """Writes into a value of another stage to which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 5)
        self.inner = nn.Sequential(nn.ReLU(inplace=True), self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def test_a_received_value_that_is_written_into_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"first": "rank:0", "inner": "rank:1", "last": "rank:1"}
    assert_same_as_plainly(Frozen, train, 2, plan=plan)
    monkeypatch.setattr(segment, "_writable", lambda item, tensor, segment: tensor)
    with pytest.raises(SanitizeError, match="a value has changed since it was made or received"):
        assert_same_as_plainly(Frozen, train, 2, plan=plan)


class WritingTransport(LocalTransport):
    """Writes into a buffer while that is being sent."""

    def send(self, flat: Tensor, dst: int, channel: int) -> Any:
        work = super().send(flat, dst, channel)
        flat[-1] += 1
        return work


def test_a_buffer_that_changes_in_flight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.support.ranks as ranks

    monkeypatch.setattr(ranks, "LocalTransport", WritingTransport)
    with pytest.raises(SanitizeError, match=r"a buffer has changed while it was being sent(.|\n)*the message to rank"):
        assert_same_as_plainly(mlp, train, 2, measure=False)


class Giving(nn.Module):
    """Gives back what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 8)


def giving() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Giving(), nn.Linear(8, 5))


def test_a_result_that_shares_memory_unforeseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(results: Any, tensors: Any) -> Any:
        return (-1,) * len(results), (-1,) * len(results)

    monkeypatch.setattr(observe, "aliases", none)
    with pytest.raises(SanitizeError) as caught:
        assert_same_as_plainly(giving, train, 2, plan={"0": "rank:0", "1": "rank:0", "2": "rank:1"})
    text = str(caught.value)
    assert "shares memory with its argument 0" in text and "predicted was no argument" in text
    assert "micro-batch" in text and "plainly.py" in text and "predictions hold" in text


def test_an_argument_written_unforeseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_mutated", lambda *args: ())
    with pytest.raises(SanitizeError, match="writes into its argument 0"):
        assert_same_as_plainly(Frozen, train, 2, plan={"first": "rank:0", "inner": "rank:1", "last": "rank:1"})


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def test_a_draw_that_was_not_foreseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "is_switched_off", lambda func, given: True)
    with pytest.raises(SanitizeError, match="draws random numbers, and was predicted to draw none"):
        assert_same_as_plainly(
            lambda: nn.Sequential(nn.Linear(8, 8), Drawing(), nn.Linear(8, 5)),
            train,
            2,
            plan={"0": "rank:0", "1": "rank:1", "2": "rank:1"},
        )


# Orders.


def _step(num_ranks: int, num_micro_batches: int, *, is_team: bool) -> list[Task]:
    """A chain of forwards and back for each micro-batch; gradients add up in the loop's order."""
    tasks: list[Task] = []
    last: dict[int, int] = {}
    for number in range(num_micro_batches):
        for rank in range(num_ranks):
            needs = (len(tasks) - 1,) if rank and not is_team else ()
            tasks.append(_task(Kind.FORWARD, rank, number, 0 if is_team else rank, needs, 0 if is_team else None))
    for number in range(num_micro_batches):
        for rank in reversed(range(num_ranks)):
            forward = number * num_ranks + rank
            before = () if is_team or rank == num_ranks - 1 else (len(tasks) - 1,)
            sums = (last[rank],) if rank in last else ()
            needs = tuple(sorted({forward, *before, *sums}))
            last[rank] = len(tasks)
            tasks.append(_task(Kind.BACKWARD, rank, number, 0 if is_team else rank, needs, None))
    return tasks


def _task(kind: Kind, rank: int, number: int, level: int, needs: tuple[int, ...], team: int | None) -> Task:
    return Task(kind=kind, rank=rank, micro_batch=number, level=level, duration=1.0, needs=needs, holds=True, team=team)


@pytest.mark.parametrize("number", range(5))
def test_a_drawn_order_runs_every_task_once_after_what_it_needs(number: int) -> None:
    tasks = _step(3, 4, is_team=False)
    orders = orders_by_name(drawn_name(f"{number}:0"), tasks, 3)
    assert sorted(index for order in orders for index in order) == list(range(len(tasks)))
    waiting = [list(order) for order in orders]
    done: set[int] = set()
    while any(waiting):
        ready = [order for order in waiting if order and done.issuperset(tasks[order[0]].needs)]
        assert ready, "the ranks wait for each other"
        done.add(random.Random(number).choice(ready).pop(0))


def test_orders_differ_from_step_to_step_and_are_the_same_on_all_ranks() -> None:
    tasks = _step(3, 4, is_team=False)
    orders = [orders_by_name(drawn_name(f"1:{number}"), tasks, 3) for number in (0, 1, 2, 0)]
    assert orders[0] == orders[3]
    assert len(set(map(str, orders))) == 3


def test_ranks_that_run_each_layer_together_have_one_order() -> None:
    tasks = _step(3, 4, is_team=True)
    orders = orders_by_name(drawn_name("1:0"), tasks, 3)
    likeness = [[(tasks[index].kind, tasks[index].micro_batch) for index in order] for order in orders]
    assert likeness[0] == likeness[1] == likeness[2]


# The setting.


@pytest.mark.parametrize(
    ("said", "wanted"), [("", None), ("0", None), ("no", None), ("yes", 1), ("1", 1), (" 42 ", 42)]
)
def test_the_setting_is_yes_no_or_a_seed(monkeypatch: pytest.MonkeyPatch, said: str, wanted: int | None) -> None:
    monkeypatch.setenv("FARSPAN_SANITIZE", said)
    check()
    assert seed("SANITIZE") == wanted


@pytest.mark.parametrize("said", ["maybe", "-1", "1.5", "9" * 19, "\u0661"])
def test_what_is_no_seed_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("FARSPAN_SANITIZE", said)
    with pytest.raises(LaunchError, match="and no seed"):
        check()


def test_the_error_is_one_of_farspans() -> None:
    assert issubclass(SanitizeError, farspan.FarspanError)
