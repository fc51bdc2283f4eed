"""The generators the user's program sees, as bytes: all ranks begin with the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy as np
import torch

from farspan.call.draws.generators import GENERATORS
from farspan.call.wire.checked import damaged

__all__ = ["load_generators", "save_generators"]


def save_generators(in_torch: torch.Tensor | None = None) -> bytes:
    """Returns the states of Python's, numpy's and torch's generators; or `in_torch` for the latter."""
    with GENERATORS:
        version, internal, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        in_torch = torch.get_rng_state() if in_torch is None else in_torch
    head = json.dumps([version, list(internal), gauss, kind, int(position), int(has_gauss), float(cached)]).encode()
    body = np.asarray(keys, dtype=np.uint32).tobytes() + in_torch.numpy().tobytes()
    return len(head).to_bytes(8, "little") + head + body


def load_generators(saved: bytes, put_in_torch: Callable[[torch.Tensor], None] = torch.set_rng_state) -> None:
    """Set them to what `save_generators` gave, torch's by `put_in_torch`."""
    end = 8 + int.from_bytes(saved[:8], "little")
    try:
        version, internal, gauss, kind, position, has_gauss, cached = json.loads(saved[8:end])
        keys = np.frombuffer(saved, dtype=np.uint32, count=624, offset=end)
        in_torch = torch.frombuffer(bytearray(saved[end + keys.nbytes :]), dtype=torch.uint8)
        with GENERATORS:
            random.setstate((version, tuple(internal), gauss))
            np.random.set_state((kind, keys, position, has_gauss, cached))
            put_in_torch(in_torch)
    except (ValueError, TypeError, RecursionError, OverflowError, RuntimeError) as error:
        raise damaged(f"the states of random generators ({error})"[:200]) from None
