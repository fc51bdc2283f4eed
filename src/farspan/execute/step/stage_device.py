"""Where the tensors of a stage are: the program names one device, and the plan may have chosen another one.

    the program says    a stage on cuda:1    a stage on the CPU
    cuda:0              cuda:1               cpu
    cpu                 cpu                  cpu                    where the program has the model on a device
    cpu                 cuda:1               cpu                    where it has the model on the CPU

Metadata are what the program sees, on every rank; a value is brought to its place when it comes to a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from farspan.call.modes import Modes, with_device
from farspan.devices import CPU, is_accelerator
from farspan.execute.step.device_copies import DeviceCopies

__all__ = ["StageDevice"]


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The device of a stage, in the place of those that the program names.

    Attributes:
        device: Where the stage computes.
        takes_cpu: Whether it has what the program has on the CPU, too.
        copies: Of the step that runs, where this rank has several workers.
    """

    device: torch.device
    takes_cpu: bool = False
    copies: DeviceCopies | None = None

    def of(self, named: torch.device) -> torch.device:
        """Returns where a tensor is that the program has on a device."""
        stays = not self.takes_cpu if named.type == "cpu" else named.type == "meta"
        return named if stays else self.device

    def brought(self, tensor: torch.Tensor, named: torch.device, made_by: Any) -> torch.Tensor:
        """Returns what another stage of this rank may have made, on the device where this one has it.

        Args:
            tensor: What has been made.
            named: Where the program has it.
            made_by: The work that has made it.
        """
        place = self.of(named)
        if tensor.device == place:
            return tensor
        return tensor.to(place) if self.copies is None else self.copies.bring(tensor, place, made_by)

    def modes(self, modes: Modes) -> Modes:
        """Returns the modes in which the stage runs what was recorded in `modes`: autocast and the device for new
        tensors are those of its own device."""
        grad, inference, autocast, settings = modes
        makes_elsewhere = settings.device is not None or (self.takes_cpu and is_accelerator(self.device))
        if not (autocast or makes_elsewhere):
            return modes
        kinds = tuple([(self.of(torch.device(kind)).type, *rest) for kind, *rest in autocast])
        device = self.of(settings.device or CPU)
        if device != (settings.device or CPU):
            settings = with_device(settings, device)
        return grad, inference, kinds, settings
