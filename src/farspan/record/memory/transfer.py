"""Saving and loading: `state_dict()` is whole on the rank that asks, `load_state_dict` gives each owner its part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from farspan.call.pytree.template import map_tensors
from farspan.record.memory.exchanged import become_plain
from farspan.record.parameters.away import AwayParameter, real_of
from farspan.record.recording import Recording
from farspan.record.saving.parameters import reserved_for
from farspan.record.tensor import LazyTensor

__all__ = ["Transfer", "check_assigned", "transferring"]

_WRITES = (torch.Tensor.copy_, torch.Tensor.zero_, torch.Tensor.fill_)


class Transfer:
    """Replaces the recorder while a state dictionary is made or loaded: torch functions run at once."""

    def __init__(self, recorder: Recording, *, is_loading: bool) -> None:
        self.recorder = recorder
        self.is_loading = is_loading
        self._fetched: dict[str, torch.Tensor] = {}
        self._given: dict[int, torch.Tensor] = {}
        """The values that are loaded, by id."""

    def dispatch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write into a parameter at its owner only; read one by fetching it from there."""
        placed = self.recorder.placed.get(id(args[0])) if args else None
        if function in _WRITES and placed is not None:
            source = (*args, None)[1]
            if id(source) not in self.recorder.placed:  # of a parameter, each rank has something else at hand
                self.recorder.engine.loaded(placed.name, source)
            self.recorder.splitting.matrices.owned.note_written([placed.name])
            if placed.is_owned:
                given, kwargs = map_tensors((args[1:], kwargs), self._fetch)
                function(args[0], *given, **kwargs)
            return args[0]
        if function in _WRITES and type(args[0]) is LazyTensor:  # a buffer that the model has set to what it computed
            plain = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
            given, kwargs = map_tensors((args[1:], kwargs), self._fetch)
            function(plain, *given, **kwargs)
            become_plain(self.recorder, args[0], plain)
            return args[0]
        args, kwargs = map_tensors((args, kwargs), self._fetch)
        self.recorder.copies.fill(function, args, kwargs)
        result = function(*args, **kwargs)
        if placed is not None and not self.is_loading and _is_memory_of(result, args[0]):
            self.recorder.copies.add(result, placed)
        return result

    def fetch_all(self, state: Mapping[str, Any]) -> None:
        """Fetch what is recorded, and parameters, before anybody writes into what they are made of."""
        placed = self.recorder.placed
        for item in state.values():
            if isinstance(item, torch.Tensor) and (type(item) is LazyTensor or id(item) in placed):
                self._given[id(item)] = self._fetch(item)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._given:
            return self._given[id(tensor)]
        if type(tensor) is LazyTensor:
            return tensor.read()
        placed = self.recorder.placed.get(id(tensor))
        if type(tensor) is AwayParameter:
            return real_of(tensor).clone()
        if placed is None or placed.is_owned:
            return tensor
        if self.is_loading:  # may have been written since
            return self.recorder.engine.read_parameter(placed)
        if placed.name not in self._fetched:  # several names of one parameter share memory, as at its owner
            known = self.recorder.copies.memory_of(placed)
            self._fetched[placed.name] = reserved_for(self.recorder, placed) if known is None else known
        return self._fetched[placed.name]


def check_assigned(recorder: Recording, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise if `load_state_dict(assign=True)` would do more than copy: placed parameters keep their identity.

    Raises:
        RecordError: A tensor in `state` has another dtype than the module's.
    """
    for name, own in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        given = state.get(name)
        if isinstance(given, torch.Tensor) and given.dtype != own.dtype:
            recorder.refuse(
                f"load_state_dict(assign=True) cannot change {name} from {own.dtype} to {given.dtype}",
                hint="load before farspan.distribute, or without assign=True, which converts",
            )


@contextlib.contextmanager
def transferring(recorder: Recording, *, is_loading: bool, state: Any = None) -> Iterator[None]:
    """Within, parameters are copied between ranks instead of recorded."""
    recorder.flush_before_change("load_state_dict" if is_loading else "state_dict")
    transfer = Transfer(recorder, is_loading=is_loading)
    if is_loading:
        recorder.splitting.matrices.owned.come_home("load_state_dict")
        recorder.copies.refresh(state)
        transfer.fetch_all(state)
        recorder.engine.barrier("load_state_dict")  # nobody reads the old values any more
        recorder.engine.groups.begin_write("load_state_dict")
    outer = recorder.transfer
    if outer is None or is_loading:  # else the state of a module inside one whose state is made
        recorder.transfer = transfer
    try:
        yield
    finally:
        recorder.transfer = outer
    if is_loading:
        recorder.engine.groups.end_write()
        recorder.engine.parameters_changed()  # who reads a parameter from now on waits until its owner has loaded it


def _is_memory_of(result: Any, tensor: torch.Tensor) -> bool:
    """Returns whether `result` is a tensor with the memory of `tensor`."""
    if type(result) is not torch.Tensor or result.layout is not torch.strided:
        return False
    return result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
