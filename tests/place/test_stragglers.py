"""A rank that becomes slower while the program trains is found, and the model is repartitioned: same numbers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.places import engine
from tests.support.ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import farspan
from farspan.call.leaf import Leaf
from farspan.errors import PlanError
from farspan.execute.step.executor import Executor
from farspan.execute.step.step_record import Trace
from farspan.graph import Segment
from farspan.place.measure.profiling_executor import ProfilingExecutor
from farspan.place.repartition.search import stage_of
from farspan.program.program import Action
from farspan.record.parameters.copying import plan_by_model
from farspan.state.saving.saver import Saver

LAYER_S = 10e-3
NUM_LAYERS = 8
HOLD_S = 2.0
"""A step is some 0.15 s: so many of them."""


class Slow(nn.Module):
    """A layer that is said to take a given time, in units."""

    def __init__(self, units: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


Slowness = Callable[[int, int], float]
"""By rank and training step, how many times as long as at first its device takes."""


@pytest.fixture(autouse=True)
def slowness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Slowness]:
    """Let each task take what its layers are said to take: a busy machine is no part of these tests."""
    said: dict[str, Slowness] = {"of": lambda rank, step: 1.0}
    ends: dict[int, int] = {}
    profiled = ProfilingExecutor._trace

    def seconds_of(action: Action) -> float:
        segment = action.work if isinstance(action.work, Segment) else action.work.segment
        calls = () if segment is None else segment.calls
        leaves = [call.target.module for call in calls if isinstance(call.target, Leaf)]
        layers = [layer for leaf in leaves for layer in leaf.modules() if isinstance(layer, Slow)]
        rank = engine().rank
        if action.kind.value == "W":
            return 0.0
        units = sum(layer.units for layer in layers)
        return units * LAYER_S * said["of"](rank, engine().console.num_training_steps)

    def trace(executor: Executor, kind: Any, action: Action, began_ns: int) -> None:
        begin = ends.get(engine().rank, 0)
        end = ends[engine().rank] = begin + (0 if kind == "wait" else round(seconds_of(action) * 1e9))
        name, batch, queue = action.work.describe(), action.micro_batch, action.queue
        executor.traces.append(Trace(kind=kind, name=name, micro_batch=batch, queue=queue, start_ns=begin, end_ns=end))

    def profiler_trace(profiler: ProfilingExecutor, kind: Any, action: Action, began_ns: int) -> None:
        profiled(profiler, kind, action, began_ns)
        if kind != "wait":
            profiler.taken[-1] = (*profiler.taken[-1][:3], seconds_of(action))

    monkeypatch.setattr(Executor, "_trace", trace)
    monkeypatch.setattr(ProfilingExecutor, "_trace", profiler_trace)
    monkeypatch.setenv("FARSPAN_STRAGGLER", str(HOLD_S))
    return said


def build(first: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Slow(first), *(Slow() for _ in range(NUM_LAYERS - 1)))


Act = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Between two steps."""


