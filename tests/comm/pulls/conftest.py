"""The pulls of ranks that are threads of this process."""

from __future__ import annotations

import pytest
from tests.support.side import LONG_S, open_ranks

from farspan.comm.pulls.pulls import Pulls


@pytest.fixture
def ranks():
    """A function that makes the pulls of so many ranks, which all answer by one handler: (rank, request) -> answer."""
    with open_ranks() as make:

        def opened(number, handler, deadline_s=LONG_S):
            channels = make(number)
            pulls = [
                Pulls(side, lambda request, rank=side.rank: handler(rank, request), deadline_s) for side in channels
            ]
            for side, mine in zip(channels, pulls, strict=True):
                side.serve(lambda request, mine=mine: mine.listen())
                side.on_failure = lambda error, mine=mine: mine.abort()
            return channels, pulls

        yield opened
