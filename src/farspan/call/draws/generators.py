"""The generators of this process: torch's, Python's, numpy's. They are shared by all its threads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from farspan.devices import default_generators
from farspan.locks import Lock

__all__ = [
    "GENERATORS",
    "all_generators",
    "host_seed",
    "is_as_in_python",
    "kept",
    "kept_in_python",
    "put_back_in_python",
    "put_in_python",
    "states_in_python",
]

GENERATORS = Lock("the random generators")
"""Held by whoever has changed a generator until it is as it was (ranks may be threads of one process)."""


def host_seed() -> int:
    """Returns what torch was last seeded with."""
    with GENERATORS:
        return torch.default_generator.initial_seed()


def all_generators() -> Sequence[torch.Generator]:
    """Returns the generators of all devices in use."""
    return (torch.default_generator, *default_generators())


@contextlib.contextmanager
def kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Whatever the body does to `generators`, afterwards they are as before."""
    with GENERATORS:
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextlib.contextmanager
def kept_in_python(seed: int) -> Iterator[None]:
    """Python's and numpy's generators are seeded for the body, and afterwards are as before."""
    with GENERATORS:
        states = states_in_python()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            put_in_python(states)


@contextlib.contextmanager
def put_back_in_python(states: Any) -> Iterator[None]:
    """Python's and numpy's generators are as `states_in_python` found them for the body, and afterwards as before."""
    with GENERATORS:
        now = states_in_python()
        put_in_python(states)
        try:
            yield
        finally:
            put_in_python(now)


def states_in_python() -> Any:
    """Returns the states of Python's and numpy's generators."""
    return random.getstate(), np.random.get_state()


def is_as_in_python(states: Any) -> bool:
    """Returns whether Python's and numpy's generators are as `states_in_python` found them."""
    now: Any = np.random.get_state()
    before = states[1]
    return (
        random.getstate() == states[0]
        and now[2:] == before[2:]
        and now[0] == before[0]
        and np.array_equal(now[1], before[1])
    )


def put_in_python(states: Any) -> None:
    """Set Python's and numpy's generators to what `states_in_python` gave."""
    random.setstate(states[0])
    np.random.set_state(states[1])
