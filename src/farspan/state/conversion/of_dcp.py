"""A folder of torch.distributed.checkpoint as a source.

Its metadata are a pickle, which could run anything: it is read by an unpickler that knows DCP's own dataclasses and
nothing else. The chunks of tensors are read by torch's weights_only.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from farspan.errors import CheckpointError
from farspan.state.conversion.source import Entry
from farspan.state.format import disk
from farspan.state.format.dtypes import ITEM_BYTES
from farspan.torch_private import dcp_classes

__all__ = ["METADATA", "DcpSource"]

METADATA = ".metadata"


class DcpSource:
    """Tensors of a DCP folder.

    Args:
        path: The folder.
        key: Names begin with it and a dot: the model's place in what was saved; "" for all.

    Raises:
        CheckpointError: Its metadata are damaged, or name what is not DCP's.
    """

    def __init__(self, path: str, key: str = "") -> None:
        self.path = path
        self.aliases: Mapping[str, str] = {}
        classes = dcp_classes()
        metadata = _read_metadata(f"{path}/{METADATA}", classes)
        prefix = f"{key}." if key else ""
        self._chunks: dict[str, list[tuple[Any, Any]]] = {}
        self.tensors: dict[str, Entry] = {}
        places = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): place
            for index, place in metadata.storage_data.items()
        }
        for fqn, item in metadata.state_dict_metadata.items():
            if type(item) is classes.tensor and fqn.startswith(prefix):
                name = fqn.removeprefix(prefix)
                self.tensors[name] = _entry(name, item, path)
                self._chunks[name] = [(chunk, places.get((fqn, tuple(chunk.offsets)))) for chunk in item.chunks]
        if not self.tensors:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in metadata.state_dict_metadata))
            raise CheckpointError(f"{path} has no tensor at {key!r}.", why=f"names begin with {tops[:8]}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def read(self, name: str, view: memoryview) -> None:
        """Read a tensor, of all its chunks.

        Raises:
            CheckpointError: A chunk is missing or damaged.
        """
        entry = self.tensors[name]
        if not view.nbytes:
            return
        target = torch.frombuffer(view, dtype=getattr(torch, entry.dtype)).view(entry.shape)
        num_read = 0
        for chunk, place in self._chunks[name]:
            data = self._read_chunk(name, place)
            if tuple(data.shape) != tuple(chunk.sizes) or data.dtype != target.dtype:
                raise self._damaged(name, "a chunk has another shape or dtype than the metadata say")
            box = target
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                if not 0 <= offset <= box.shape[dim] - size:
                    raise self._damaged(name, "a chunk lies outside of the tensor")
                box = box.narrow(dim, offset, size)
            box.copy_(data)
            num_read += data.numel()
        if num_read != math.prod(entry.shape):
            raise self._damaged(name, "its chunks do not cover it")

    def _read_chunk(self, name: str, place: Any) -> torch.Tensor:
        if place is None or place.relative_path != os.path.basename(place.relative_path):
            raise self._damaged(name, "the metadata do not say where a chunk is")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{name} in {self.path} is compressed.", hint="save it without DCP's extensions")
        try:
            with disk.opened(f"{self.path}/{place.relative_path}") as file:
                data = bytearray(min(place.length, max(disk.size_of(file) - place.offset, 0)))
                disk.read_into(file, memoryview(data), place.offset)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            raise self._damaged(name, (str(error).strip() or "it is too short").splitlines()[0][:200]) from None
        if not isinstance(found, torch.Tensor):
            raise self._damaged(name, "a chunk is no tensor")
        return found.detach().contiguous()

    def _damaged(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"{name} in {self.path} is damaged.", why=f"{why}.", hint="another checkpoint")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not DCP's") from None


def _read_metadata(path: str, classes: Any) -> Any:
    try:
        found = _Unpickler(disk.read_small(path), classes.allowed).load()
        if type(found) is not classes.metadata or type(found.storage_data) is not dict:
            raise pickle.UnpicklingError("no Metadata of DCP, or one that says nothing of files")
    except Exception as error:  # whatever a pickle can do wrong, with these classes alone
        why = f"{type(error).__name__}: {str(error)[:200]}."
        raise CheckpointError(f"{path} is no metadata of a DCP folder.", why=why, hint="another folder") from None
    return found


def _entry(name: str, item: Any, path: str) -> Entry:
    dtype = str(item.properties.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{name} in {path} has an unknown dtype.", why=f"{dtype}.")
    return Entry(dtype=dtype, shape=tuple(item.size))
