"""What Lightning broadcasts arrives as it was, without unpickling what another process has sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import run_threads

from farspan.adapters.lightning import _broadcast
from farspan.errors import FarspanError


@pytest.mark.parametrize("found", ["version_3", Path("/logs/run"), None, True, 7, {"a": [1, 2.5]}])
@pytest.mark.parametrize("source", [0, 1])
def test_all_ranks_get_what_one_has(found: Any, source: int) -> None:
    got = run_threads(2, lambda rank: _broadcast(found if rank == source else "another", source))
    assert got == [found, found] and {type(item) for item in got} <= {type(found)}


@pytest.mark.parametrize("found", [object(), {1: 2}, (1, 2)])
def test_what_cannot_be_sent_is_named(found: Any) -> None:
    with pytest.raises(FarspanError, match=f"cannot carry a {type(found).__name__}"):
        run_threads(2, lambda rank: _broadcast(found, 0))
