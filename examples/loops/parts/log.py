"""What a program prints and leaves: every number with all its bits, so that two runs can be compared as text."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

__all__ = ["Log"]


class Log:
    """Prints a line for each step, keeps the numbers, and ends with a digest of the weights."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def show(self, label: str, **numbers: float) -> None:
        self.numbers += numbers.values()
        print(label, *(f"{name} {number!r}" for name, number in numbers.items()), sep="  ", flush=True)

    def finish(self, *models: nn.Module) -> None:
        """Prints the digest; writes numbers and weights to the folder that the variable LOOPS_RESULT names, if any."""
        weights = {f"{i}.{name}": item for i, model in enumerate(models) for name, item in model.state_dict().items()}
        digest = hashlib.sha256()
        for item in weights.values():
            digest.update(item.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        print(f"weights  {digest.hexdigest()}", flush=True)
        if folder := os.environ.get("LOOPS_RESULT"):
            file = Path(folder, f"rank{os.environ.get('FARSPAN_RANK', '0')}.pt")
            torch.save({"numbers": self.numbers, "weights": weights}, file)
