"""The machine at hand, as a cluster of one host."""

from __future__ import annotations

import os

import psutil
import torch

from farspan.cluster import Cluster, DeviceClass, within_host
from farspan.devices import accelerators, current_device, memory_bytes, name_of_device

__all__ = ["this_device", "this_machine"]


def this_device() -> str:
    """Returns the kind of device that a rank of this machine computes on."""
    return name_of_device(current_device())


def this_machine() -> Cluster:
    """Returns the machine's GPUs; without any, as many CPU devices as processes with this one's number of threads have
    cores."""
    devices = accelerators()
    if devices:
        kind = name_of_device(devices[0])
        within_bytes_per_s, latency_s = within_host(kind)
        return Cluster(
            classes=(
                DeviceClass(
                    name="gpu",
                    kind=kind,
                    devices_per_host=len(devices),
                    memory_bytes=float(memory_bytes(devices[0])),
                    within_bytes_per_s=within_bytes_per_s,
                    latency_s=latency_s,
                ),
            )
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, cores // torch.get_num_threads())
    within_bytes_per_s, latency_s = within_host("cpu")
    return Cluster(
        classes=(
            DeviceClass(
                name="cpu",
                kind="cpu",
                devices_per_host=count,
                memory_bytes=float(psutil.virtual_memory().total // count),
                within_bytes_per_s=within_bytes_per_s,
                latency_s=latency_s,
            ),
        )
    )
