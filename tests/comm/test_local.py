"""The medium between the devices of one process."""

from __future__ import annotations

import pytest
import torch

from farspan.comm.local import LocalMedium, LocalNetwork


def test_a_receive_that_begins_after_the_end_ends_too() -> None:
    """Another rank's failure may come before a rank has used a channel at all: it must not wait for the deadline."""
    network = LocalNetwork()
    medium, other = LocalMedium(0, network), LocalMedium(1, network)
    before = medium.receive(torch.empty(2), 1, 0)
    medium.abort()
    for work in (before, medium.receive(torch.empty(2), 1, 0), medium.receive(torch.empty(2), 1, 1)):
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait(0.5)
    medium.send(torch.ones(2), 1, 0)
    found = torch.empty(2)
    other.receive(found, 0, 0).wait(0.5)
    assert found.tolist() == [1.0, 1.0]
