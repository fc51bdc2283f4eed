"""AMP's homogeneous trials (Li et al., NeurIPS 2022): GPT-2 on 16 T4 in 4 hosts, 32 samples a step, fp16.

The step is the planner's objective (docs/planner-graph.md): sum over stages of once, the slowest stage for each
further micro-batch, and the exchange of gradients.

    ranks are numbered tensor first, then data, then stages; 4 to a host:   host 0 | host 1 | host 2 | host 3
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from benchmarks.common import published
from families import GPT_KERNELS
from transformer import (
    Device,
    Fitted,
    Run,
    Transformer,
    all_reduce_s,
    exchange_s,
    head_passes,
    layer_passes,
    optimizer_s,
)

__all__ = ["RANGES", "Trial", "finished_trials", "step_s"]

MODEL = Transformer.gpt(layers=24, hidden=1024, heads=16, vocabulary=52_256)
SEQUENCE, SAMPLES, PER_HOST = 1024, 32, 4
FIRST_LAYER = 2
"""Of the 30 entries of `layer_partition`: embedding, a step without work, 24 layers, 2 without, the head, 1 without."""
T4 = Device(
    flops=65e12, memory_bytes_per_s=320e9, within_bytes_per_s=1.0, between_bytes_per_s=1.0, watts=70, per_host=PER_HOST
)

RANGES = {  # low, start, high of what is fitted for this machine; the rest of `Fitted` comes from the other tables
    "peak_share": (0.05, 0.5, 1.0),
    "launch_s": (1e-6, 1e-4, 1e-2),
    "within_bytes_per_s": (1e8, 5e9, 16e9),
    "between_bytes_per_s": (1e7, 1e9, 50e9 / 8 / PER_HOST),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial that ended; `cuts` are the borders of stages among the 30 entries."""

    micro_batch: int
    tp: int
    dp: int
    cuts: tuple[int, ...]
    authors_s: float
    measured_s: float

    @property
    def pp(self) -> int:
        return len(self.cuts) - 1

    @property
    def name(self) -> str:
        return f"micro-batch {self.micro_batch}, tp={self.tp} dp={self.dp} pp={self.pp}"


def finished_trials() -> list[Trial]:
    """All homogeneous trials with a time; `inf` is one that failed."""
    return [
        Trial(
            micro_batch=int(row["microbatch_size"]),
            tp=int(row["tp"]),
            dp=int(row["dp"]),
            cuts=tuple(map(int, row["layer_partition"].strip("[]").split())),
            authors_s=float(row["amp_predicted_s"]),
            measured_s=float(row["measured_s_per_iter"]),
        )
        for row in published("amp_real_trials.csv")
        if row["experiment"] == "homogeneous" and row["measured_s_per_iter"] != "inf"
    ]


def step_s(trial: Trial, shared: Fitted, found: dict[str, float]) -> float:
    """Seconds of a step, by what the other tables say (`shared`) and what was found for this machine."""
    device = replace(
        T4, within_bytes_per_s=found["within_bytes_per_s"], between_bytes_per_s=found["between_bytes_per_s"]
    )
    fitted = replace(shared, peak_share=found["peak_share"], launch_s=found["launch_s"], link_share=1.0)
    tp, dp = trial.tp, trial.dp
    run = Run(
        model=MODEL,
        kernels=GPT_KERNELS,
        device=device,
        sequence=SEQUENCE,
        tokens=SEQUENCE * trial.micro_batch,
        tensor_parallel=tp,
    )
    size = 2 * run.tokens * MODEL.hidden
    layer = layer_passes(run, fitted).total + 4 * all_reduce_s(size, tp, tp, device, fitted)
    head = head_passes(run, fitted).total
    hops = [2 * _hop_s(border, trial, size, device, fitted) for border in range(1, trial.pp)]
    in_host, sync, once = min(dp, PER_HOST // tp), list[float](), list[float]()
    for start, end in itertools.pairwise(trial.cuts):
        layers = len(set(range(start, end)) & set(range(FIRST_LAYER, FIRST_LAYER + MODEL.layers)))
        is_first, is_last = start == 0, end == trial.cuts[-1]
        parameters = layers * MODEL.layer_parameters + (is_first or is_last) * MODEL.embedding_parameters
        once.append(layers * layer + is_last * head)
        sync.append(
            all_reduce_s(2 * parameters / tp, dp, in_host, device, fitted)
            + optimizer_s(parameters / tp, device, fitted)
        )
    tied = 2 * MODEL.embedding_parameters / tp
    tied_s = tied / (device.between_bytes_per_s * PER_HOST / _senders(trial)) if trial.pp > 1 else 0.0
    beside = [(before + after) / 2 for before, after in itertools.pairwise([0.0, *hops, 0.0])]
    slowest = max(seconds + hop for seconds, hop in zip(once, beside, strict=True))
    num_micro_batches = SAMPLES // (trial.micro_batch * dp)
    return sum(once) + sum(hops) + (num_micro_batches - 1) * slowest + max(sync) + tied_s


def _senders(trial: Trial) -> int:
    """Ranks of a stage on one host, which share its network card."""
    return min(trial.tp * trial.dp, PER_HOST)


def _hop_s(border: int, trial: Trial, size: float, device: Device, fitted: Fitted) -> float:
    first = border * trial.tp * trial.dp
    if first % PER_HOST:
        return exchange_s(2 * size, 2, 2, device, fitted)
    alone = replace(device, between_bytes_per_s=device.between_bytes_per_s * PER_HOST / _senders(trial))
    return exchange_s(2 * size, 2, 1, alone, fitted)
