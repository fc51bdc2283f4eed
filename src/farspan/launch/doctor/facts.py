"""What the doctor knows of one host by looking at that host alone; it travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farspan.errors import LaunchError

__all__ = ["DeviceFacts", "Facts", "FolderFacts", "read_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A GPU, as torch calls it, with its memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that runs write to.

    Attributes:
        use: What it is for: "shared memory", "temporary files", "working folder".
        path: Where it is.
        file_system: Of which kind it is ("ext4", "nfs4").
        free_bytes: What may still be written there.
    """

    use: str
    path: str
    file_system: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One host.

    Attributes:
        python: The interpreter's path.
        num_cores: That its processes may use.
        memory_bytes: Of the machine, or of the container.
        free_memory_bytes: Without what is used now.
        devices: GPUs that torch can use.
        devices_error: Why it can use none, where the system has a driver for some.
        folders: That runs write to.
        open_files: How many a process may have open; -1 for any number.
        locked_bytes: How much memory a process may lock; -1 for any amount.
        has_rdma: Whether there is a network card that needs locked memory.
    """

    python: str
    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    devices: tuple[DeviceFacts, ...]
    devices_error: str
    folders: tuple[FolderFacts, ...]
    open_files: int
    locked_bytes: int
    has_rdma: bool


def read_facts(name: str, found: Mapping[str, Any]) -> Facts:
    """Returns what a host says of itself.

    Raises:
        LaunchError: It is of another form.
    """
    try:
        return Facts(
            python=str(found["python"]),
            num_cores=int(found["num_cores"]),
            memory_bytes=int(found["memory_bytes"]),
            free_memory_bytes=int(found["free_memory_bytes"]),
            devices=tuple(
                DeviceFacts(
                    name=str(each["name"]), memory_bytes=int(each["memory_bytes"]), free_bytes=int(each["free_bytes"])
                )
                for each in found["devices"]
            ),
            devices_error=str(found["devices_error"]),
            folders=tuple(
                FolderFacts(
                    use=str(each["use"]),
                    path=str(each["path"]),
                    file_system=str(each["file_system"]),
                    free_bytes=int(each["free_bytes"]),
                )
                for each in found["folders"]
            ),
            open_files=int(found["open_files"]),
            locked_bytes=int(found["locked_bytes"]),
            has_rdma=bool(found["has_rdma"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{name} says of itself what is not understood.",
            why=f"{type(error).__name__}: {error}.",
            hint="the same version of farspan on all hosts",
        ) from None
