"""What `torch.distributed.pipelining` 2.13 gets wrong without a word is right here, over real processes."""

from __future__ import annotations

import pytest
from tests.programs import semantics
from tests.support.ranks import differences, differing


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("name", semantics.GROUPS["silent_failures"])
def test_silent_failure(name: str, num_processes: int) -> None:
    found = differences(semantics.__file__, "silent_failures", num_processes)
    assert differing(found, name) == [""] * num_processes
