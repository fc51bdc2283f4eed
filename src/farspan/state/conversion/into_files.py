"""A source as plain files: safetensors, several with transformers' index if it is large, or one of torch.

Nothing has its final name before it is whole and on the disk.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from farspan.errors import CheckpointError
from farspan.state.conversion.of_safetensors import INDEX
from farspan.state.conversion.source import Source, pieces_of
from farspan.state.format import Part, disk, write_file

__all__ = ["write_safetensors", "write_torch"]


def write_safetensors(source: Source, out: str, most_bytes: float) -> list[str]:
    """Write a source as safetensors; the files.

    Args:
        source: Its tensors.
        out: A file whose name ends in ".safetensors"; else a folder, which gets the files that transformers looks for.
        most_bytes: Of tensors in one file, of several in a folder; a larger tensor has one for itself.

    Raises:
        CheckpointError: `out` is there already, or cannot be written.
    """
    out = out.rstrip("/")
    is_file = out.endswith(".safetensors")
    shards = [list(source.tensors)] if is_file else _shards(source, most_bytes)
    memory = bytearray(max((entry.size_bytes for entry in source.tensors.values()), default=0))
    with _written(out) as draft:
        if is_file:
            _write_shard(source, shards[0], draft, memory)
            return [out]
        disk.make_folder(draft)
        count = len(shards)
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        names = ["model.safetensors"] if count == 1 else names
        for shard, name in zip(shards, names, strict=True):
            _write_shard(source, shard, f"{draft}/{name}", memory)
        if count > 1:
            where = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
            total = sum(entry.size_bytes for entry in source.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            disk.write_small(f"{draft}/{INDEX}", (json.dumps(index, indent=2) + "\n").encode())
            names.append(INDEX)
        disk.fsync_folder(draft)
    return [f"{out}/{name}" for name in names]


def write_torch(source: Source, out: str) -> list[str]:
    """Write a source as what `torch.save(model.state_dict(), out)` writes: also under the other names of its tensors.

    Raises:
        CheckpointError: `out` is there already, or cannot be written.
    """
    import torch

    from farspan.comm.tensor_bytes import buffer_of
    from farspan.record.saving.files import stream_saving
    from farspan.record.saving.reserved import reserve

    def read(name: str, memory: torch.Tensor) -> None:
        source.read(name, buffer_of(memory))

    stream_saving()
    state: dict[str, torch.Tensor] = {}
    for name, entry in source.tensors.items():
        size = entry.size_bytes
        fetch: Callable[[torch.Tensor], None] = functools.partial(read, name)
        memory = reserve(size, fetch) if size else torch.empty(0, dtype=torch.uint8)
        state[name] = memory.view(getattr(torch, entry.dtype)).view(entry.shape)
    state |= {name: state[known] for name, known in source.aliases.items() if known in state}
    with _written(out) as draft:
        torch.save(state, draft)
        with disk.opened(draft) as file:
            disk.fsync(file)
    return [out]


def _shards(source: Source, most_bytes: float) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in source.tensors.items():
        if shards[-1] and size + entry.size_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.size_bytes
    return shards


def _write_shard(source: Source, names: Sequence[str], path: str, memory: bytearray) -> None:
    parts = [
        Part(
            key=name,
            dtype=source.tensors[name].dtype,
            shape=source.tensors[name].shape,
            data=functools.partial(pieces_of, source, name, memory),
        )
        for name in names
    ]
    write_file(path, parts, {})


@contextmanager
def _written(out: str) -> Iterator[str]:
    """The path of a draft beside `out`, which gets its name when the body has ended."""
    if disk.exists(out):
        raise CheckpointError(
            f"{out} is there already.", why="nothing is ever replaced.", hint="another path, or remove it"
        )
    folder = f"{out}.tmp-{secrets.token_hex(8)}"
    try:
        disk.make_folder(folder)
        draft = f"{folder}/{os.path.basename(out)}"  # a torch file has its own name inside
        yield draft
        disk.rename(draft, out)
        disk.fsync_folder(os.path.dirname(out) or ".")
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written.", why=f"{error.strerror}.", hint="another path") from None
    finally:
        if disk.exists(folder):
            disk.remove_tree(folder)
