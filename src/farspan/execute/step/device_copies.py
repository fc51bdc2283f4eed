"""Copies between the devices of one process, on streams of their own.

torch copies on the stream of the source, after all that the target's has queued; and a copy to the host, or from it,
lets the host wait for all that its device has queued. One of these may be a message that another rank sends only once
it has what is copied:

    cuda:0    F of layer 0 .. copy                      waits for what cuda:1 has queued
    cuda:1    F of layer 1, receive of its gradient     which comes when a later layer has got the next micro-batch
    cuda:0    F of the head                             behind the copy

So a copy waits for what has made its tensor, and nothing but who uses it waits for the copy.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from farspan.devices import is_accelerator

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """The copies of a step of several workers."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device], dict[torch.device, torch.Stream]] = {}
        """For each pair of devices a stream of each of them, if it is an accelerator."""
        self._made: dict[Any, torch.Event] = {}
        """When the work of this step has been done, on the device that does it."""

    def forget(self) -> None:
        """A step ends."""
        self._made.clear()

    def note(self, work: Any, device: torch.device) -> None:
        """All of `work` has been queued on a device."""
        if is_accelerator(device):
            self._made[work] = event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))

    def bring(self, tensor: torch.Tensor, device: torch.device, made_by: Any) -> torch.Tensor:
        """Returns a tensor of one device on another one.

        Args:
            tensor: What some work has made.
            device: The other one.
            made_by: That work.
        """
        source = tensor.device
        made = self._made.get(made_by)
        if made is None and is_accelerator(source):
            return tensor.to(device)
        streams = self._streams_between(source, device)
        with contextlib.ExitStack() as stack:
            for each in streams.values():
                stack.enter_context(each)
            if made is not None:
                streams[source].wait_event(made)
            copy = tensor.to(device)
        if source in streams:
            tensor.record_stream(streams[source])
        if device in streams:
            user = torch.accelerator.current_stream(device)
            user.wait_event(streams[device].record_event())
            copy.record_stream(user)
        return copy

    def _streams_between(self, source: torch.device, device: torch.device) -> dict[torch.device, torch.Stream]:
        streams = self._streams.get((source, device))
        if streams is None:
            streams = {each: torch.Stream(each) for each in (device, source) if is_accelerator(each)}
            self._streams[source, device] = streams
        return streams
