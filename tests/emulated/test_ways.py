"""One program in many ways over emulated devices: each is bit for bit the plain program on one such device, without a
race, a wait for ever, or a host that touches a device's memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.emulated.conftest import Run
from tests.emulated.test_kernels import TRAIN, assert_same

GPT = "--model gpt --measure no"
MLP = "--model mlp --measure no"
FIRST, SECOND = "rank:0/cuda:0", "rank:0/cuda:1"
LATER_LAYERS = ("layers.2", "layers.3", "norm", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How farspan runs the program.

    Attributes:
        words: Of both programs.
        far: Of farspan's alone.
        plan: Which module goes where.
        more: More arguments of `distribute`.
        ranks: Processes; 1 has all devices.
        devices: Of each process.
        settings: Of the emulation.
        places: Decimal places to which numbers are the same; None for all bits.
    """

    words: str = MLP
    far: str = "--set-device"
    plan: Mapping[str, str] | None = None
    more: Mapping[str, object] = field(default_factory=dict[str, object])
    ranks: int = 2
    devices: str = "cuda:2"
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    places: int | None = None


def split(first: str, later: str) -> dict[str, str]:
    return {"": first, **dict.fromkeys(LATER_LAYERS, later)}


FOUR = {"": "rank:0", "layers.1": "rank:1", "layers.2": "rank:2", "layers.3": "rank:3", "head": "rank:3"}
WAYS = {
    # where ranks compute
    "no device set": Way(far=""),
    "no device set, first step measured": Way(words="--model mlp", far=""),
    "four ranks": Way(ranks=4, devices="cuda:4", plan=FOUR),
    "four ranks that set no device": Way(ranks=4, devices="cuda:4", plan=FOUR, far=""),
    "four ranks, first step measured": Way(words="--model mlp", ranks=4, devices="cuda:4"),
    "two ranks on one device": Way(far="", devices="cuda:1"),
    "four ranks on two devices": Way(ranks=4, far="", plan=FOUR),
    "one process, two devices": Way(ranks=1, far="", plan=split(FIRST, SECOND)),
    "one process, four devices": Way(
        ranks=1,
        far="",
        devices="cuda:4",
        plan={"": FIRST, "layers.1": SECOND, "layers.2": "rank:0/cuda:2", "layers.3": "rank:0/cuda:3"},
    ),
    "two ranks, two devices each": Way(
        far="",
        plan={"": FIRST, "layers.1": SECOND, "layers.2": "rank:1/cuda:2", "layers.3": "rank:1/cuda:3", "head": FIRST},
        devices="cuda:4",
    ),
    "two ranks, two devices each, without NCCL": Way(
        far="",
        plan={"": FIRST, "layers.1": SECOND, "layers.2": "rank:1/cuda:2", "layers.3": "rank:1/cuda:3", "head": FIRST},
        devices="cuda:4",
        settings={"nccl": 0},
    ),
    "two ranks, a device and the CPU each": Way(
        far="",
        plan={
            "": FIRST,
            "layers.1": "rank:0/cpu",
            "layers.2": "rank:1/cuda:1",
            "layers.3": "rank:1/cpu",
            "head": FIRST,
        },
    ),
    "by another name": Way(words=MLP + " --device npu:0", far="--device npu:0", devices="npu:2"),
    "by another name, one process": Way(
        words=MLP + " --device npu:0",
        far="--device npu:0",
        devices="npu:2",
        ranks=1,
        plan=split("rank:0/npu:0", "rank:0/npu:1"),
    ),
    "by another name, four ranks": Way(
        words=MLP + " --device npu:0", far="--device npu:0", devices="npu:4", ranks=4, plan=FOUR
    ),
    # without NCCL
    "without NCCL": Way(settings={"nccl": 0}),
    "without NCCL, first step measured": Way(words="--model mlp", settings={"nccl": 0}),
    "without NCCL or memory to memory": Way(settings={"nccl": 0, "farspan_same_host": 0}),
    # where the program has its model
    "moved after": Way(words=MLP + " --to after"),
    "moved after, one process": Way(words=MLP + " --to after", ranks=1, far="", plan=split(FIRST, SECOND)),
    "built on the device": Way(words=MLP + " --to default"),
    "deferred": Way(far="--set-device --deferred"),
    "deferred, first step measured": Way(words="--model mlp", far="--set-device --deferred"),
    "deferred, moved after": Way(words=MLP + " --to after", far="--set-device --deferred"),
    "deferred on the device": Way(words=MLP + " --to default", far="--set-device --deferred"),
    "a stage on the CPU": Way(far="", plan=split("rank:0/cuda:0", "rank:1/cpu")),
    "a stage on the CPU, first": Way(far="", plan=split("rank:0/cpu", "rank:1/cuda:0")),
    "a stage on the CPU, one process": Way(far="", plan=split("rank:0/cpu", "rank:0/cuda:1"), ranks=1),
    "a model on the CPU": Way(words=MLP + " --device cpu --buffers", far=""),
    "a model on the CPU, one process": Way(
        words=MLP + " --device cpu", far="", ranks=1, plan=split(FIRST, "rank:0/cpu")
    ),
    "the head elsewhere": Way(far="", ranks=1, plan={"": FIRST, "head": SECOND}),
    # what the program does
    "tied weights": Way(words=GPT),
    "tied weights, one process": Way(
        words=GPT, far="", ranks=1, plan={"": FIRST, "blocks.1": SECOND, "head": SECOND, "norm": SECOND}
    ),
    "bf16": Way(words=GPT + " --autocast bfloat16"),
    "bf16, a stage on the CPU": Way(
        words=MLP + " --autocast bfloat16", far="", plan=split("rank:0/cuda:0", "rank:1/cpu")
    ),
    "fp16, scaled and clipped": Way(words=GPT + " --autocast float16 --clip"),
    "fp16, scaled and clipped, one process": Way(
        words=MLP + " --autocast float16 --clip", far="", ranks=1, plan=split(FIRST, SECOND)
    ),
    "pinned": Way(words=GPT + " --pinned --clip"),
    "pinned, one process": Way(words=MLP + " --pinned --clip", far="", ranks=1, plan=split(FIRST, SECOND)),
    "SGD, foreach": Way(words=MLP + " --optimizer sgd --foreach yes"),
    "AdamW, foreach": Way(words=MLP + " --foreach yes"),
    "a batch norm": Way(words=MLP + " --buffers --evaluate"),
    "evaluation": Way(words=GPT + " --evaluate"),
    "a rank reads": Way(far="--set-device --from-rank host"),
    "a rank reads, no device set": Way(far="--from-rank host"),
    "a rank reads to its device": Way(far="--from-rank device"),
    "a rank reads, a stage on the CPU": Way(far="--from-rank host", plan=split("rank:0/cpu", "rank:1/cuda:0")),
    "saved and loaded": Way(words=MLP + " --reload torch --buffers"),
    "saved and loaded by farspan": Way(words=MLP + " --reload farspan --buffers"),
    "saved and loaded, one process": Way(words=MLP + " --reload farspan", far="", ranks=1, plan=split(FIRST, SECOND)),
    "printed at the end": Way(words=GPT + " --print never"),
    # how it is run
    "remat": Way(words=GPT, more={"remat": True}),
    "remat, one process": Way(far="", ranks=1, plan=split(FIRST, SECOND), more={"remat": True}),
    **{f"schedule {name}": Way(more={"schedule": name}) for name in ("gpipe", "1f1b", "zero-bubble")},
    "back and forth": Way(plan={"": "rank:0", "layers.1": "rank:1", "layers.2": "rank:0", "layers.3": "rank:1"}),
    "wide": Way(plan={"": "rank:0+rank:1"}),
    "wide, sums": Way(plan={"": "rank:0+rank:1"}, more={"gradient_reduction": "sum"}, places=4),
    "wide, without NCCL": Way(plan={"": "rank:0+rank:1"}, settings={"nccl": 0}),
    "wide, one process": Way(far="", ranks=1, plan={"": f"{FIRST}+{SECOND}"}),
    "wide and deep": Way(ranks=4, devices="cuda:4", plan=split("rank:0+rank:1", "rank:2+rank:3")),
    "groups": Way(more={"data_parallel": 2}),
    "groups of two": Way(ranks=4, devices="cuda:4", more={"data_parallel": 2}),
    "groups that set no device": Way(ranks=4, devices="cuda:4", far="", more={"data_parallel": 2}),
    "groups, optimizer sharded": Way(more={"data_parallel": 2, "shard": "optimizer"}),
    "groups, parameters sharded": Way(more={"data_parallel": 2, "shard": "parameters"}),
    "tensor": Way(words=GPT + " --optimizer sgd", more={"tensor_parallel": 2}, places=3),
    "groups of two, parameters sharded": Way(
        ranks=4, devices="cuda:4", more={"data_parallel": 2, "shard": "parameters"}
    ),
    "tensor and deep": Way(ranks=4, devices="cuda:4", plan=split("rank:0&rank:1", "rank:2&rank:3"), places=3),
    "tensor, one process": Way(words=MLP, far="", ranks=1, plan={"": f"{FIRST}&{SECOND}"}, places=3),
    "micro-batches of farspan's": Way(words=MLP + " --micro-batches 1", more={"micro_batches": 2}, places=4),
    "micro-batches of farspan's, one process": Way(
        words=MLP + " --micro-batches 1",
        far="",
        ranks=1,
        plan=split(FIRST, SECOND),
        more={"micro_batches": 2},
        places=4,
    ),
    "micro-batches of farspan's, four ranks": Way(
        words=MLP + " --micro-batches 1", ranks=4, devices="cuda:4", plan=FOUR, more={"micro_batches": 2}, places=4
    ),
}


_plain: dict[tuple[str, str], Path] = {}
"""What the plain program saved, by its words and its devices."""


@pytest.mark.parametrize("name", WAYS)
def test_the_numbers_are_the_plain_program_s(run: Run, tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    plain = way.words if "--device" in way.words else way.words + " --device cuda:0"
    if (plain, way.devices) not in _plain:
        run(TRAIN, *plain.split(), "--save", tmp_path / "plain.pt", devices=way.devices)
        _plain[plain, way.devices] = tmp_path / "plain.pt"
    words = [*plain.split(), "--farspan", *way.far.split(), "--more", json.dumps(way.more)]
    words += [] if way.plan is None else ["--plan", json.dumps(way.plan)]
    ended = run(TRAIN, *words, "--save", tmp_path / "far.pt", ranks=way.ranks, devices=way.devices, **way.settings)
    assert_same(_plain[plain, way.devices], tmp_path / "far.pt", places=way.places)
    assert ended.races == []
    assert len(ended.reports) >= way.ranks
