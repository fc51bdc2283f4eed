"""A checkpoint of farspan as a source: of its model alone, or of all tensors in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from farspan.documents import as_object, as_text
from farspan.errors import CheckpointError
from farspan.state.conversion.source import Entry
from farspan.state.format import Reader, is_checkpoint, newest, read_manifest

__all__ = ["CheckpointSource", "checkpoint_at"]

_MODEL = "model/"


def checkpoint_at(path: str) -> str | None:
    """Returns the checkpoint that `path` is, or the newest in the folder of checkpoints that it is; None if it is
    neither."""
    return path if is_checkpoint(path) else newest(path)


class CheckpointSource:
    """Tensors of a checkpoint, verified as they are read.

    Args:
        path: Its folder.
        folders: Where files of it lie that are not in that folder.
        is_whole: All tensors, under their full names; else those of the model, as the program calls them.

    Raises:
        CheckpointError: Its manifest is damaged, or it holds no model.
    """

    def __init__(self, path: str, folders: Sequence[str] = (), *, is_whole: bool = False) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._reader = Reader(path, self.manifest, folders)
        prefix = self._prefix = "" if is_whole else _MODEL
        self.tensors: Mapping[str, Entry] = {
            name.removeprefix(prefix): Entry(dtype=item.dtype, shape=item.shape)
            for name, item in self.manifest.tensors.items()
            if name.startswith(prefix)
        }
        if not self.tensors:
            raise CheckpointError(
                f"{path} holds no model.", why="it was saved without model=.", hint="farspan.save(path, model=model)"
            )
        self.aliases: Mapping[str, str] = {} if is_whole else _aliases(self.manifest.state, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def read(self, name: str, view: memoryview) -> None:
        """Read a tensor.

        Raises:
            CheckpointError: It is damaged.
        """
        self._reader.read(self._prefix + name, view)


def _aliases(state: object, path: str) -> dict[str, str]:
    """Returns the other names of the model's tensors, as the saved state has them; none of what was saved as several
    models."""
    found = as_object(state, path)
    model = as_object(as_object(found.get("objects", {}), path).get("model", {}), path)
    return {name: as_text(known, path) for name, known in as_object(model.get("aliases", {}), path).items()}
