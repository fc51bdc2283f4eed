"""The machine at hand, as a cluster of one host."""

from __future__ import annotations

import os

import psutil
import torch

from farspan.cluster import Cluster, DeviceClass, within_host

__all__ = ["name_of_device", "this_device", "this_machine"]


def name_of_device(device: torch.device) -> str:
    """Returns the kind of device: "cpu", "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def this_device() -> str:
    """Returns the kind of device that a rank of this machine computes on."""
    return name_of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def this_machine() -> Cluster:
    """Returns the machine's GPUs; without any, as many CPU devices as processes with this one's number of threads have
    cores."""
    if torch.cuda.is_available():
        kind = name_of_device(torch.device("cuda", 0))
        within_bytes_per_s, latency_s = within_host(kind)
        return Cluster(
            classes=(
                DeviceClass(
                    name="gpu",
                    kind=kind,
                    devices_per_host=torch.cuda.device_count(),
                    memory_bytes=float(torch.cuda.get_device_properties(0).total_memory),
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
