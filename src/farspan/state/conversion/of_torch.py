"""A file that `torch.save` has written as a source: read by weights_only, so that nothing in it can run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from farspan.comm.tensor_bytes import buffer_of
from farspan.errors import CheckpointError, quoted
from farspan.state.conversion.source import Entry
from farspan.state.format.dtypes import ITEM_BYTES

__all__ = ["TorchSource"]


class TorchSource:
    """Tensors of a state dictionary.

    Args:
        path: The file.
        key: Where in what was saved the state dictionary is: "model", "net/ema"; "" for the whole.

    Raises:
        CheckpointError: It is no such file, or holds no state dictionary there.
    """

    def __init__(self, path: str, key: str = "") -> None:
        self.path = path
        try:
            found: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            why = (str(error).strip() or "it is too short").splitlines()[0][:200]
            hint = "a file of tensors alone: torch.save(model.state_dict(), ...)"
            raise CheckpointError(f"{path} cannot be read without running what is in it.", why=why, hint=hint) from None
        for part in key.split("/") if key else []:
            found = found.get(part) if isinstance(found, dict) else None
        self._data = _state_in(found, path, key)
        self.tensors = {name: _entry(name, item, path) for name, item in self._data.items()}
        first: dict[tuple[Any, ...], str] = {}
        self.aliases: Mapping[str, str] = {
            name: known for name, item in self._data.items() if (known := first.setdefault(_place(item), name)) != name
        }
        for name in self.aliases:
            del self.tensors[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data = {}

    def read(self, name: str, view: memoryview) -> None:
        """Read a tensor."""
        view[:] = buffer_of(self._data[name].detach().resolve_conj().resolve_neg().contiguous())


def _state_in(found: Any, path: str, key: str) -> dict[str, torch.Tensor]:
    if isinstance(found, dict):
        tensors = {name: item for name, item in found.items() if isinstance(item, torch.Tensor) and type(name) is str}
        if tensors and len(tensors) == sum(
            not isinstance(item, (int, float, str, type(None))) for item in found.values()
        ):
            return tensors
    inside = [name for name, item in found.items() if isinstance(item, dict)] if isinstance(found, dict) else []
    raise CheckpointError(
        f"{path} holds no state dictionary{f' at {key!r}' if key else ''}.",
        why=f"dictionaries there: {quoted(inside)}." if inside else "",
        hint=f"--key {inside[0]}" if inside else "a file of torch.save(model.state_dict(), ...)",
    )


def _entry(name: str, item: torch.Tensor, path: str) -> Entry:
    dtype = str(item.dtype).removeprefix("torch.")
    if item.layout is not torch.strided or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{name} in {path} is no dense tensor of a known dtype.", why=f"{item.layout}, {dtype}.")
    return Entry(dtype=dtype, shape=tuple(item.shape))


def _place(item: torch.Tensor) -> tuple[Any, ...]:
    """Returns what is equal for tensors that are the same: memory, shape and strides; an empty one is like no other."""
    if not item.numel():
        return (id(item),)
    return item.data_ptr(), item.dtype, item.shape, item.stride()
