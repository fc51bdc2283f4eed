"""Side channels for each test of this folder: as a star, and as a chain, in which each rank passes on for the next."""

from __future__ import annotations

import pytest
from tests.support.side import open_ranks

from farspan.control.tree import numbers


@pytest.fixture(params=[numbers.FAN_OUT, 1], ids=["star", "chain"])
def ranks(request, monkeypatch):
    monkeypatch.setattr(numbers, "FAN_OUT", request.param)
    with open_ranks() as make:
        yield make
