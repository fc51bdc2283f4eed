"""What a program depends on is in its pattern: a step that differs in one thing gets the program of its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.program.described import build_program, described, number_of
from torch import nn

from farspan.call.leaf import Leaf, Placed
from farspan.graph import EVERYWHERE, Backward, Call, Graph, Meta, RequestedGradients, Value, release
from farspan.plan import RankDevices, Team, Worker
from farspan.program.cache import Programs
from farspan.program.options import Settings

CPU, GPU = "cpu", "cuda:0"


@dataclass(frozen=True)
class Step:
    """Two micro-batches over four stages on three ranks, and what may be otherwise in another step.

    embed (stage 0) -> + position (stage 1) -> block (1) -> join with embed's (2) -> * weight outside (2)
        -> head, tied to embed (3) -> norm (3) -> loss (3)
    """

    depends_on: tuple[tuple[int, ...], ...] = ((0, 1),)
    """Of what joins."""
    unused: frozenset[int] = frozenset()
    parameters: tuple[tuple[int, ...], ...] | None = None
    """Those to which the gradients of the block's outputs flow; None for all."""
    flops: int = 10**9
    """Of the block."""
    requires_grad: bool = True
    """What the block gives."""
    stage: int = 1
    """Of the block."""
    level: int = 0
    """At least, of the block."""
    is_plain_first: bool = False
    """Which argument of the scale is plain."""
    joined: int = 0
    """Which call's result is joined to the block's."""
    output: int = 0
    """Which of the block's outputs goes on."""
    second: str = "block"
    """The leaf that is called as the block."""
    name: str = "position"
    source_stage: int = 0
    is_source_trained: bool = True
    is_source_shared: bool = True
    """Whether both micro-batches use one value for the position."""
    is_outside: bool = True
    """Whether the weight outside is."""
    is_carried: bool = False
    """Whether a micro-batch begins with what the one before gives."""
    has_buffers: bool = False
    """Whether the norm has."""
    is_shared: bool = True
    is_parameter: bool = True
    is_trained: bool = True
    """Of the block."""
    tied_to: int = 0
    """The stage of the tied weight."""
    roots: tuple[int, ...] = (7,)
    retain_graph: bool = False
    requested: tuple[str, ...] | None = None
    num_outside: int = 0
    num_backwards: int = 1
    num_micro_batches: int = 2
    ranks: tuple[int, ...] = (0, 1, 2, 0)
    devices: tuple[str, ...] = (CPU, CPU, CPU, CPU)
    rank: int = 1
    num_ranks: int = 3
    lookahead: int = 2
    members: tuple[int, ...] = ()
    """Ranks of a wide stage in the place of stage 1, whose weights are then on stages of the first and the last."""
    replicas: tuple[tuple[str, int], ...] = ()
    """What ranks have from an earlier step."""
    gradient_reduction: str = "exact"
    gradient_of: str = ""
    """Which parameter's gradient the position is."""
    home_stages: tuple[int, ...] = (0, 1, 2)
    backend: str = ""
    """What ranks have told that carries tensors between their devices."""
    schedule: str = "auto"
    least_weight_work_s: float = 2e-3


OTHERS: dict[str, Sequence[Any]] = {
    "depends_on": [((0,),), ((1,),), ((),)],
    "unused": [frozenset({1})],
    "parameters": [((), ())],
    "flops": [0],
    "requires_grad": [False],
    "stage": [0, 2],
    "level": [3],
    "is_plain_first": [True],
    "joined": [1],
    "output": [1],
    "second": ["other"],
    "name": ["place"],
    "source_stage": [2],
    "is_source_trained": [False],
    "is_source_shared": [False],
    "is_outside": [False],
    "is_carried": [True],
    "has_buffers": [True],
    "is_shared": [False],
    "is_parameter": [False],
    "is_trained": [False],
    "tied_to": [3],
    "roots": [(6,), (4,)],
    "retain_graph": [True],
    "requested": [("block.weight",), ("embed.weight",), ("position",)],
    "num_outside": [1],
    "num_backwards": [0, 2],
    "num_micro_batches": [1, 3],
    "ranks": [(0, 1, 2, 2), (0, 1, 2, 1)],
    "devices": [(CPU, GPU, GPU, CPU)],
    "rank": [0, 2],
    "num_ranks": [4],
    "lookahead": [0],
    "members": [(1, 2)],
    "replicas": [(("block.weight", 2),)],
    "gradient_reduction": ["sum"],
    "gradient_of": ["embed.weight"],
    "home_stages": [(0, 1, 3), (0, 1)],
    "backend": ["nccl"],
    "schedule": ["gpipe", "1f1b"],
    "least_weight_work_s": [float("inf")],
}
BASES = {
    "backend": Step(devices=(GPU, GPU, GPU, CPU)),
    "num_outside": Step(requested=("block.weight",)),
    "replicas": Step(members=(1, 2)),
    "gradient_of": Step(members=(1, 2)),
}
"""Where a field does not matter to the plain step."""

