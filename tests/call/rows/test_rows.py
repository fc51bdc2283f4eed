"""Whether rows of a batch stay apart: what rules say of a model is right by the numbers of a plain run."""

from __future__ import annotations

import pytest
from tests.call.rows.apart import APART
from tests.call.rows.oracle import verdicts
from tests.call.rows.snippets import Snippet
from tests.call.rows.whole import WHOLE


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_known_to(name: str) -> None:
    forward, make = APART[name]
    found = verdicts(Snippet(forward), make)
    assert "" in found.values(), found


@pytest.mark.parametrize("name", WHOLE)
def test_rows_that_meet_are_never_said_to_be_apart(name: str) -> None:
    forward, make = WHOLE[name]
    found = verdicts(Snippet(forward), make)
    assert all(found.values()), found
