"""Finds out what there is to know of this host."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from farspan.launch.doctor.facts import DeviceFacts, Facts, FolderFacts

__all__ = ["gather_facts"]

_DEVICES_S = 45.0
"""How long torch may take to be imported and to list the devices."""
_NVIDIA = "/dev/nvidiactl"
_DRIVERS = (_NVIDIA, "/dev/kfd", "/dev/dxg")
"""Files of the drivers of NVIDIA, of AMD, and of Windows below Linux."""
_CGROUP = Path("/sys/fs/cgroup")


def gather_facts(devices: str) -> Facts:
    """Returns the facts of this host.

    Args:
        devices: Which GPUs the run may use, as in CUDA_VISIBLE_DEVICES; "" for all.
    """
    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    gpus, why = _devices(devices)
    open_files, locked_bytes = _limits()
    return Facts(
        python=sys.executable,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=min(memory.total, limit),
        free_memory_bytes=max(0, min(memory.available, limit - used)),
        devices=gpus,
        devices_error=why,
        folders=_folders(),
        open_files=open_files,
        locked_bytes=locked_bytes,
        has_rdma=bool(glob.glob("/sys/class/infiniband/*")),
    )


def _container_memory() -> tuple[int, int]:
    """Returns what the control group of a container may use and uses, in bytes."""
    with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
        return int((_CGROUP / "memory.max").read_text()), int((_CGROUP / "memory.current").read_text())
    return sys.maxsize, 0


def _devices(devices: str) -> tuple[tuple[DeviceFacts, ...], str]:
    """Returns the GPUs, and why there are none where there should be some; imports torch in a child, if at all."""
    variables = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {})
    if not any(map(os.path.exists, _DRIVERS)) or variables.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return (), ""
    command = [sys.executable, "-m", "farspan.launch.doctor.devices"]
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEVICES_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"torch has not listed them within {_DEVICES_S:.0f} s"
    if done.returncode:
        return (), (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        gpus = tuple(DeviceFacts(**each) for each in found["devices"])
    except (IndexError, KeyError, TypeError, ValueError):  # a library has written over it
        return (), f"what lists them has written {done.stdout[-100:]!r}"
    # A processor may have a graphics part with a driver of AMD's, which nobody trains on: that is no mistake.
    return gpus, str(found["why"]) if os.path.exists(_NVIDIA) else ""


def _folders() -> tuple[FolderFacts, ...]:
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    uses = [("shared memory", "/dev/shm"), ("temporary files", tempfile.gettempdir()), ("working folder", os.getcwd())]
    found: list[FolderFacts] = []
    for use, path in uses:
        if os.path.isdir(path):
            place = Path(path).resolve()
            kind = next((kinds[str(each)] for each in (place, *place.parents) if str(each) in kinds), "?")
            free = shutil.disk_usage(path).free
            found.append(FolderFacts(use=use, path=path, file_system=kind, free_bytes=free))
    return tuple(found)


def _limits() -> tuple[int, int]:
    """Returns how many files and how many bytes of locked memory a process may have; -1 for any number."""
    if sys.platform == "win32":
        return -1, -1
    import resource

    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
    open_files, locked_bytes = (-1 if each == resource.RLIM_INFINITY else each for each in limits)
    return open_files, locked_bytes