META = Meta((4,), (1,), torch.float32, torch.device(CPU), True)
PLAIN = replace(META, requires_grad=False)


def leaf(name: str, stage: int, owner: int, weight: str = "") -> Leaf:
    module = nn.Linear(2, 2, bias=False)
    weight = weight or f"{'embed' if owner != stage else name}.weight"
    item = Placed(weight, owner, module.weight, replace(META, is_parameter=True), True, True, nn.Parameter)
    return Leaf(name, module, stage, [item])


LEAVES = {name: leaf(name, stage, stage) for name, stage in (("embed", 0), ("block", 1), ("other", 1), ("norm", 3))}
LEAVES["head"] = leaf("head", 3, 0)
LEAVES["wide"] = leaf("wide", 1, 4, "block.weight")


def made(step: Step) -> tuple[list[Graph], Settings]:
    """The step as it is recorded, on leaves that are always the same."""
    for item in LEAVES.values():
        item.has_buffers = step.has_buffers and item.name == "norm"
    block, head = LEAVES[step.second].placed[0], LEAVES["head"].placed[0]
    block.is_shared, block.is_parameter = step.is_shared, step.is_parameter
    block.tensor.requires_grad_(step.is_trained)
    head.stage = step.tied_to
    position = source(step)
    weight = Value(META, EVERYWHERE)
    graphs: list[Graph] = []
    for number in range(step.num_micro_batches):
        graph = Graph(number)
        begin = graphs[-1].calls[5].outputs[0] if step.is_carried and graphs else None
        graphs.append(graph)
        x = add(graph, LEAVES["embed"], 0, begin)
        y = add(graph, "add", 1, x, position if step.is_source_shared else source(step))
        metas = (replace(META, requires_grad=step.requires_grad), META)
        y = add(
            graph,
            LEAVES["wide" if step.members else step.second],
            step.stage,
            y,
            *([Value(META, 4, name="block.weight")] if step.members else []),
            metas=metas,
            parameters=step.parameters,
            flops=step.flops,
            level=step.level,
            output=step.output,
        )
        joined = graph.calls[step.joined].outputs[0]
        y = add(graph, "join", 2, y, joined, depends_on=step.depends_on, unused=step.unused)
        scaled = (None, y) if step.is_plain_first else (y, None)
        scaled += (weight,) if step.is_outside else ()
        y = add(graph, "scale", 2, *scaled, depends_on=((0, len(scaled) - 1),))
        y = add(graph, LEAVES["head"], 3, y, Value(META, 0, name="embed.weight"))
        y = add(graph, LEAVES["norm"], 3, y)
        add(graph, "loss", 3, y)
        for _ in range(step.num_backwards):
            outside = [None] * step.num_outside
            requested = None if step.requested is None else RequestedGradients(step.requested, outside)
            roots = [graph.calls[call].outputs[0] for call in step.roots]
            is_last = len(graph.backwards) == step.num_backwards - 1
            backward = Backward(
                graph,
                roots,
                [None] * len(roots),
                retain_graph=step.retain_graph or not is_last or step.is_carried,
                requested=requested,
                where=None,
            )
            graph.backwards.append(backward)
    names = ("rank", "num_ranks", "lookahead", "home_stages", "schedule", "least_weight_work_s")
    names += ("gradient_reduction",)
    teams = [Team((worker,)) for worker in map(Worker, step.ranks, step.devices)]
    if step.members:
        teams[1] = Team(tuple(Worker(rank, CPU) for rank in step.members))
        teams.append(Team((Worker(step.members[0], CPU),)))
    replicas = frozenset((name, Worker(rank, CPU)) for name, rank in step.replicas)
    told = tuple(RankDevices(own=GPU, backend=step.backend, ids=(f"{rank}/0",)) for rank in range(step.num_ranks))
    given = {name: getattr(step, name) for name in names}
    return graphs, Settings(teams=tuple(teams), replicas=replicas, devices=told, **given)


