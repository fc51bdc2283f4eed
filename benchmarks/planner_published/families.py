"""The measured step times in published/: zero-bubble, Megatron 2021 and torchtitan 8B, and what the model says.

What a table does not say is assumed here, for all of its rows alike; README.md lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.common import published
from transformer import (
    Device,
    Fitted,
    Kernels,
    Passes,
    Run,
    Transformer,
    all_reduce_s,
    exchange_s,
    head_passes,
    layer_passes,
    optimizer_s,
)

__all__ = ["GPT_KERNELS", "Row", "all_rows", "hop_s", "later_megatron_rows", "stage_times", "zero_bubble_s"]

A100 = Device(flops=312e12, memory_bytes_per_s=2.039e12, within_bytes_per_s=300e9, between_bytes_per_s=25e9, watts=400)
H100 = Device(flops=989e12, memory_bytes_per_s=2.4e12, within_bytes_per_s=450e9, between_bytes_per_s=50e9, watts=500)
H200 = replace(H100, memory_bytes_per_s=4.8e12, watts=700)

# Forward passes over memory. GPT: layer norms 2 x 2 and (dropout + residual) 2 x 3.5 in full on every rank; copies of
# q, k, v 6 and of the context 2, GELU 8; softmax 2, dropout 2.5, reading both products 1.5. Llama, eager: RMSNorm in
# pieces 2 x 17, rotary 10, repeated keys 2.5, copy 2, SwiGLU 17.5, residuals 6; compiled: 4, 2.5, 2.5, 0, 10.5, 4.5.
# Loss: float32 copies, log-softmax and its backward; compiled, about half.
GPT_KERNELS = Kernels(serial=11, parallel=16, scores=6, loss=15)
SHARED_GPT_KERNELS = replace(GPT_KERNELS, serial=0, parallel=GPT_KERNELS.serial + GPT_KERNELS.parallel)
EAGER = Kernels(serial=0, parallel=72, scores=0, loss=15)
COMPILED = Kernels(serial=0, parallel=24, scores=0, loss=8)

LLAMA_8B = Transformer(
    layers=32, hidden=4096, heads=32, vocabulary=128_256, layer_parameters=2.5 * 4096**2 + 3 * 4096 * 14_336
)
GPT_VOCABULARY = 51_200
PAPER_ROUNDS = 3
"""Stages per rank of the zero-bubble paper's interleaved 1F1B."""
TP_EXCHANGES, TP_HIDDEN = 10, 8
"""Of sequence parallelism, per layer and step: forward 4, backward 4, inputs gathered again 2; async TP hides 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured step.

    Attributes:
        family: The table.
        name: Of the row.
        measured_s: Seconds of a step.
        predict: What the model says.
        is_training: Whether the fit may see it.
    """

    family: str
    name: str
    measured_s: float
    predict: Callable[[Fitted], float]
    is_training: bool


def all_rows() -> list[Row]:
    return [*zero_bubble_rows(), *megatron_rows(), *torchtitan_rows()]


def zero_bubble_rows() -> Iterator[Row]:
    """Four schedules of each row. To fit: 1.5B with 24 micro-batches."""
    for row in published("zero_bubble_tables.csv"):
        samples = int(row["m"]) * int(row["microbatch"]) / int(row["p"])
        for schedule in ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p"):
            yield Row(
                family="zero-bubble",
                name=f"{row['model']} p={row['p']} m={row['m']} {schedule}",
                measured_s=samples / float(row[f"samples_per_gpu_s_{schedule}"]),
                predict=lambda fitted, row=row, schedule=schedule: zero_bubble_s(row, schedule, fitted),
                is_training=(row["model"], row["m"]) == ("1.5B", "24"),
            )


def stage_times(row: dict[str, str], fitted: Fitted) -> Passes:
    """A stage's T_F, T_B, T_W; embedding and head count as a layer each, as the paper balances them."""
    run = _zero_bubble_run(row)
    layer, layers = layer_passes(run, fitted), run.model.layers / int(row["p"])
    return Passes(forward=layers * layer.forward, backward=layers * layer.backward, weight=layers * layer.weight)


