"""The states of the generators that the program draws from, compared between the ranks in every agreement.

Every rank runs the program's own draws (which samples a loader takes, which noise is added to a batch). A rank that
draws once more or once less goes on with other batches from then on: so the states are compared, by a few numbers that
change whenever a generator is drawn from. All three are Mersenne twisters: a table of 624 words, and a position in it;
a draw moves the position on, and behind the last word a new table is made. The same state can be written down in two
ways there (at the end of a table, at the beginning of the next one), so of torch's, which may have got to it by a jump,
the next numbers are compared instead.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from typing import Any

import numpy as np
import torch

from farspan.call.draws.generators import GENERATORS
from farspan.torch_private import DisableTorchFunction

__all__ = ["DRAWN_BY_A_LOADER", "SAME_DRAWS", "GeneratorStates", "generator_entries", "generator_states"]

_NAMES = ("torch's CPU generator", "Python's `random`", "numpy's global generator")
SAME_DRAWS = (
    "draw on every rank alike, or from a generator of its own on one: torch.Generator(), random.Random(),\n"
    "numpy.random.default_rng(); seed all three at the start of the program"
)
DRAWN_BY_A_LOADER = (
    "a DataLoader draws so where a pass over it begins: are there as many batches, and passes, on every rank?\n"
    f"Elsewhere: {SAME_DRAWS}"
)
GeneratorStates = tuple[int, int, int]

_TABLE_WORDS = 624
_NORMALS = ((5040, slice(5016, 5040)), (5052, slice(5048, 5052)))
"""Where in the bytes of torch's state it stands whether one of a pair of normal numbers is left, and which."""
_copy = torch.Generator()
_next = torch.empty(2, dtype=torch.int64)


def generator_states() -> GeneratorStates:
    """Returns a number for the state of each generator: torch's, Python's, numpy's."""
    with GENERATORS:
        in_torch = _state_of_torch()
        version, table, gauss = random.getstate()
        in_numpy = _state_of_numpy()
    return (
        zlib.crc32(in_torch),
        zlib.crc32(repr((version, table[:2], table[-1], gauss)).encode()),
        zlib.crc32(in_numpy),
    )


def generator_entries(states: GeneratorStates, before: str) -> list[tuple[int, str, str]]:
    """Returns what a rank shows of `states`.

    Args:
        states: From `generator_states`.
        before: Where all ranks had the same states the last time; "" for nowhere.
    """
    since = f"; drawn from since: {before}" if before else ""
    return [
        (state, f"{name} is in the state {state:08x}{since}", SAME_DRAWS)
        for name, state in zip(_NAMES, states, strict=True)
    ]


def _state_of_torch() -> bytes:
    """Returns torch's next numbers, and what is left of a pair of normal ones."""
    state = torch.default_generator.get_state()
    _copy.set_state(state)
    with DisableTorchFunction():
        _next.random_(generator=_copy)
    table = state.numpy().data
    return _next.numpy().tobytes() + b"".join([bytes(table[where]) for flag, where in _NORMALS if table[flag]])


_addresses: dict[int, tuple[Any, int]] = {}


def _state_of_numpy() -> bytes:
    """Returns some words of its table and the position: read where they lie, for numpy takes 40 us to make a copy."""
    numpy_random: Any = np.random
    generator = numpy_random.get_bit_generator()
    known = _addresses.get(id(generator))
    if known is None or known[0] is not generator:
        address = generator.ctypes.state_address if type(generator) is np.random.MT19937 else 0
        known = _addresses[id(generator)] = (generator, address)
    if not known[1]:
        return repr(generator.state).encode()
    return ctypes.string_at(known[1], 8) + ctypes.string_at(known[1] + 4 * _TABLE_WORDS, 4)
