"""Loading a saved model: before it is distributed each tensor is noted, after it each rank reads what it owns."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

from farspan.comm.tensor_bytes import overwrite
from farspan.errors import CheckpointError, FarspanError
from farspan.execute.engine import Engine
from farspan.execute.process.world import current_engine
from farspan.outputs import write_line
from farspan.place.deferred.context import deferred_init
from farspan.place.pretrained.folder import stored_at
from farspan.place.pretrained.lazy_file import tensor_of
from farspan.place.pretrained.names import Matched, match
from farspan.place.pretrained.stored import read_stored
from farspan.record.memory.transfer import transferring

__all__ = ["load_pretrained"]


def load_pretrained(model: nn.Module, path: str | os.PathLike[str]) -> Matched:
    """Let `model` have the weights of a saved one.

    Args:
        model: Distributed or not, built in `deferred_init` or not.
        path: A folder as `save_pretrained` of transformers writes it (`model.safetensors`, or several files and an
            index), or a safetensors file.

    Returns:
        What was found, and what is missing or unexpected, of which a line is said too.

    Raises:
        CheckpointError: There is no saved model, a part of it is missing or damaged, or a tensor has another shape. On
            every rank, and nothing has been loaded.
    """
    folder = Path(path)
    engine = current_engine()
    if engine is None or id(model) not in engine.recorder.roots:
        matched = match(model, stored_at(folder))
        with deferred_init(), torch.no_grad():
            for _, tensor, stored in matched.found:
                tensor.detach().copy_(tensor_of(stored))
        _say(matched.said_of(model, folder), is_first=engine is None or engine.rank == 0)
        return matched
    matched = _agreed(engine, model, folder)
    with transferring(engine.recorder, is_loading=True, state={}):
        for _, tensor, stored in matched.found:
            placed = engine.recorder.placed.get(id(tensor))
            if placed is None or placed.is_owned:
                overwrite(tensor, read_stored(stored))
    _say(matched.said_of(model, folder), is_first=engine.rank == 0)
    return matched


def _agreed(engine: Engine, model: nn.Module, folder: Path) -> Matched:
    """Returns what all ranks find.

    Raises:
        CheckpointError: One of them cannot load, or they find different models; on every rank.
    """
    matched, error = None, None
    try:
        matched = match(model, stored_at(folder))
        forms = [(name, stored.name, stored.dtype, stored.shape) for name, _, stored in matched.found]
        vote = b"+" + hashlib.blake2b(repr(forms).encode(), digest_size=16).digest()
    except FarspanError as raised:
        error, vote = raised, b"-" + f"{raised.what}\n{raised.why}".encode()
    votes = engine.agreement_of_all.gather("pretrained weights", vote)
    if error is not None:
        raise error
    failed = next((rank for rank, each in enumerate(votes) if each[:1] == b"-"), None)
    if failed is not None:
        what, _, why = votes[failed][1:].decode(errors="replace").partition("\n")
        raise CheckpointError(f"rank {failed}: {what}", why=why, hint="the same files on every host")
    other = next((rank for rank, each in enumerate(votes) if each != votes[0]), None)
    if other is not None:
        raise CheckpointError(
            f"ranks 0 and {other} find different models in {folder}.",
            why="names, shapes or dtypes of the tensors differ.",
            hint="the same files on every host",
        )
    assert matched is not None
    return matched


def _say(text: str, *, is_first: bool) -> None:
    for line in text.splitlines() if is_first else ():
        write_line(line)