def _zero_bubble_run(row: dict[str, str]) -> Run:
    hidden, heads, sequence = int(row["hidden"]), int(row["heads"]), int(row["seq"])
    model = Transformer.gpt(layers=int(row["layers"]) + 2, hidden=hidden, heads=heads, vocabulary=GPT_VOCABULARY)
    return Run(
        model=model, kernels=GPT_KERNELS, device=A100, sequence=sequence, tokens=sequence * int(row["microbatch"])
    )


def hop_s(row: dict[str, str], fitted: Fitted) -> float:
    """Seconds from a stage to the next: the mean of those within a host and those between hosts."""
    run, borders = _zero_bubble_run(row), int(row["p"]) - 1
    crossings, size = borders // run.device.per_host, 2 * (2 * run.tokens * run.model.hidden)
    within = (borders - crossings) * exchange_s(size, 2, 2, run.device, fitted)
    return (within + crossings * exchange_s(size, 2, 1, run.device, fitted)) / borders


def zero_bubble_s(row: dict[str, str], schedule: str, fitted: Fitted) -> float:
    """The step by formula; of the zero-bubble schedules that which benchmarks/bubble_rates proves and attains."""
    run, stage = _zero_bubble_run(row), stage_times(row, fitted)
    p, m, hops = int(row["p"]), int(row["m"]), (int(row["p"]) - 1) * hop_s(row, fitted)
    work = m * stage.total
    if schedule == "1F1B":
        return work + (p - 1) * stage.total + 2 * hops * m / p  # the way down and up, once for every p micro-batches
    if schedule == "1F1B-I":
        return work + (p - 1) * stage.total / PAPER_ROUNDS
    memory = p if schedule == "ZB-1p" else 2 * p
    weight_memory = 32 / (34 + 5 * run.model.heads * run.sequence / run.model.hidden)
    way = (p - 1) * (stage.forward + stage.backward) + 2 * hops
    before = way + stage.forward - memory * stage.forward
    after = way - (memory - 1) * max(stage.backward + stage.weight, stage.weight / weight_memory)
    return max(way + work - (m - 1) * stage.weight, work + max(before, 0.0) + max(after, 0.0))


def megatron_rows() -> Iterator[Row]:
    """Weak scaling. To fit: the smallest and the largest."""
    for row in published("megatron_2021_table1_weak_scaling.csv"):
        yield Row(
            family="Megatron",
            name=row["model"],
            measured_s=float(row["derived_iter_time_s"]),
            predict=lambda fitted, row=row: megatron_s(row, fitted),
            is_training=row["model"] in ("1.7B", "1T"),
        )


def megatron_s(row: dict[str, str], fitted: Fitted) -> float:
    """With the sizes of micro-batches and the number of rounds that are best by the model: the table has neither."""
    dp, pp = int(row["dp"]), int(row["pp"])
    samples, layers = int(row["global_batch"]) // dp, int(row["layers"]) // pp
    return min(
        _megatron_s(row, fitted, samples=samples, size=size, dp=dp, rounds=rounds)
        for size in (1, 2, 4, 8)
        if samples % size == 0
        for rounds in range(1, layers + 1)
        if rounds == 1 or (pp > 1 and layers % rounds == 0)
    )


def later_megatron_rows() -> Iterator[Row]:
    """Selective recompute (2022), for a look at rows that nobody had looked at while the model was made."""
    for row in published("megatron_2022_selective_recompute.csv"):
        for column, is_selective in (("iter_s_full_recompute", False), ("iter_s_seqpar_selective", True)):
            yield Row(
                family="Megatron 2022",
                name=f"{row['model']} {'selective' if is_selective else 'full'} recompute",
                measured_s=float(row[column]),
                predict=lambda fitted, row=row, is_selective=is_selective: _megatron_s(
                    row,
                    fitted,
                    samples=int(row["global_batch"]),
                    size=int(row["microbatch"]),
                    dp=1,
                    rounds=int(row["interleave_m"] or 1),
                    is_selective=is_selective,
                ),
                is_training=False,
            )


