"""Side channels for each test of this folder."""

from __future__ import annotations

import pytest
from tests.support.side import open_ranks


@pytest.fixture
def ranks():
    with open_ranks() as make:
        yield make
