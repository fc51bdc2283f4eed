"""The product's own prediction of the zero-bubble tables: what `farspan plan --roofline` does, on the stages they had.

    Trial (nothing is computed, no weights are held)  ->  work of each module  ->  costed_graph(roofline=True)
    ->  stages, each of an equal number of blocks     ->  predicted: the step, simulated as the runtime would run it

    stage 0            stage 1 ..         last stage
    embedding, 2       3 blocks           2 blocks, head and loss       embedding and head count as a block, as there

Only these rows are pipelines of one device a stage, which is what `distribute` can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common import published
from fitting import fit, median_error
from gpt_model import GPT, Sizes

import farspan
from farspan.cluster import Cluster, DeviceClass
from farspan.place.measure.trial import Trial
from farspan.planner.cost_model import CostedGraph
from farspan.planner.optimize import Prediction, predict_step
from farspan.planner.pipeline import Pipeline, PipelineStage
from farspan.profile import StepProfile, costed_graph

__all__ = ["check_product", "predict"]

SCHEDULES = {"1F1B": "1f1b", "ZB-1p": "zero-bubble"}
"""By the table's word: the product's, for as much memory."""
PER_HOST, RECORDED = 8, 4
"""Devices; and how many micro-batches the program has before it is stopped."""
DATA_SHEET_FLOPS = 312e12
REACHED = 0.6
"""What the product takes for the share of the peak that products reach."""
FLOPS_RANGE = {"flops_per_s": (0.2 * DATA_SHEET_FLOPS, DATA_SHEET_FLOPS, 1.6 * DATA_SHEET_FLOPS)}
"""Of `flops` in cluster.toml: low, start, high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the table does not say of the program; the first of PROGRAMS is the one that is assumed."""

    name: str
    vocabulary: int = 32_000
    is_fused: bool = False
    has_one_dropout: bool = False


PROGRAMS = (
    Program(name="product"),
    Program(name="product, dropout of a GPU", has_one_dropout=True),
    Program(name="product, fused attention", is_fused=True),
    Program(name="product, 51,200 words", vocabulary=51_200),
)


def check_product(report: list[dict[str, Any]], *, is_quick: bool = False) -> dict[str, float]:
    """Print all rows by all programs, without a fit and with one; return the median errors of the first without.

    The one number that is fitted is the share of the peak, to the 1F1B of the first row.

    Args:
        report: Where the rows go.
        is_quick: Only by the first program.
    """
    rows = published("zero_bubble_tables.csv")
    medians: dict[str, float] = {}
    for program in PROGRAMS[:1] if is_quick else PROGRAMS:
        unfitted = _compare(program, rows, report)
        medians = medians or unfitted
        _print_stages(program, rows)
        found = fit(
            lambda free, program=program: [predict(program, rows[0], "1F1B", **free).step_s],
            [_measured_s(rows[0], "1F1B")],
            FLOPS_RANGE,
        )
        _compare(program, rows, report, flops_per_s=found["flops_per_s"])
    return medians


def _compare(
    program: Program, rows: Sequence[dict[str, str]], report: list[dict[str, Any]], *, flops_per_s: float = 0.0
) -> dict[str, float]:
    """Print the rows, and return their median errors by schedule; but for the row that was fitted to."""
    share = REACHED * (flops_per_s or DATA_SHEET_FLOPS) / DATA_SHEET_FLOPS
    part = f"{'fitted ' if flops_per_s else ''}share {share:.2f}"
    medians: dict[str, float] = {}
    for schedule in SCHEDULES:
        cases = rows[1:] if flops_per_s and schedule == "1F1B" else rows
        predicted = [predict(program, row, schedule, flops_per_s=flops_per_s).step_s for row in cases]
        measured = [_measured_s(row, schedule) for row in cases]
        for row, seconds, measured_s in zip(cases, predicted, measured, strict=True):
            name = f"{row['model']} p={row['p']} m={row['m']} {schedule}"
            off = seconds / measured_s - 1
            print(f"{program.name:30} {part:18} {name:30} {measured_s:8.3f} s {seconds:8.3f} s {off:+7.1%}", flush=True)
            report.append(
                {
                    "family": program.name,
                    "name": name,
                    "measured_s": measured_s,
                    "predicted_s": seconds,
                    "part": part,
                }
            )
        medians[schedule] = median_error(predicted, measured)
    print(f"{program.name}, {part}: " + ", ".join(f"{name} {value:.1%}" for name, value in medians.items()))
    return medians


def _print_stages(program: Program, rows: Sequence[dict[str, str]]) -> None:
    """A stage in the middle and the last one against the table's; and the memory of the fullest device."""
    for row in {row["model"]: row for row in rows}.values():
        found = {schedule: predict(program, row, schedule).stages for schedule in SCHEDULES}
        middle, last = found["1F1B"][1], found["1F1B"][-1]
        forward_s, *backward_s = (float(row[name]) / 1e3 for name in ("T_F_ms", "T_B_ms", "T_W_ms"))
        whole = forward_s + sum(backward_s)
        print(
            f"{program.name}, {row['model']}: forward {middle.forward_s / forward_s - 1:+.0%}, backward "
            f"{middle.backward_s / sum(backward_s) - 1:+.0%}, last stage "
            f"{(last.forward_s + last.backward_s) / whole - 1:+.0%}; "
            + ", ".join(
                f"{schedule} {max(stage.memory_bytes for stage in stages) / 1e9:.0f} GB of {row[f'mem_GB_{schedule}']}"
                for schedule, stages in found.items()
            )
        )


