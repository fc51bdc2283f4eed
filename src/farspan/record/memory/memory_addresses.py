"""Gives the memory of a parameter an address, by which programs and savers find out which parameters share it.

At its owner that is an address; elsewhere a number of the same use: the same at each question, the same for all that
is this parameter's memory, and different from all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from farspan.call.naming import REFUSED, name_of

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["ADDRESSES"]

_T: Any = torch.Tensor


class _Storage(torch.UntypedStorage):
    """Memory that another rank has: its size and its address, and no data."""

    _address = 0

    def data_ptr(self) -> int:
        return self._address

    @property
    def _cdata(self) -> int:
        return self._address


def _address(recorder: Recording, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    placed = recorder.placed.get(id(tensor)) or getattr(tensor, "_alias_of", None)
    if placed is None:
        recorder.refuse(f"{name_of(function)} cannot take recorded tensors", hint=REFUSED[function])
    if placed.is_owned:
        return function(placed.tensor)
    if function is _T.data_ptr:
        return _address_of(placed)
    storage = _Storage(placed.meta.size_bytes, device="meta")
    storage._address = _address_of(placed)
    return storage if function is _T.untyped_storage else _typed(storage, placed)


def _address_of(placed: Placed) -> int:
    return id(placed) if placed.meta.numel else 0


def _typed(storage: torch.UntypedStorage, placed: Placed) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=placed.meta.dtype, _internal=True)


ADDRESSES: dict[Any, Any] = dict.fromkeys([_T.data_ptr, _T.untyped_storage, _T.storage], _address)
