"""What a transformer takes on a device: a roofline with one efficiency curve, and one link model.

One pass (forward, input gradients, weight gradients) over one layer, on one of tp devices, with T tokens and hidden
size h:

    matmuls    flops / sustained, and launch_s besides; sustained = peak * peak_share * x / (x + half_size)
               with 1 / x = 1 / T + 1 / h + tp / h: the curve, over the size of a product
               and peak = the data sheet's, but at most watts * flops_per_watt
    attention  flops / (peak * peak_share), times fused_attention_share where it is one kernel
    the rest   bytes / (memory bandwidth * memory_share): counted passes over what lies in memory
    links      bytes / (bandwidth * link_share) + LATENCY_S; of what a program hides, the share `overlap` is hidden

What is fitted is in `Fitted`; all else is counted, or from data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "LATENCY_S",
    "Device",
    "Fitted",
    "Kernels",
    "Passes",
    "Run",
    "Transformer",
    "all_reduce_s",
    "exchange_s",
    "head_passes",
    "layer_passes",
    "optimizer_s",
]

LATENCY_S = 20e-6
OPTIMIZER_BYTES = 30
"""Read and written for each parameter: a master copy, two moments, the gradient, the 16-bit copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device and its links, from data sheets; bandwidths of one direction, `between` of one device."""

    flops: float
    memory_bytes_per_s: float
    within_bytes_per_s: float
    between_bytes_per_s: float
    watts: float
    per_host: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The only numbers that are neither counted nor looked up; the module's docstring says what each does."""

    peak_share: float
    half_size: float
    flops_per_watt: float
    fused_attention_share: float
    float8_gain: float
    memory_share: float
    link_share: float
    overlap: float
    launch_s: float = 0.0

    def peak(self, device: Device) -> float:
        return min(device.flops, device.watts * self.flops_per_watt) * self.peak_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How a program computes a layer: passes over memory, 2 bytes a number.

    Attributes:
        serial: Over [tokens, hidden], what every tensor-parallel rank does in full.
        parallel: Over [tokens, hidden], what they share.
        scores: Over [heads, tokens, sequence]; 0 for fused attention, which also skips the masked half.
        loss: Over [tokens, vocabulary], forward and backward.
        float8: Matmuls of the layers (not of the head) have 8 bits.
    """

    serial: float
    parallel: float
    scores: float
    loss: float
    float8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A model; `layer_parameters` are those in the matmuls of a layer."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    layer_parameters: float

    @classmethod
    def gpt(cls, *, layers: int, hidden: int, heads: int, vocabulary: int) -> Transformer:
        return cls(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, layer_parameters=12.0 * hidden**2)

    @property
    def embedding_parameters(self) -> float:
        return float(self.hidden * self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model in use: `tokens` of a micro-batch on a device, of `sequence` long texts."""

    model: Transformer
    kernels: Kernels
    device: Device
    sequence: int
    tokens: float
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of each pass; `attention` is what of the forward is between the projections."""

    forward: float
    backward: float
    weight: float
    attention: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


def layer_passes(run: Run, fitted: Fitted) -> Passes:
    """The three passes over one layer; without the communication of tensor parallelism."""
    model, kernels, device, tp = run.model, run.kernels, run.device, run.tensor_parallel
    peak, is_fused = fitted.peak(device), kernels.scores == 0
    size = 1 / (1 / run.tokens + 1 / model.hidden + tp / model.hidden)
    sustained = peak * size / (size + fitted.half_size) * (fitted.float8_gain if kernels.float8 else 1.0)
    linear = 2 * run.tokens * model.layer_parameters / tp / sustained + fitted.launch_s
    products = 4 * run.tokens * run.sequence * model.hidden / tp / peak
    if is_fused:
        products /= 2 * fitted.fused_attention_share
    memory = device.memory_bytes_per_s * fitted.memory_share
    scores = 2 * run.tokens * run.sequence * model.heads / tp * kernels.scores / memory
    rest = 2 * run.tokens * model.hidden * (kernels.serial + kernels.parallel / tp) / memory
    again = 2.5 if is_fused else 2.0  # a fused kernel computes the scores again
    return Passes(
        forward=linear + products + scores + rest,
        backward=linear + again * products + scores + rest,
        weight=linear,
        attention=products + scores,
    )


def head_passes(run: Run, fitted: Fitted) -> Passes:
    """The three passes over the output layer and the loss."""
    device, share = run.device, run.tokens / run.tensor_parallel
    linear = 2 * share * run.model.embedding_parameters / fitted.peak(device)
    moved = 2 * share * run.model.vocabulary * run.kernels.loss
    rest = moved / (device.memory_bytes_per_s * fitted.memory_share)
    return Passes(forward=linear + rest / 2, backward=linear + rest / 2, weight=linear)


def exchange_s(size_bytes: float, ranks: int, in_host: int, device: Device, fitted: Fitted) -> float:
    """Seconds of an all-gather or reduce-scatter over `ranks`, of which `in_host` are on each host: half a ring."""
    if ranks == 1:
        return 0.0
    bandwidth = device.within_bytes_per_s
    if ranks > in_host:
        bandwidth = min(bandwidth, device.between_bytes_per_s * in_host)
    return size_bytes * (ranks - 1) / ranks / (bandwidth * fitted.link_share) + LATENCY_S


def all_reduce_s(size_bytes: float, ranks: int, in_host: int, device: Device, fitted: Fitted) -> float:
    return 2 * exchange_s(size_bytes, ranks, in_host, device, fitted)


def optimizer_s(parameters: float, device: Device, fitted: Fitted) -> float:
    return OPTIMIZER_BYTES * parameters / (device.memory_bytes_per_s * fitted.memory_share)
