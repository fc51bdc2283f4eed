"""AMP's trials (Li et al., NeurIPS 2022): GPT-2 on 16 devices in 4 hosts, 32 samples a step, fp16.

The step is the planner's objective (docs/planner-graph.md): sum over stages of once, the slowest stage for each
further micro-batch, and the exchange of gradients. A stage is as slow as its slowest device, and what is exchanged
goes as fast as the slowest link on its way. What the authors' copy of DeepSpeed and Megatron does besides:

    sends block both sides (_exec_schedule): a stage computes or exchanges with one neighbour at a time
    an activation goes in tp parts, and each rank sends all of the attention mask with it (_exec_send_activations)
    a gradient goes in full from each rank (is_grad_partitioned = False)
    data parallel gradients are reduced in 32 bits (ds_config.json: fp32_allreduce), tied ones in 16
    a timer waits for the device before and after each all-reduce of tensor parallelism (mpu/mappings.py): the host
    launches a layer while the device is idle; without tensor parallelism it is ahead of the device

    ranks are numbered tensor first, then data, then stages; 4 to a host:

    experiment      host 0    host 1    host 2    host 3
    homogeneous     T4        T4        T4        T4          g4dn.12xlarge, 50 Gb/s
    het_cluster     V100      V100      V100      T4          p3.8xlarge, 10 Gb/s, and one g4dn.12xlarge

That there are three hosts of V100, and that they come first, is what the authors' script het_cluster.py says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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

__all__ = ["RANGES", "T4", "V100", "Kind", "Trial", "finished_trials", "kind_of", "step_s"]

MODEL = Transformer.gpt(layers=24, hidden=1024, heads=16, vocabulary=52_256)
SEQUENCE, SAMPLES, PER_HOST = 1024, 32, 4
MASK_BYTES = 2 * SEQUENCE**2
"""One mask for all samples of a micro-batch, sent in 16 bits."""
FIRST_LAYER = 2
"""Of the 30 entries of `layer_partition`: embedding, a step without work, 24 layers, 2 without, the head, 1 without."""
T4 = Device(
    flops=65e12,
    memory_bytes_per_s=320e9,
    within_bytes_per_s=16e9,
    between_bytes_per_s=50e9 / 8 / PER_HOST,
    watts=70,
    per_host=PER_HOST,
)
"""On a g4dn.12xlarge: PCIe 3.0 of 16 lanes."""
V100 = Device(
    flops=125e12,
    memory_bytes_per_s=900e9,
    within_bytes_per_s=50e9,
    between_bytes_per_s=10e9 / 8 / PER_HOST,
    watts=300,
    per_host=PER_HOST,
)
"""On a p3.8xlarge: two NVLinks of 25 GB/s between a pair."""

RANGES = {  # low, start, high of what is fitted for this machine; the rest of `Fitted` comes from the other tables
    "peak_share": (0.05, 0.5, 1.0),
    "launch_s": (1e-6, 1e-4, 1e-2),
    "within_bytes_per_s": (1e8, 5e9, T4.within_bytes_per_s),
    "between_bytes_per_s": (1e7, 1e9, T4.between_bytes_per_s),
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

    def hosts_of(self, stage: int, hosts: Sequence[Kind]) -> list[Kind]:
        """The hosts that a stage lies on."""
        size = self.tp * self.dp
        return list(hosts[stage * size // PER_HOST : -(-(stage + 1) * size // PER_HOST)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of host: its devices, and what they reach."""

    device: Device
    fitted: Fitted


def finished_trials(experiment: str) -> list[Trial]:
    """All trials of an experiment with a time; `inf` is one that failed."""
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
        if row["experiment"] == experiment and row["measured_s_per_iter"] != "inf"
    ]


