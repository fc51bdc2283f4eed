"""A text that every machine has: some source files of Python's standard library."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["characters", "words"]

FILES = ("argparse.py", "ast.py", "bdb.py", "calendar.py", "cmd.py", "code.py", "copy.py", "csv.py")


def read() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join((folder / name).read_text(encoding="utf-8") for name in FILES)


def characters() -> Tensor:
    """The text's ASCII codes, [length]."""
    return torch.tensor(list(read().encode("ascii", errors="replace")))


def words(num_words: int) -> tuple[Tensor, int]:
    """The text as numbers of words and signs, [length], and how many there are; the rare ones are all number 0."""
    text = re.findall(r"\w+|[^\w\s]", read())
    counts: dict[str, int] = {}
    for word in text:
        counts[word] = counts.get(word, 0) + 1
    common = sorted(counts, key=lambda word: (-counts[word], word))[: num_words - 1]
    numbers = {word: i for i, word in enumerate(common, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in text]), num_words