def source(step: Step) -> Value:
    value = Value(META if step.is_source_trained else PLAIN, step.source_stage, name=step.name)
    value.gradient_of = step.gradient_of
    return value


def add(
    graph: Graph,
    target: Any,
    stage: int,
    *arguments: Value | None,
    metas: tuple[Meta, ...] = (META,),
    depends_on: tuple[tuple[int, ...], ...] | None = None,
    unused: frozenset[int] = frozenset(),
    parameters: tuple[tuple[int, ...], ...] | None = None,
    flops: int = 0,
    level: int = 0,
    output: int = 0,
) -> Value:
    """Record a call; None among the arguments is a plain tensor."""
    lazy = [item for item in arguments if item is not None]
    entry = SimpleNamespace(
        name="call",
        metas=metas,
        depends_on=depends_on or (tuple(range(len(arguments))),) * len(metas),
        unused=unused,
        parameters=parameters or (tuple(range(len(getattr(target, "placed", ())))),) * len(metas),
        flops=flops,
        differentiable=tuple(range(len(arguments))),
        requires_grad=True,
        mutated=(),
    )
    call = Call(target=target, template=None, arguments=list(arguments), entry=entry, stage=stage, modes=(), where=None)
    graph.add(call, [item for i, item in enumerate(arguments) if item is not None and i not in unused], at_least=level)
    call.outputs = tuple([Value(meta, stage, call=call, index=i) for i, meta in enumerate(metas)])
    graph.note(call, lazy, 0)
    return call.outputs[output]


def afresh(step: Step) -> dict[str, Any]:
    return described(build_program(*made(step)), number_of)


def test_no_field_is_left_out() -> None:
    assert {field.name for field in fields(Step)} == set(OTHERS)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in OTHERS.items() for value in values])
def test_a_step_that_differs_gets_a_program_of_its_own(field: str, value: Any) -> None:
    base = BASES.get(field, Step())
    other = replace(base, **{field: value})
    requested = {step: afresh(step) for step in (base, other)}
    assert requested[base] != requested[other], "the difference matters"
    programs = Programs()
    for step in (base, base, base, other, base, other, other, base):
        assert described(programs.program_of(*made(step)), number_of) == requested[step]
    assert programs.num_kept == 2


def test_few_are_kept() -> None:
    programs = Programs()
    for number in [*range(1, 20), 3, 3, 3]:
        programs.program_of(*made(Step(num_micro_batches=number)))
    assert programs.num_kept == 8


def test_where_gradient_flows_into_an_earlier_step_nothing_is_kept() -> None:
    programs = Programs()
    for _ in range(3):
        (earlier, graph), settings = made(Step(num_micro_batches=2, is_carried=True, is_outside=False))
        for segment in earlier.segments:
            segment.executed = True
        requested = described(build_program([graph], settings))
        for value in [value for segment in graph.segments for value in segment.inputs]:
            value.num_users = 0
        assert described(programs.program_of([graph], settings)) == requested
    assert programs.num_kept == 0


def test_steps_that_look_alike_share_a_schedule() -> None:
    programs = Programs()
    first, second = (programs.program_of(*made(Step())) for _ in range(2))
    assert first.schedule is second.schedule
    assert programs.num_kept == 1


def test_what_is_kept_holds_nothing_of_the_step_it_was_built_for() -> None:
    programs = Programs()
    graphs, settings = made(Step())
    references = [weakref.ref(value) for graph in graphs for call in graph.calls for value in call.outputs]
    program = programs.program_of(graphs, settings)
    release(graphs, program.released, program.parts)
    del graphs, program
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []
    assert programs.num_kept == 1