def kind_of(device: Device, shared: Fitted, found: dict[str, float]) -> Kind:
    """A kind of host, by what the other tables say (`shared`) and what was found for this one."""
    links = {name: found[name] for name in ("within_bytes_per_s", "between_bytes_per_s")}
    fitted = replace(shared, peak_share=found["peak_share"], launch_s=found["launch_s"], link_share=1.0)
    return Kind(device=replace(device, **links), fitted=fitted)


def step_s(trial: Trial, hosts: Sequence[Kind]) -> float:
    """Seconds of a step on these hosts."""
    tp, dp = trial.tp, trial.dp
    size = 2 * SEQUENCE * trial.micro_batch * MODEL.hidden
    last = trial.pp - 1
    hops = [_hops_s(border, trial, size, hosts) for border in range(1, trial.pp)]
    in_host, sync, once = min(dp, PER_HOST // tp), list[float](), list[float]()
    for stage, (start, end) in enumerate(itertools.pairwise(trial.cuts)):
        own = trial.hosts_of(stage, hosts)
        layers = len(set(range(start, end)) & set(range(FIRST_LAYER, FIRST_LAYER + MODEL.layers)))
        parameters = layers * MODEL.layer_parameters + (stage in (0, last)) * MODEL.embedding_parameters
        once.append(max(layers * _layer_s(trial, size, kind) + (stage == last) * _head_s(trial, kind) for kind in own))
        sync.append(
            max(all_reduce_s(4 * parameters / tp, dp, in_host, kind.device, kind.fitted) for kind in own)
            + max(optimizer_s(parameters / tp, kind.device, kind.fitted) for kind in own)
        )
    tied = 2 * MODEL.embedding_parameters / tp
    ends = [*trial.hosts_of(0, hosts), *trial.hosts_of(last, hosts)]
    tied_s = tied / min(_alone(trial, kind.device).between_bytes_per_s for kind in ends) if trial.pp > 1 else 0.0
    beside = [before + after for before, after in itertools.pairwise([0.0, *hops, 0.0])]
    slowest = max(seconds + hop for seconds, hop in zip(once, beside, strict=True))
    num_micro_batches = SAMPLES // (trial.micro_batch * dp)
    return sum(once) + sum(hops) + (num_micro_batches - 1) * slowest + max(sync) + tied_s


def _run(trial: Trial, kind: Kind) -> Run:
    return Run(
        model=MODEL,
        kernels=GPT_KERNELS,
        device=kind.device,
        sequence=SEQUENCE,
        tokens=SEQUENCE * trial.micro_batch,
        tensor_parallel=trial.tp,
    )


def _layer_s(trial: Trial, size: float, kind: Kind) -> float:
    fitted = kind.fitted if trial.tp > 1 else replace(kind.fitted, launch_s=0.0)
    reduced = all_reduce_s(size, trial.tp, trial.tp, kind.device, fitted)
    return layer_passes(_run(trial, kind), fitted).total + 4 * reduced


def _head_s(trial: Trial, kind: Kind) -> float:
    return head_passes(_run(trial, kind), kind.fitted).total


def _alone(trial: Trial, device: Device) -> Device:
    """The device with its part of the network card: the ranks of a stage on one host share that."""
    senders = min(trial.tp * trial.dp, PER_HOST)
    return replace(device, between_bytes_per_s=device.between_bytes_per_s * PER_HOST / senders)


def _hops_s(border: int, trial: Trial, size: float, hosts: Sequence[Kind]) -> float:
    """Seconds there and back again over a border of stages; the activation's parts are gathered at both of its ends."""
    sent_bytes = (size / trial.tp + MASK_BYTES) + size
    ends = [*trial.hosts_of(border - 1, hosts), *trial.hosts_of(border, hosts)]
    gathered = max(exchange_s(size, trial.tp, trial.tp, kind.device, kind.fitted) for kind in ends)
    in_host = 2 if border * trial.tp * trial.dp % PER_HOST else 1
    sent = max(exchange_s(2 * sent_bytes, 2, in_host, _alone(trial, kind.device), kind.fitted) for kind in ends)
    return sent + 2 * gathered
