"""safetensors: `save_file` of what other ranks have writes one tensor after the other, each fetched in its turn.

The bytes are those of safetensors: it makes the header itself, of empty tensors, into which sizes and places are put.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from farspan.comm.tensor_bytes import buffer_of
from farspan.launch.files.patches import put_by_name
from farspan.record.saving.files import fetched, is_fetched_late
from farspan.record.saving.reserved import fill_reserved
from farspan.torch_private import DisableTorchFunction, address_of_storage

__all__ = ["ADAPTERS"]

_ALIGNMENT = 8


def _adapt(module: Any) -> None:
    original, save = module.save_file, module.save
    if hasattr(original, "__wrapped__"):
        return  # another rank of this process has been here

    @functools.wraps(original)
    def save_file(tensors: Any, filename: Any, metadata: Mapping[str, str] | None = None) -> None:
        if not _is_streamed(tensors):
            fill_reserved()
            original(tensors, filename, metadata)
            return
        kept = dict(tensors)
        header, order = _header_of(save, kept, metadata)
        with open(filename, "wb") as file:
            file.write(header)
            for name in order:
                with fetched(kept[name]), DisableTorchFunction():
                    file.write(buffer_of(kept.pop(name)))

    @functools.wraps(save)
    def save_bytes(tensors: Any, metadata: Mapping[str, str] | None = None) -> bytes:
        fill_reserved()
        return save(tensors, metadata)

    module.save_file, module.save = save_file, save_bytes
    put_by_name({id(original): save_file, id(save): save_bytes})


def _is_streamed(tensors: Any) -> bool:
    """Returns whether some of these are to be fetched, and all are as safetensors wants them, which says itself where
    not."""
    if type(tensors) is not dict and not isinstance(tensors, Mapping):
        return False
    found = list(tensors.values())
    if not all(type(item) in (torch.Tensor, torch.nn.Parameter) for item in found):
        return False
    with DisableTorchFunction():
        if any(item.layout is not torch.strided or item.device.type != "cpu" for item in found):
            return False
        if not all(item.is_contiguous() for item in found):
            return False
        storages = [address_of_storage(item.untyped_storage()) for item in found if item.numel()]
    return len(set(storages)) == len(storages) and any(map(is_fetched_late, found))


def _header_of(
    save: Callable[..., bytes], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """Returns all that comes before the data, and the names in the order of the file."""
    empty = {name: torch.empty(0, dtype=item.dtype) for name, item in tensors.items()}
    text = save(empty, metadata)[_ALIGNMENT:]
    entries = json.loads(text)
    order = [name for name in entries if name != "__metadata__"]
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        entries[name] |= {"shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header, order


ADAPTERS = {"safetensors.torch": _adapt}
