"""A source as a checkpoint of farspan, in as many files as are wanted: `reshard` and `import`."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Mapping
from typing import Any

from farspan.errors import CheckpointError
from farspan.state.conversion.of_checkpoint import CheckpointSource
from farspan.state.conversion.source import Source, pieces_of
from farspan.state.format import (
    Manifest,
    Part,
    Piece,
    StoredFile,
    StoredTensor,
    begin,
    commit,
    discard,
    hold,
    make_root,
    point_to,
)
from farspan.state.format import write_file as write_tensors

__all__ = ["write_checkpoint"]

_MODEL = "model/"


def write_checkpoint(source: Source, out: str, num_files: int, step: int | None = None) -> str:
    """Write a source as a new checkpoint; its folder.

    What is no tensor (the optimizer's groups, generators, the place in the data) is kept of a checkpoint that is taken
    as a whole; other sources are taken as a model, and have none.

    Args:
        source: Its tensors.
        out: The folder of checkpoints that it will be in.
        num_files: Over how many files the tensors are divided, by bytes.
        step: Its number; that of the source, else 0.

    Raises:
        CheckpointError: A tensor is damaged, or nothing can be written there.
    """
    manifest = source.manifest if isinstance(source, CheckpointSource) else None
    prefix = "" if manifest is not None else _MODEL
    state = _model_alone(source.aliases) if manifest is None else manifest.state
    about: Mapping[str, Any] = {"from": os.path.abspath(source.path)} if manifest is None else manifest.about
    number = step if step is not None else 0 if manifest is None else manifest.step
    root, lock = os.path.abspath(out), None
    try:
        make_root(root)
        lock = hold(root)
        draft = begin(root, number, secrets.token_hex(8))
        try:
            files, tensors = _write_files(source, prefix, draft.path, num_files, draft.save_id)
            made = Manifest(
                save_id=draft.save_id,
                step=number,
                serial=draft.serial,
                files=tuple(files),
                tensors=tensors,
                state=state,
                about=about,
            )
            path = commit(draft, made)
        except BaseException:
            discard(draft.path)
            raise
        point_to(draft, keep=None)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written.", why=f"{error.strerror}.", hint="another path") from None
    finally:
        if lock is not None:
            lock.release()
    return path


def _write_files(
    source: Source, prefix: str, folder: str, num_files: int, save_id: str
) -> tuple[list[StoredFile], dict[str, StoredTensor]]:
    memory = bytearray(max((entry.size_bytes for entry in source.tensors.values()), default=0))
    files: list[StoredFile] = []
    tensors: dict[str, StoredTensor] = {}
    for number, names in enumerate(_divided(source, num_files)):
        parts = [
            Part(
                key=prefix + name,
                dtype=source.tensors[name].dtype,
                shape=source.tensors[name].shape,
                data=functools.partial(pieces_of, source, name, memory),
            )
            for name in names
        ]
        file = f"rank-{number:05}.safetensors"
        written = write_tensors(f"{folder}/{file}", parts, {"save_id": save_id, "rank": str(number)})
        for part, at, checksums in zip(parts, written.begins, written.checksums, strict=True):
            piece = Piece(file=number, begin=at, offset=(0,) * len(part.shape), shape=part.shape, checksums=checksums)
            tensors[part.key] = StoredTensor(dtype=part.dtype, shape=part.shape, pieces=(piece,))
        files.append(
            StoredFile(
                name=file,
                size_bytes=written.size_bytes,
                header_bytes=written.header_bytes,
                header_checksum=written.header_checksum,
            )
        )
    return files, tensors


def _divided(source: Source, num_files: int) -> list[list[str]]:
    """Returns names in their order, in parts of about as many bytes each; none is empty."""
    names = list(source.tensors)
    num_files = min(num_files, len(names))
    total = sum(entry.size_bytes for entry in source.tensors.values())
    parts: list[list[str]] = [[]]
    done = 0
    for index, name in enumerate(names):
        left = len(names) - index
        must_begin = left == num_files - len(parts)
        if parts[-1] and len(parts) < num_files and (must_begin or done * num_files >= total * len(parts)):
            parts.append([])
        parts[-1].append(name)
        done += source.tensors[name].size_bytes
    return parts


def _model_alone(aliases: Mapping[str, str]) -> dict[str, Any]:
    model = {"kind": "module", "aliases": dict(aliases), "extra_state": {}}
    return {"objects": {"model": model}, "optimizers": {}, "groups": []}