def train(model: nn.Module, num_steps: int, act: Act = nothing) -> tuple[list[float], list[Any]]:
    """Returns losses, and after each step how many layers each rank has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    layers: list[Any] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        queued: list[Tensor] = []
        for _ in range(4):
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            queued.append(loss)
        optimizer.step()
        losses += [loss.item() for loss in queued]
        act(step, model, optimizer)
        if model in plan_by_model:
            layers.append(layers_of(farspan.plan_of(model)))
    return losses, layers


def layers_of(plan: farspan.Plan) -> tuple[int, ...]:
    ranks = [plan.ranks_of(stage_of(str(number), plan)) for number in range(NUM_LAYERS)]
    return tuple(sum(rank in each for each in ranks) for rank in range(1 + max(map(max, ranks))))


def run(num_ranks: int, num_steps: int, act: Act = nothing, *, first: float = 1.0, **options: Any) -> list[Any]:
    """Returns for the first rank how many layers each rank had after each step, if all ranks agree and losses are
    those of one process. The first layer takes `first` units."""
    wanted, _ = train(build(first), num_steps, act)
    models = [build(first) for _ in range(num_ranks)]
    lines: list[list[str]] = [[] for _ in range(num_ranks)]

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank], **options)

        def warn(text: str) -> None:  # without what rank 0 alone says where something takes long
            lines[rank].extend([text] * text.startswith("farspan: "))

        engine().console.warn = warn  # type: ignore[method-assign]
        found = train(model, num_steps, act)
        engine().agreement.barrier("the end")
        return found

    found = run_threads(num_ranks, program)
    assert all(losses == wanted for losses, _ in found), "other numbers"
    assert all(layers == found[0][1] for _, layers in found)
    assert all(len(each) == len(lines[0]) for each in lines)
    said.lines = lines[0]
    return found[0][1]


class Said:
    lines: list[str]


said = Said()


def slow_from(first: int, last: int = 1 << 30, *, rank: int = 1, factor: float = 3.0) -> Slowness:
    return lambda its, step: factor if its == rank and first <= step < last else 1.0


def test_a_straggler_gets_less_and_numbers_stay(slowness: dict[str, Slowness]) -> None:
    slowness["of"] = slow_from(20)
    layers = run(2, 30, replan=True, measure=True)
    assert layers[19] == (4, 4)
    assert layers[-1] == (7, 1)
    assert len(said.lines) == 1
    assert "rank 1 takes 3 times as long as usual" in said.lines[0]
    assert "repartitioned, rank 0 4 -> 7 units, rank 1 4 -> 1 unit" in said.lines[0]


def test_when_it_recovers_it_gets_its_layers_back(slowness: dict[str, Slowness]) -> None:
    slowness["of"] = slow_from(12, 40)
    layers = run(2, 60)
    assert (layers[35], layers[-1]) == ((7, 1), (5, 3))  # as good as (4, 4)
    assert len(said.lines) == 2
    assert "rank 1 takes 0.33 times as long as usual" in said.lines[1]


def test_it_gets_them_back_where_it_recovers_before_anything_is_usual(slowness: dict[str, Slowness]) -> None:
    """Under the new plan it is only seen as it is again: compared with what that plan was made for."""
    slowness["of"] = slow_from(12, 16)
    layers = run(2, 40)
    assert (7, 1) in layers
    assert layers[-1] == (5, 3)


def test_speeds_that_go_up_and_down_move_little(slowness: dict[str, Slowness]) -> None:
    """Each change has to last twice as long as the one before."""
    slowness["of"] = lambda rank, step: 3.0 if rank == 1 and step % 40 >= 20 else 1.0
    layers = run(2, 200)
    assert 1 <= len(said.lines) <= 3
    assert (7, 1) in layers


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda rank, step: 3.0 if step >= 12 else 1.0, id="all are slower together"),
        pytest.param(lambda rank, step: 100.0 if (rank, step) == (1, 15) else 1.0, id="a single slow step"),
        pytest.param(slow_from(12, 14), id="not for long enough"),
        pytest.param(lambda rank, step: 100.0 if rank == 1 and 1 <= step < 4 else 1.0, id="first steps"),
        pytest.param(slow_from(12, factor=1.7), id="not by enough"),
    ],
)
def test_what_is_no_straggler(slowness: dict[str, Slowness], of: Slowness) -> None:
    slowness["of"] = of
    assert set(run(2, 30)) == {(4, 4)}
    assert said.lines == []


def evaluate(model: nn.Module) -> None:
    """What is no step of the usual shape: evaluation, and training on larger batches."""
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(4, 8)).sum().item()
    for _ in range(2):
        for _ in range(4):  # as many as a step has
            (model(torch.ones(9, 8)).square().mean() / 100).backward()
        farspan.flush()


def test_neither_evaluation_nor_other_shapes_make_a_straggler(
    slowness: dict[str, Slowness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each window, what rank 1 takes long for is most of its work, and begins late."""
    monkeypatch.setenv("FARSPAN_STRAGGLER", "20")
    is_evaluating = {0: False, 1: False}

    def act(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step >= 12 and model in plan_by_model:
            is_evaluating[engine().rank] = True
            evaluate(model)
            is_evaluating[engine().rank] = False
        elif step >= 12:
            evaluate(model)

    slowness["of"] = lambda rank, step: 5.0 if rank == 1 and is_evaluating[rank] else 1.0
    assert set(run(2, 45, act)) == {(4, 4)}
    assert said.lines == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"plan": {str(number): number // 4 for number in range(NUM_LAYERS)}}, "it is not an automatic one"),
        ({"measure": False}, "it is not an automatic one whose first step was measured"),
        ({"replan": False}, "replan=False"),
    ],
)
def test_a_plan_that_is_not_to_change_stays(
    slowness: dict[str, Slowness], options: Mapping[str, Any], why: str
) -> None:
    slowness["of"] = slow_from(12)
    assert set(run(2, 30, **options)) == {(4, 4)}
    assert len(said.lines) == 1
    assert f"the plan stays as it is: {why}" in said.lines[0]


@pytest.mark.parametrize("options", [{"plan": {"": 0}}, {"measure": False}, {"remat": True}])
def test_what_cannot_be_repartitioned_is_said_at_once(options: Mapping[str, Any]) -> None:
    with pytest.raises(PlanError, match="replan=True is for automatic plans"):
        run(2, 1, replan=True, **options)


