"""Saving and loading: `state_dict()` is whole on the rank that asks, `load_state_dict` gives each owner its part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from farspan.lazy.metadata import map_tensors
from farspan.lazy.recorder import Recorder
from farspan.lazy.tensor import LazyTensor

__all__ = ["Transfer", "transferring"]

_WRITES = (torch.Tensor.copy_, torch.Tensor.zero_, torch.Tensor.fill_)


class Transfer:
    """What stands in for the recorder while a state dictionary is made or loaded: torch functions run at once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write into a parameter at its owner only; read one by fetching it from there."""
        placed = self.recorder.placed.get(id(args[0])) if args else None
        if function in _WRITES and placed is not None:
            if placed.is_owned:
                function(*args, **kwargs)
            return args[0]
        args, kwargs = map_tensors((args, kwargs), self._fetch)
        return function(*args, **kwargs)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is LazyTensor:
            return tensor.read()
        placed = self.recorder.placed.get(id(tensor))
        return tensor if placed is None or placed.is_owned else self.recorder.engine.read_parameter(placed)


@contextlib.contextmanager
def transferring(recorder: Recorder, *, is_loading: bool) -> Iterator[None]:
    """Within, parameters are copied between ranks instead of recorded."""
    recorder.flush_before_change("load_state_dict" if is_loading else "state_dict")
    if is_loading:
        recorder.engine.meet("load_state_dict")  # nobody reads the old values any more
    outer, recorder.transfer = recorder.transfer, Transfer(recorder)
    try:
        yield
    finally:
        recorder.transfer = outer
    if is_loading:
        recorder.engine.parameters_changed()  # who reads a parameter from now on waits until its owner has loaded it
