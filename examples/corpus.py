"""A text that every machine has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["load_corpus", "sample_windows"]


def load_corpus(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Returns (training, held-out) bytes, 90 : 10, both int64 and one-dimensional.

    The files come in sorted order and every tenth one is held out, so that both parts are of the same kind.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts = (bytearray(), bytearray())
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "idlelib"}
    files = (path for path in folder.rglob("*.py") if left_out.isdisjoint(path.relative_to(folder).parts))
    for i, path in enumerate(sorted(files)):
        parts[i % 10 == 9].extend(path.read_bytes())
        if len(parts[0]) + len(parts[1]) > max_bytes:
            break
    training, held_out = (torch.frombuffer(part, dtype=torch.uint8).long() for part in parts)
    return training, held_out


def sample_windows(text: Tensor, num: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws inputs [num, context] and the bytes that follow each of them, [num, context]."""
    starts = torch.randint(len(text) - context, (num, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
