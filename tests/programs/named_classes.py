"""Rank 0 alone makes objects of classes that the others only name, and of one that these do not. Prints what came."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer

import farspan

RANK = int(os.environ["RANK"])


class Named(NamedTuple):
    x: Any


def _inside() -> Any:
    @dataclass
    class Unreachable:
        x: Any

    return Unreachable


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


def tokens() -> Any:
    """As rank 0's tokenizer gives."""
    return sys.modules["transformers"].BatchEncoding({"input_ids": torch.arange(3)})


def fraction() -> Any:
    import fractions

    return fractions.Fraction(1, 2)


def main() -> None:
    assert AutoTokenizer is not None
    makes = [lambda: Named(torch.zeros(2)), lambda: Numbers()[1], tokens]
    batches = [farspan.from_rank(0, make() if RANK == 0 else None) for make in makes]
    import fractions  # it is loaded on every rank

    assert fractions
    words = ""
    try:
        farspan.from_rank(0, [getattr(sys.modules["fractions"], "Frac" + "tion")] if RANK == 0 else None)
    except farspan.FarspanError as error:
        words = str(error)
    after = farspan.from_rank(0, 7 if RANK == 0 else None)
    print(json.dumps([[type(batch).__name__ for batch in batches], words, after]))


main()