def predict(program: Program, row: dict[str, str], schedule: str, *, flops_per_s: float = 0.0) -> Prediction:
    """The step that the product predicts.

    Args:
        program: What runs.
        row: Of the table.
        schedule: The table's word.
        flops_per_s: `flops` of cluster.toml; 0 for what the product knows of an A100.
    """
    num_stages = int(row["p"])
    sizes = Sizes(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        sequence=int(row["seq"]),
        vocabulary=program.vocabulary,
        is_fused=program.is_fused,
        has_one_dropout=program.has_one_dropout,
    )
    cluster = _cluster(num_stages, flops_per_s)
    graph = costed_graph(_recorded(sizes, int(row["microbatch"]), num_stages), cluster, roofline=True)
    pipeline = Pipeline(stages=_stages(graph, sizes.layers, num_stages))
    return predict_step(graph, cluster, pipeline, int(row["m"]), schedules=(SCHEDULES[schedule],))


def _measured_s(row: dict[str, str], schedule: str) -> float:
    samples = int(row["m"]) * int(row["microbatch"]) / int(row["p"])
    return samples / float(row[f"samples_per_gpu_s_{schedule}"])


def _cluster(num_devices: int, flops_per_s: float) -> Cluster:
    """A100s, 8 to a host, NVLink of 300 GB/s each way; between hosts 200 Gb/s RoCE for each."""
    kind = DeviceClass(
        name="A100",
        kind="A100",
        num_hosts=-(-num_devices // PER_HOST),
        devices_per_host=PER_HOST,
        within_bytes_per_s=300e9,
        between_bytes_per_s=25e9,
        latency_s=20e-6,
        flops_per_s=flops_per_s,
    )
    return Cluster(classes=(kind,))


@lru_cache
def _recorded(sizes: Sizes, micro_batch: int, num_devices: int) -> StepProfile:
    """Run the program up to its first step, in bfloat16, without computing anything."""
    with Trial(num_devices=lambda: num_devices, is_dry=True, has_fake_weights=True) as trial:
        model = farspan.distribute(GPT(sizes).to(torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(micro_batch, sizes.sequence, dtype=torch.long)
        for _ in range(RECORDED):
            logits = model(tokens).float()
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return trial.profile()


def _stages(graph: CostedGraph, layers: int, num_stages: int) -> tuple[PipelineStage, ...]:
    """Equal numbers of blocks, where what comes before the blocks and what comes after them count as one each."""
    per_stage = (layers + 2) // num_stages
    assert per_stage * num_stages == layers + 2
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for node in graph.nodes:
        head, _, rest = node.name.partition(".")
        if head == "blocks":
            names[(int(rest.partition(".")[0]) + 1) // per_stage].append(node.name)
        else:
            names[0 if head in ("embedding", "positions") else -1].append(node.name)
    return tuple(PipelineStage(device_class="A100", nodes=tuple(each)) for each in names)
