"""Finds out which kind of source a path is: from what is there, not from its name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from farspan.errors import CheckpointError
from farspan.state.conversion.of_checkpoint import CheckpointSource, checkpoint_at
from farspan.state.conversion.source import Source
from farspan.state.format import disk

__all__ = ["is_of_farspan", "open_source"]

_ZIP = b"PK\x03\x04"


def is_of_farspan(path: str) -> bool:
    """Returns whether it is a checkpoint of farspan, or a folder of some."""
    return os.path.isdir(path) and checkpoint_at(path) is not None


def open_source(path: str, *, key: str = "", folders: Sequence[str] = (), is_whole: bool = False) -> Source:
    """Returns the tensors at a path.

    Args:
        path: A checkpoint, a folder of checkpoints (the newest counts), a safetensors file or a folder of them, a file
            of `torch.save`, or a DCP folder.
        key: Where in a torch file or a DCP folder the model is.
        folders: Where else files of a checkpoint lie.
        is_whole: Of a checkpoint all tensors, not those of the model alone.

    Raises:
        CheckpointError: It is none of these, or damaged.
    """
    if not os.path.exists(path):
        why = f"looked in {os.getcwd()}."
        raise CheckpointError(f"{path} is not there.", why=why, hint="a checkpoint, or a file of tensors")
    if os.path.isdir(path):
        found = checkpoint_at(path)
        if found is not None:
            return CheckpointSource(found, folders, is_whole=is_whole)
        from farspan.state.conversion.of_dcp import METADATA, DcpSource

        if os.path.exists(f"{path}/{METADATA}"):
            return DcpSource(path, key)
    else:
        with disk.opened(path) as file:
            begin = bytearray(len(_ZIP))
            disk.read_into(file, memoryview(begin), 0)
        if begin == _ZIP:
            from farspan.state.conversion.of_torch import TorchSource

            return TorchSource(path, key)
    from farspan.state.conversion.of_safetensors import SafetensorsSource

    return SafetensorsSource(path)