def _megatron_s(
    row: dict[str, str],
    fitted: Fitted,
    *,
    samples: int,
    size: int,
    dp: int,
    rounds: int,
    is_selective: bool = False,
) -> float:
    """Selective: only attention is computed again, and sequence parallelism leaves nothing to do in full."""
    tp, pp, sequence = (int(row[name]) for name in ("tp", "pp", "seq"))
    model = Transformer.gpt(
        layers=int(row["layers"]), hidden=int(row["hidden"]), heads=int(row["heads"]), vocabulary=int(row["vocab"])
    )
    run = Run(
        model=model,
        kernels=SHARED_GPT_KERNELS if is_selective else GPT_KERNELS,
        device=A100,
        sequence=sequence,
        tokens=sequence * size,
        tensor_parallel=tp,
    )
    layer, moved = layer_passes(run, fitted), 2 * run.tokens * model.hidden
    again = layer.attention if is_selective else layer.forward
    num_reduced = 4 if is_selective else 6  # 2 in each of forward, backward, and forward again
    reduced = num_reduced * all_reduce_s(moved, tp, tp, A100, fitted)
    stage = model.layers / pp * (layer.total + again + reduced)
    hops = 4 * rounds * exchange_s(moved / tp, 2, 1, A100, fitted) if pp > 1 else 0.0
    rate = stage + head_passes(run, fitted).total + hops
    parameters = (model.layers * model.layer_parameters / pp + model.embedding_parameters) / tp
    sync = all_reduce_s(2 * parameters, dp, min(dp, A100.per_host // tp), A100, fitted)
    return (pp - 1) / rounds * stage + samples // size * rate + sync + optimizer_s(parameters, A100, fitted)


def torchtitan_rows() -> Iterator[Row]:
    """To fit: 8 GPUs without context parallelism, and bf16 with tensor parallelism (both)."""
    for row in published("torchtitan_llama3.csv"):
        in_groups = int(row["cp"]) * int(row["tp"])
        tokens = int(row["local_batch"]) * int(row["seq"]) / in_groups
        yield Row(
            family="torchtitan",
            name=" ".join((row["hardware"][:4], f"{row['gpus']} GPUs", f"tp={row['tp']}", f"cp={row['cp']}"))
            + f" seq={row['seq']} {row['techniques']}",
            measured_s=tokens / float(row["tokens_per_s_per_gpu"]),
            predict=lambda fitted, row=row: torchtitan_s(row, fitted),
            is_training=(row["gpus"], row["cp"]) == ("8", "1") or row["techniques"].startswith("compile bf16"),
        )


def torchtitan_s(row: dict[str, str], fitted: Fitted) -> float:
    model, device = LLAMA_8B, H200 if row["hardware"].startswith("H200") else H100
    how = row["techniques"]
    kernels = EAGER if how == "eager" else replace(COMPILED, float8="float8" in how)
    tp, cp, sequence = int(row["tp"]), int(row["cp"]), int(row["seq"])
    tokens = int(row["local_batch"]) * sequence / cp
    run = Run(model=model, kernels=kernels, device=device, sequence=sequence, tokens=tokens, tensor_parallel=tp)
    layer = layer_passes(run, fitted)
    # Selective: attention and every second matmul are kept.
    again = layer.forward if row["activation_ckpt"] == "full" else layer.forward - layer.attention - layer.weight / 2
    exchange = exchange_s(2 * tokens * model.hidden, tp, tp, device, fitted)
    exposed = TP_EXCHANGES - (TP_HIDDEN * fitted.overlap if "asyncTP" in how else 0.0)
    parameters, shards = (
        (model.layers * model.layer_parameters + 2 * model.embedding_parameters) / tp,
        int(row["fsdp"]) * cp,
    )
    # FSDP: parameters gathered twice in 16 bits, gradients scattered in 32, beside the computation.
    sharing = exchange_s((2 + 2 + 4) * parameters, shards, min(shards, device.per_host // tp), device, fitted)
    return (
        model.layers * (layer.total + again + exposed * exchange)
        + head_passes(run, fitted).total
        + (1 - fitted.overlap) * sharing
        + optimizer_s(parameters / shards, device, fitted)
    )
