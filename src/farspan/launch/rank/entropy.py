"""The same entropy for all ranks of a job, so that scripts without any seed do the same on each of them.

Where nobody seeds them, `random`, torch's generator, numpy's global one and each `numpy.random.default_rng()` begin
with random bytes of the operating system: another train and validation split, another order of files on every rank.
Under `farspan run` of several processes they begin with one number of the job instead, which is another one in each
job. Python's hash seed, which the order of a set of strings follows, is one for the job too.

Runs before the script does, and imports nothing that a script may not want. A seed that the script gives counts as
ever.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Mapping
from typing import Any

from farspan.launch.rank.imports import when_imported

__all__ = ["entropy_variables", "share"]

_MOST = (1 << 63) - 1


def entropy_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that all processes of a new job get, beside those `given` already."""
    number = secrets.randbits(128)
    hash_seed = given.get("PYTHONHASHSEED") or str(number % (1 << 32))
    return {"FARSPAN_ENTROPY": f"{number:032x}", "PYTHONHASHSEED": hash_seed}


def share(number: int) -> None:
    """Let this process's generators begin with `number`, until somebody seeds them."""
    random.seed(number)
    when_imported("torch", lambda torch: torch.default_generator.manual_seed(number & _MOST))
    when_imported("numpy.random.bit_generator", lambda module: _share_in_numpy(module, number))


def _share_in_numpy(module: Any, number: int) -> None:
    """Let the seed sequences that are made without entropy of their own follow from `number` and from how many were
    made before.
    """
    num_made = 0

    def randbits(count: int) -> int:
        nonlocal num_made
        num_made += 1
        digest = hashlib.shake_256(f"{number} {num_made}".encode()).digest((count + 7) // 8)
        return int.from_bytes(digest, "big") >> (-count % 8)

    module.randbits = randbits
