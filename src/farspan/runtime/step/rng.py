"""Seeds for calls that draw random numbers: a function of (seed, micro-batch, call), never of the rank.

The generators the user's program sees are left as they were, so that they stay in step on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator

import numpy as np
import torch

from farspan.graph import Call

__all__ = ["Seeding", "load_generators", "save_generators"]


class Seeding:
    """Gives every random call its own seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, call: Call) -> contextlib.AbstractContextManager[None]:
        return self._seeded(call) if call.entry.is_random else _NOTHING

    @contextlib.contextmanager
    def _seeded(self, call: Call) -> Iterator[None]:
        text = f"{self.seed}/{call.graph.index}/{call.index}/{call.entry.name}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        python, numpy_state = random.getstate(), np.random.get_state()
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            np.random.set_state(numpy_state)


_NOTHING = contextlib.nullcontext()


def save_generators() -> bytes:
    """The states of Python's, numpy's and torch's generators."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    head = json.dumps([version, list(internal), gauss, kind, int(position), int(has_gauss), float(cached)]).encode()
    body = np.asarray(keys, dtype=np.uint32).tobytes() + torch.get_rng_state().numpy().tobytes()
    return len(head).to_bytes(8, "little") + head + body


def load_generators(saved: bytes) -> None:
    """Set them to what `save_generators` gave."""
    end = 8 + int.from_bytes(saved[:8], "little")
    version, internal, gauss, kind, position, has_gauss, cached = json.loads(saved[8:end])
    keys = np.frombuffer(saved, dtype=np.uint32, count=624, offset=end)
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(saved[end + keys.nbytes :]), dtype=torch.uint8))
