"""Speeds of a few devices by name, from their makers' data sheets: without sparsity, of the variant that is named.

name     source
V100     NVIDIA V100 Tensor Core GPU data sheet (SXM2): 15.7 and 125 TFLOP/s, 900 GB/s
T4       NVIDIA T4 data sheet: 8.1 and 65 TFLOP/s, 300 GB/s
A100     NVIDIA A100 Tensor Core GPU data sheet (80 GB, SXM): 19.5 and 312 TFLOP/s, 2,039 GB/s
L4       NVIDIA L4 Tensor Core GPU data sheet: 30.3 and 121 TFLOP/s, 300 GB/s
L40S     NVIDIA L40S data sheet: 91.6 and 362 TFLOP/s, 864 GB/s
H100     NVIDIA H100 Tensor Core GPU data sheet (SXM): 67 and 989 TFLOP/s, 3.35 TB/s
H200     NVIDIA H200 Tensor Core GPU data sheet (SXM): 67 and 989 TFLOP/s, 4.8 TB/s
MI250X   AMD Instinct MI250X data sheet, one of its two dies: 23.9 and 191.5 TFLOP/s, 1.6 TB/s
MI300X   AMD Instinct MI300X data sheet: 163.4 and 1,307 TFLOP/s, 5.3 TB/s

The first speed is of float32 as torch computes it by default (no TF32), the second of float16 and bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

from farspan.cluster.cluster import DeviceClass

__all__ = ["KNOWN", "Speeds", "speeds_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speeds that a device reaches at best.

    Attributes:
        flops_per_s: With float32.
        half_flops_per_s: With numbers of 16 bits.
        memory_bytes_per_s: Of its own memory.
        least_s: What an operation takes at least, if only to be started.
    """

    flops_per_s: float
    half_flops_per_s: float
    memory_bytes_per_s: float
    least_s: float = 0.0


_START_S = 5e-6
"""Seconds that torch needs to start an operation on a GPU."""


def _gpu(teraflops: float, half_teraflops: float, gigabytes: float) -> Speeds:
    return Speeds(
        flops_per_s=teraflops * 1e12,
        half_flops_per_s=half_teraflops * 1e12,
        memory_bytes_per_s=gigabytes * 1e9,
        least_s=_START_S,
    )


KNOWN = {
    "V100": _gpu(15.7, 125, 900),
    "T4": _gpu(8.1, 65, 300),
    "A100": _gpu(19.5, 312, 2039),
    "L4": _gpu(30.3, 121, 300),
    "L40S": _gpu(91.6, 362, 864),
    "H100": _gpu(67, 989, 3350),
    "H200": _gpu(67, 989, 4800),
    "MI250X": _gpu(23.9, 191.5, 1600),
    "MI300X": _gpu(163.4, 1307, 5300),
}


def speeds_of(device_class: DeviceClass) -> Speeds | None:
    """Returns the speeds that cluster.toml gives, else those known of its kind; None if there are none.

    >>> speeds_of(DeviceClass(name="new", kind="h100")).memory_bytes_per_s
    3350000000000.0
    """
    known = next((speeds for name, speeds in KNOWN.items() if name.lower() == device_class.kind.lower()), None)
    if not device_class.flops_per_s:
        return known
    return Speeds(
        flops_per_s=device_class.flops_per_s,
        half_flops_per_s=device_class.flops_per_s,
        memory_bytes_per_s=device_class.memory_bytes_per_s or (known.memory_bytes_per_s if known else float("inf")),
        least_s=known.least_s if known else 0.0,
    )
