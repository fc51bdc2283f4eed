"""`torch.amp.GradScaler` on gradients that lie on several stages: each stage unscales its own, all look for inf.

found_inf   one for each stage --max--> the scaler's own, which every rank can read
scale       stays a plain tensor on every rank: what changes it is read, and has been already
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farspan.call.pytree.template import map_tensors
from farspan.record.ops.op_placement import stage_of
from farspan.record.tensor import LazyTensor
from farspan.torch_private import unscale_, update_scale_

if TYPE_CHECKING:
    from collections.abc import Callable

    from farspan.record.recording import Recording

__all__ = ["SCALING"]


def _unscale(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradients, found_inf, inverse = args
    by_stage: dict[int | None, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_stage.setdefault(stage_of(recorder, gradient), []).append(gradient)
    if len(by_stage) == 1:
        return NotImplemented
    founds: list[torch.Tensor] = []
    for part in by_stage.values():
        found = torch.zeros_like(found_inf)  # becomes a recorded tensor of that stage
        function(part, found, inverse)
        founds.append(found)
    found_inf.copy_(torch.stack([found_inf.clone(), *founds]).amax())
    return None


def _update(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = map_tensors((args, kwargs), lambda item: item.read() if type(item) is LazyTensor else item)
    return function(*args, **kwargs)


SCALING: dict[Any, Callable[..., Any]] = {unscale_: _unscale, update_scale_: _update}
