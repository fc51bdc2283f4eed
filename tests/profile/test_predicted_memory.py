"""The memory that a plan predicts is what its ranks need: counted, tensor by tensor, on ranks that are threads."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.comm.local import LocalTransport
from tests.profile.predicted_models import Dense, Encoder, Frozen, Masked, Residual, Skip, Tied, UNet
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.cluster import Cluster, DeviceClass
from farspan.execute.process.world import current_engine
from farspan.place.measure.trial import Trial
from farspan.planner.cost_model import CostedGraph, CostedNode
from farspan.planner.optimize import Prediction, predict_step
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.profile import costed_graph
from farspan.schedule import Schedule
from farspan.torch_private import TorchDispatchMode, tree_leaves

NUM_MICRO_BATCHES = 6
SCHEDULES = ("auto", "1f1b", "zero-bubble")
WITHIN = 0.10


class Alive(TorchDispatchMode):
    """Counts the memory that operations make, and that is not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_id(item) for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)}
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor) and not item.is_meta and _id(item) not in self.known | given:
                storage = item.untyped_storage()
                self.known.add(_id(item))
                self.num_bytes += storage.nbytes()
                weakref.finalize(storage, self.free, _id(item), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    def free(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.num_bytes -= num_bytes


def _id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Sent:
    def is_done(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        pass


class Uncounted(LocalTransport):
    """What is on its way is nobody's: no operation of torch copies it."""

    def send(self, flat: torch.Tensor, dst: int, channel: int) -> Any:
        copy = torch.from_numpy(flat.numpy().copy())
        self.network.channel(self.rank, dst, channel).messages.put(copy)
        return Sent()


def profile_of(build: Callable[[], nn.Module], example: torch.Tensor) -> CostedGraph:
    """The graph of a tried program, with equal times: what was measured on a busy machine would decide what waits."""
    with Trial(num_devices=lambda: 3) as trial:
        program(build(), example)
    graph = costed_graph(trial.profile(), cluster(3))
    return replace(graph, nodes=tuple([in_equal_times(node) for node in graph.nodes]))


def in_equal_times(node: CostedNode) -> CostedNode:
    forward_s, backward_s, weight_s = [
        1e-3 * (cast(float, seconds) > 0) for seconds in (node.forward_s, node.backward_s, node.weight_s)
    ]
    return replace(node, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)


def program(model: nn.Module, example: torch.Tensor, *, plan: Any = "auto") -> tuple[nn.Module, int]:
    """A few steps; the model, and the peak of all but the first: in one of them a message may come late."""
    model = farspan.distribute(model, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peak = 0
    for number in range(4):
        optimizer.zero_grad()
        for _ in range(NUM_MICRO_BATCHES):
            model(example).square().mean().backward()
        with Alive() as alive:
            farspan.flush()
        peak = max(peak, alive.peak_bytes) if number else 0
        optimizer.step()
    return model, peak


def cluster(count: int) -> Cluster:
    return Cluster(classes=(DeviceClass(name="cpu", kind="cpu", devices_per_host=count),))


def in_a_row(graph: CostedGraph, shares: tuple[float, ...]) -> list[list[str]]:
    """Stages of so many of the nodes, in the order in which they are called."""
    names = [node.name for node in graph.nodes]
    ends = [round(share * len(names)) for share in shares]
    return [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def prediction_of(graph: CostedGraph, stages: list[list[str]], schedule: str) -> Prediction:
    pipeline = Pipeline(stages=tuple(PipelineStage(device_class="cpu", nodes=tuple(names)) for names in stages))
    return predict_step(graph, cluster(len(stages)), pipeline, NUM_MICRO_BATCHES, schedules=(schedule,))


def tasks_of(schedule: Schedule, rank: int) -> list[str]:
    tasks = [schedule.tasks[index] for index in schedule.orders[rank]]
    return [f"{task.kind.value}{task.micro_batch} at level {task.level}" for task in tasks]


def peaks_of(build: Callable[[], nn.Module], example: torch.Tensor, found: Prediction) -> list[float]:
    models = [build() for _ in found.stages]

    def rank_of(rank: int) -> float:
        model, peak = program(models[rank], example, plan=found.plan)
        step = farspan.last_step()
        assert step is not None and tasks_of(step.schedule, rank) == tasks_of(found.simulation.schedule, rank)
        engine = current_engine()
        assert engine is not None
        own = [item.tensor for item in engine.parameters.values() if item.is_owned]
        del model
        return peak + sum(each.numel() * each.element_size() for each in own)

    gc.disable()  # what is freed late by the collector would count as alive
    try:
        return run_threads(len(found.stages), rank_of, transport=Uncounted)
    finally:
        gc.enable()


def tokens() -> torch.Tensor:
    return torch.arange(400).reshape(20, 20) % 50


def rows() -> torch.Tensor:
    return torch.randn(400, 64, generator=torch.Generator().manual_seed(0))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


MODELS = {
    "residual": (Residual, tokens),
    "masked": (Masked, rows),
    "frozen": (Frozen, rows),
    "tied": (Tied, tokens),
    "unet": (UNet, images),
    "skip": (Skip, images),
    "dense": (Dense, images),
    "encoder": (Encoder, images),
}


def check(name: str, cut: Callable[[CostedGraph], list[list[str]]], schedule: str, *, within: float = WITHIN) -> None:
    build, example = MODELS[name]
    graph = profile_of(build, example())
    compare(name, prediction_of(graph, cut(graph), schedule), within)


def compare(name: str, found: Prediction, within: float = WITHIN) -> None:
    build, example = MODELS[name]
    for rank, measured in enumerate(peaks_of(build, example(), found)):
        stage = next(stage for stage in found.stages if stage.where == f"rank:{rank}")
        assert stage.memory_bytes == pytest.approx(measured, rel=within), (rank, stage.nodes)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    list(
        itertools.product(
            [
                ("residual", (0.4, 1.0)),
                ("residual", (0.3, 0.7, 1.0)),
                ("unet", (0.5, 1.0)),
                ("skip", (1.0,)),
                ("dense", (0.5, 1.0)),
                ("dense", (0.35, 0.7, 1.0)),
                ("encoder", (1.0,)),
                ("frozen", (10 / 12, 1.0)),
            ],
            SCHEDULES,
        )
    ),
)
def test_the_predicted_peak_memory_is_what_a_rank_needs(stages: tuple[str, tuple[float, ...]], schedule: str) -> None:
    name, shares = stages
    check(name, lambda graph: in_a_row(graph, shares), schedule)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    list(
        itertools.product(
            [
                [["head", "up.0", "up.1", "up.2"], ["down.0", "down.1", "down.2"]],
                [["down.0", "down.1"], ["up.0", "up.1", "down.2", "up.2", "head"]],
                [["down.0", "down.1", "up.2"], ["up.0", "up.1", "down.2", "head"]],
            ],
            SCHEDULES,
        )
    ),
)
def test_so_it_is_where_data_flow_back_to_a_stage(stages: list[list[str]], schedule: str) -> None:
    check("encoder", lambda _: stages, schedule)


@pytest.mark.parametrize("others", [["layers.0.linear", "layers.1.linear"], ["layers.3.linear"]])
def test_what_gets_no_gradient_is_there_until_it_is_sent_and_used(others: list[str]) -> None:
    def cut(graph: CostedGraph) -> list[list[str]]:
        first = ["first", *others]
        return [first, [node.name for node in graph.nodes if node.name not in first]]

    check("masked", cut, "1f1b", within=0.02)


def test_what_a_fast_stage_has_sent_counts_until_it_is_taken() -> None:
    graph = profile_of(Masked, rows())
    stages = [["first"], [node.name for node in graph.nodes if node.name != "first"]]
    found = prediction_of(graph, stages, "1f1b")
    mask_bytes = 400 * 64 * 4
    assert found.stages[0].memory_bytes > found.stages[0].parameter_bytes + 3 * mask_bytes


@pytest.mark.parametrize("schedule", ["auto", "zero-bubble"])
def test_a_stage_whose_only_weight_is_elsewhere_runs_the_tasks_of_the_prediction(schedule: str) -> None:
    build, example = MODELS["tied"]
    graph = profile_of(build, example())
    names = [node.name for node in graph.nodes]
    peaks_of(build, example(), prediction_of(graph, [names[:-1], names[-1:]], schedule))


def test_a_stage_that_begins_frozen_and_ends_trained_runs_the_tasks_of_the_prediction() -> None:
    """Its frozen segment counts as in flight until the backward of the micro-batch, as in the runtime."""
    build, example = MODELS["frozen"]
    graph = profile_of(build, example())
    names = [node.name for node in graph.nodes]
    stages = [names[:5] + names[10:], names[5:10]]
    peaks_of(build, example(), prediction_of(graph, stages, "1f1b"))


@pytest.mark.parametrize("name", ["residual", "unet"])
def test_so_it_is_where_more_micro_batches_are_in_flight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, example = MODELS[name]
    graph = profile_of(build, example())
    near = prediction_of(graph, in_a_row(graph, (0.5, 1.0)), "zero-bubble")
    monkeypatch.setattr(sys.modules["farspan.planner.prediction.prediction"], "LOOKAHEAD", 4)
    found = prediction_of(graph, in_a_row(graph, (0.5, 1.0)), "zero-bubble")
    assert (found.plan.lookahead, near.plan.lookahead) == (4, 2)
    assert found.stages[0].in_flight == near.stages[0].in_flight + 2
    compare(name, found)