def test_where_no_plan_is_better_the_model_stays(slowness: dict[str, Slowness]) -> None:
    """A layer of its own on each rank, and a first one that takes hardly anything."""
    slowness["of"] = slow_from(12)
    pins = {str(number): f"rank:{number // 4}" for number in range(NUM_LAYERS)}
    assert set(run(2, 40, pins=pins)) == {(4, 4)}
    assert len(said.lines) == 1
    assert "the plan stays as it is: a step is likely to take" in said.lines[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_under_any_schedule(slowness: dict[str, Slowness], schedule: str) -> None:
    slowness["of"] = slow_from(12)
    layers = run(2, 30, schedule=schedule)
    assert layers[-1][1] < 4


def test_of_three_ranks(slowness: dict[str, Slowness]) -> None:
    slowness["of"] = slow_from(12, rank=0, factor=4.0)
    layers = run(3, 30)
    assert layers[-1][0] == 1
    assert "rank 0 takes 4 times as long as usual" in said.lines[0]


def test_a_member_of_a_wide_stage(slowness: dict[str, Slowness]) -> None:
    """Devices of two speeds have no wide stages: the plan becomes narrow, and wide again when the rank recovers."""
    slowness["of"] = slow_from(12, 40, rank=0, factor=6.0)
    layers = run(3, 80, first=14.0, stages="wide")
    assert (layers[10], layers[30], layers[-1]) == ((8, 8, 8), (1, 1, 6), (8, 8, 8))
    assert len(said.lines) == 2


def test_losses_that_are_read_in_the_loop(slowness: dict[str, Slowness]) -> None:
    """Each micro-batch is a flush of its own."""
    slowness["of"] = slow_from(12)
    wanted, _ = train_reading(build(), 30)
    models = [build() for _ in range(2)]
    for losses, layers in run_threads(2, lambda rank: train_reading(farspan.distribute(models[rank]), 30)):
        assert losses == wanted
        assert layers != (4, 4)


def train_reading(model: nn.Module, num_steps: int) -> tuple[list[float], tuple[int, ...]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(4):
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, layers_of(farspan.plan_of(model)) if model in plan_by_model else ()


def test_nothing_is_found_while_a_checkpoint_is_written(
    slowness: dict[str, Slowness], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who writes is slow for a while. What is slow after that is found, and the checkpoint is whole."""
    may_write, vote_of = threading.Event(), Saver._vote_of
    states: dict[int, dict[str, Tensor]] = {}

    def vote_later(saver: Saver, task: Any) -> Any:
        assert may_write.wait(60)
        return vote_of(saver, task)

    def act(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if model not in plan_by_model:
            return
        if step == 10:
            states[engine().rank] = {name: item.detach().clone() for name, item in model.state_dict().items()}
            farspan.save(tmp_path, model=model, optimizer=optimizer, step=10)
        if step == 30:
            engine().agreement.barrier("all have come so far")
            may_write.set()

    monkeypatch.setattr(Saver, "_vote_of", vote_later)
    slowness["of"] = slow_from(12)
    layers = run(2, 60, act)
    assert layers[30] == (4, 4)
    assert layers[-1] == (7, 1)
    model = build()
    farspan.load(tmp_path, model=model)
    assert all(torch.equal(states[0][name], item) for name, item in model.state_dict().items())


def test_a_checkpoint_of_another_plan_is_the_same(slowness: dict[str, Slowness], tmp_path: Path) -> None:
    """Optimizers' states and all."""
    slowness["of"] = slow_from(12)

    def act(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 29:
            farspan.save(tmp_path / str(model in plan_by_model), model=model, optimizer=optimizer, step=step, wait=True)

    assert run(2, 30, act)[-1] == (7, 1)
    states: list[dict[str, Any]] = []
    for name in ("True", "False"):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        farspan.load(tmp_path / name, model=model, optimizer=optimizer)
        states.append({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
    one, other = map(tree_leaves, states)
    assert len(one) == len(other) > NUM_LAYERS
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_parameters_that_something_uses_move_later(slowness: dict[str, Slowness]) -> None:
    slowness["of"] = slow_from(12)
    kept: dict[int, list[Tensor]] = {}

    def act(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if model in plan_by_model and step in (10, 25):
            kept[engine().rank] = [item.data for item in model.parameters()] if step == 10 else []

    layers = run(2, 50, act)
    assert layers[24] == (4, 4)
    assert layers[-1] == (7, 1)
    assert re.search("for now: a tensor or an array in its memory still uses .*weight, which would move", said.lines[0])
    assert "repartitioned" in said.lines[-1]


GROUPS = """
import torch, farspan
from farspan.errors import PlanError

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
try:
    farspan.distribute(model, data_parallel=2, replan=True)
except PlanError as error:
    print(error)
"""


def test_groups_have_one_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUPS)
    for process in run_processes(2, script):
        assert process.code == 0, process.stderr
        assert "replan=True is for automatic plans whose first step is measured." in process.stdout
