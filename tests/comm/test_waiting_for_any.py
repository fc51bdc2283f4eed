"""A process of several workers waits for whichever message comes first, and not for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.comm.local import LocalNetwork, LocalTransport
from tests.comm.test_nccl import Side

from farspan.comm.channels import Channels
from farspan.comm.router import Router
from farspan.comm.transport import TransferError
from farspan.errors import DeadlineError
from farspan.graph import Meta, Value
from farspan.plan import Worker
from farspan.program.program import Channel, Message

META = Meta((4,), (1,), torch.float32, torch.device("cpu"), False)
WHERE = "rank 1, where all its workers wait,"


def receiving(transport: Any, channel: int) -> Message:
    """A message from rank 0 whose receive is posted."""
    value = Value(META, 0, name=f"value {channel}")
    message = Message(3, Channel(Worker(0, "cpu"), Worker(1, "cpu"), channel), [value])
    message.works = [transport.receive(torch.empty(4), 0, channel)]
    return message


def channels_of(transport: Any, deadline_s: float) -> Channels:
    side: Any = Side()
    return Channels(Router(transport, None), 1, deadline_s, side)


def test_the_message_that_comes_ends_the_wait_whichever_it_is() -> None:
    network = LocalNetwork()
    sender, receiver = LocalTransport(0, network), LocalTransport(1, network)
    first, second = receiving(receiver, 0), receiving(receiver, 1)
    later = threading.Timer(0.05, lambda: sender.send(torch.ones(4), 1, 1))
    later.start()
    channels_of(receiver, 60.0).wait_any([[first], [second]], lambda: WHERE)
    later.join()
    assert second.works[0].is_done()
    assert not first.works[0].is_done()


def test_a_wait_for_what_nobody_sends_is_an_error_that_says_for_what() -> None:
    receiver = LocalTransport(1, LocalNetwork())
    with pytest.raises(DeadlineError, match=f"{WHERE} waited 0.1 s for .*value 0 from rank 0"):
        channels_of(receiver, 0.1).wait_any([[receiving(receiver, 0)], [receiving(receiver, 1)]], lambda: WHERE)


def test_a_failure_elsewhere_ends_the_wait() -> None:
    receiver = LocalTransport(1, LocalNetwork())
    messages = [[receiving(receiver, 0)], [receiving(receiver, 1)]]
    later = threading.Timer(0.05, receiver.abort)
    later.start()
    with pytest.raises(TransferError):
        channels_of(receiver, 60.0).wait_any(messages, lambda: WHERE)
    later.join()
