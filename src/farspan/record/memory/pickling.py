"""Pickling a distributed model, or its parameters: what is written is what one process writes, with no farspan in it.

Parameters of other ranks are fetched; shared ones are written once, for they are one object here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from farspan.record.saving.files import is_saving
from farspan.record.saving.parameters import laid_out, reserved_for
from farspan.record.tensor import StubParameter
from farspan.record.unrecorded import unrecorded
from farspan.torch_private import tensor_of_class

if TYPE_CHECKING:
    import torch

    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["reduce_module", "reduce_placed"]


def reduce_module(recorder: Recording, module: nn.Module, protocol: Any) -> Any:
    """Returns what `pickle` writes of a module: as it is when all that was recorded has run."""
    recorder.flush_before_change("a model is pickled")
    with unrecorded(recorder):  # recurrent modules look after their weights then, which is no change
        return object.__reduce_ex__(module, protocol)


def reduce_placed(recorder: Recording, placed: Placed, protocol: Any) -> Any:
    """Returns what `pickle` writes of a parameter, or of a buffer that another rank owns."""
    recorder.before_read(placed.tensor)
    with unrecorded(recorder):
        if placed.is_owned:
            return type(placed.tensor).__reduce_ex__(placed.tensor, protocol)
        return _real(recorder, placed).__reduce_ex__(protocol)


def _real(recorder: Recording, placed: Placed) -> torch.Tensor:
    """Returns the owner's tensor, with what the program has written on the tensor here."""
    meta, stub = placed.meta, placed.tensor
    if is_saving():
        data = reserved_for(recorder, placed)
    else:
        data = laid_out(meta, recorder.engine.read_parameter(placed))
    tensor = tensor_of_class(placed.kind, data, requires_grad=stub.requires_grad)
    vars(tensor).update(
        {name: value for name, value in vars(stub).items() if name not in StubParameter.__annotations__}
    )
    return tensor
