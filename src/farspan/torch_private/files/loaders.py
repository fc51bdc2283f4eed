"""What a DataLoader keeps between epochs."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

__all__ = ["forget_workers"]


def forget_workers(loader: DataLoader[Any]) -> None:
    """Let the next epoch begin with new workers, where `persistent_workers` would keep those of the one before."""
    vars(loader)["_iterator"] = None
