"""Rank 0 alone makes objects of classes that the others only name, and of one that these do not. Prints what came."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

import farspan

RANK = int(os.environ["RANK"])


class Named(NamedTuple):
    x: Any


class Numbers(Dataset[Any]):
    """Its code alone names what it gives."""

    def __getitem__(self, number: int) -> Any:
        return _Made.of(number)


class NamedInside(dict[str, Any]):
    pass


class _Made:
    @staticmethod
    def of(number: int) -> Any:
        return NamedInside(x=torch.full((2,), float(number)))


def main() -> None:
    makes = [lambda: Named(torch.zeros(2)), lambda: Numbers()[1]]
    batches = [farspan.from_rank(0, make() if RANK == 0 else None) for make in makes]
    importlib.import_module("fractions")  # loaded on every rank, and named by none
    words = ""
    try:
        farspan.from_rank(0, [getattr(sys.modules["fractions"], "Frac" + "tion")] if RANK == 0 else None)
    except farspan.FarspanError as error:
        words = str(error)
    after = farspan.from_rank(0, 7 if RANK == 0 else None)
    print(json.dumps([[type(batch).__name__ for batch in batches], words, after]))


main()
