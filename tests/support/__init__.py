"""What tests share: ranks as threads or processes, models, the plain loop they are compared with, and combinations of
parameters of which every submission runs a part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["diagonal"]


def diagonal(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Returns all combinations of one value of each axis, as parameters of pytest.

    Those of a diagonal run at every submission: each value of the first axis, with one value of each other axis, which
    take turns. The rest runs by `make test-slow`.

    >>> [set.values for set in diagonal("abc", (1, 2)) if not set.marks]
    [('a', 1), ('b', 2), ('c', 1)]
    """
    return [
        pytest.param(value, *rest, marks=() if rest == _on_diagonal(number, others) else pytest.mark.slow)
        for number, value in enumerate(first)
        for rest in itertools.product(*others)
    ]


def _on_diagonal(number: int, axes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(axis[number % len(axis)] for axis in axes)
