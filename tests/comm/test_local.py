"""The transport between ranks that are threads of one process."""

from __future__ import annotations

import pytest
import torch
from tests.comm.local import LocalNetwork, LocalTransport


def test_a_receive_that_begins_after_the_end_ends_too() -> None:
    """Another rank's failure may come before a rank has used a channel at all: it must not wait for the deadline."""
    network = LocalNetwork()
    transport, other = LocalTransport(0, network), LocalTransport(1, network)
    before = transport.receive(torch.empty(2), 1, 0)
    transport.abort()
    for work in (before, transport.receive(torch.empty(2), 1, 0), transport.receive(torch.empty(2), 1, 1)):
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait(0.5)
    transport.send(torch.ones(2), 1, 0)
    found = torch.empty(2)
    other.receive(found, 0, 0).wait(0.5)
    assert found.tolist() == [1.0, 1.0]
