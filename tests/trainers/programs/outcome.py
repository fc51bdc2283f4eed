"""What a trained program reports of itself: the same text, if it did the same to the last bit."""

from __future__ import annotations

import hashlib
import json
import os
import posix
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farspan.execute.process.world import current_engine

__all__ = ["CASE", "FOLDER", "IS_APART", "IS_DISTRIBUTED", "Flushes", "files_in", "tell", "weights"]

CASE, _ROOT = sys.argv[1], Path(sys.argv[2])
IS_DISTRIBUTED = "--farspan" in sys.argv
IS_APART = "--apart" in sys.argv
"""Each rank has a folder of its own, to see who writes; none can read what another has written."""
_RANK = os.environ.get("FARSPAN_RANK", os.environ.get("RANK", "0"))
FOLDER = _ROOT / f"rank{_RANK}" if IS_APART else _ROOT / "all"
FOLDER.mkdir(parents=True, exist_ok=True)


class Flushes:
    """How often each optimizer step ran what was recorded: with backwards among it, and without."""

    def __init__(self) -> None:
        self.per_step: list[tuple[int, int]] = []
        self._before = (0, 0)

    def begin(self) -> None:
        self._before = _num_flushes()

    def end(self) -> None:
        training, others = _num_flushes()
        self.per_step.append((training - self._before[0], others - self._before[1]))


def _num_flushes() -> tuple[int, int]:
    engine = current_engine()
    if engine is None:
        return (0, 0)
    return (engine.console.num_backward_runs, engine.num_flushes - engine.console.num_backward_runs)


def weights(model: nn.Module) -> dict[str, str]:
    """A digest of each tensor of a model's state."""
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _digest(tensor: torch.Tensor) -> str:
    return _digest_of(tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes())


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def files_in(folder: Path) -> dict[str, str]:
    """All files below a folder, with a digest of those whose bytes depend on weights alone."""
    return {
        str(path.relative_to(folder)): _digest_of(path.read_bytes()) if path.suffix == ".safetensors" else ""
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tell(flushes: Flushes, **found: Any) -> None:
    """Write down what was found, for the test that has started this process."""
    text = json.dumps({"flushes": flushes.per_step, **found})
    # Not `open`: of other ranks than 0 it writes where only they read.
    number = posix.open(f"{_ROOT}/outcome{_RANK}.json", os.O_WRONLY | os.O_CREAT)
    with os.fdopen(number, "w") as file:
        file.write(text)
