"""Reading a checkpoint: every byte is compared with its checksum before anybody sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from farspan.errors import CheckpointError, DamageError
from farspan.state.format import disk
from farspan.state.format.checksum import CHUNK_BYTES, Checksum, blocks_of, checksum_of, chunks_of
from farspan.state.format.dtypes import ITEM_BYTES, num_bytes
from farspan.state.format.manifest import Manifest, Piece
from farspan.state.format.manifest_text import manifest_from_text

__all__ = ["Damage", "Reader", "damaged", "read_manifest", "verify"]

_HINT = "farspan.load(..., strict=False), which takes the newest checkpoint that is whole"
_NUM_READERS = 2
"""Threads that read at a time: one hashes while the disk works for the other. Four were slower."""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damage of a checkpoint.

    Attributes:
        file: Its path.
        tensor: Of which tensor; "" where it is about the whole file.
        what: In words.
    """

    file: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}{f', {self.tensor}' if self.tensor else ''}: {self.what}"


def damaged(damage: Damage) -> DamageError:
    """Returns the error of somebody who needs what is damaged."""
    whose = f"{damage.tensor} in {damage.file}" if damage.tensor else damage.file
    return DamageError(f"{whose} is damaged.", why=f"{damage.what}.", hint=_HINT)


def read_manifest(folder: str) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of another format.
    """
    path = f"{folder}/{MANIFEST}"
    try:
        text = disk.read_small(path)
    except OSError as error:
        raise DamageError(f"{path} cannot be read.", why=f"{error.strerror}.", hint=_HINT) from None
    return manifest_from_text(text, path)


class Reader:
    """Reads tensors of one checkpoint; to be used as a context.

    Args:
        folder: The checkpoint's.
        manifest: Its manifest.
        others: Folders where those of its files lie that are not in the first one.
        fetch: Brings a file that is in none of them into the first one, by its path and the save's id.
    """

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        others: Sequence[str] = (),
        fetch: Callable[[str, str], None] | None = None,
    ) -> None:
        self.folder = folder
        self._fetch = fetch
        self.others = others
        self.manifest = manifest
        self._files: dict[int, int] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        while self._files:
            disk.close(self._files.popitem()[1])

    def path_of(self, number: int) -> str:
        name = self.manifest.files[number].name
        paths = [f"{folder}/{name}" for folder in (self.folder, *self.others)]
        return next((path for path in paths if disk.exists(path)), paths[0])

    def read(self, name: str, view: memoryview) -> None:
        """Read a whole tensor.

        Args:
            name: Of the tensor.
            view: Its memory, of just its size, in row-major order. If this raises, what is in it means nothing.

        Raises:
            CheckpointError: It is damaged.
        """
        tensor = self.manifest.tensors[name]
        if len(tensor.pieces) == 1 and tensor.pieces[0].shape == tensor.shape:
            self.read_piece(name, tensor.pieces[0], view)
        elif tensor.pieces:
            self.read_box(name, (0,) * len(tensor.shape), tensor.shape, view)

    def read_all(self, wanted: Sequence[tuple[str, memoryview | None]]) -> None:
        """Read many tensors, in the order in which they lie on the disk, by several threads.

        Args:
            wanted: Names, each with its memory as `read` takes it; with None it is only verified. If this raises, what
                is in the memory means nothing.

        Raises:
            CheckpointError: Something is damaged: what lies first.
        """
        in_order = sorted(wanted, key=lambda one: [(it.file, it.begin) for it in self.manifest.tensors[one[0]].pieces])
        with ThreadPoolExecutor(_NUM_READERS, "farspan-read") as threads:
            reads = [threads.submit(self._read_or_verify, name, view) for name, view in in_order]
            try:
                for read in reads:
                    read.result()
            finally:
                threads.shutdown(cancel_futures=True)

    def _read_or_verify(self, name: str, view: memoryview | None) -> None:
        if view is not None:
            self.read(name, view)
            return
        for damage in self.verify(name):
            raise damaged(damage)

    def read_box(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...], view: memoryview) -> None:
        """Read a box of a tensor: of all pieces, what lies in it.

        Args:
            name: Of the tensor.
            offset: Of the box.
            shape: Of the box.
            view: Its memory, of just the size of the box.

        Raises:
            CheckpointError: A piece is damaged.
        """
        import numpy as np

        tensor = self.manifest.tensors[name]
        kind = np.dtype(f"V{ITEM_BYTES[tensor.dtype]}")
        target = np.frombuffer(view, dtype=kind).reshape(shape)
        for piece in tensor.pieces:
            first = [max(one, other) for one, other in zip(offset, piece.offset, strict=True)]
            last = [
                min(one + size, other + length)
                for one, size, other, length in zip(offset, shape, piece.offset, piece.shape, strict=True)
            ]
            if any(begin >= end for begin, end in zip(first, last, strict=True)):
                continue
            data = bytearray(num_bytes(tensor.dtype, piece.shape))
            self.read_piece(name, piece, memoryview(data))
            source = np.frombuffer(data, dtype=kind).reshape(piece.shape)
            target[_slices(first, last, offset)] = source[_slices(first, last, piece.offset)]

    def read_piece(self, name: str, piece: Piece, view: memoryview) -> None:
        """Read one piece of the tensor `name`.

        Raises:
            CheckpointError: It is damaged.
        """
        flat = view.cast("B") if view.nbytes else view
        for damage in self._blocks(name, piece, flat.nbytes, lambda begin, end: flat[begin:end]):
            raise damaged(damage)

    def verify(self, name: str) -> Iterator[Damage]:
        """Yields the damages of a tensor."""
        tensor = self.manifest.tensors[name]
        sizes = [num_bytes(tensor.dtype, piece.shape) for piece in tensor.pieces]
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(sizes, default=0))))
        for piece, size in zip(tensor.pieces, sizes, strict=True):
            try:
                yield from self._blocks(name, piece, size, lambda begin, end: buffer[: end - begin])
            except _FileDamageError as error:
                yield error.damage

    def _blocks(
        self, name: str, piece: Piece, size_bytes: int, memory: Callable[[int, int], memoryview]
    ) -> Iterator[Damage]:
        """Read a piece into what `memory` gives for each chunk; the blocks of it that are not what was written."""
        file = self._open(piece.file)
        for number, (begin, end) in enumerate(blocks_of(size_bytes)):
            checksum, count = Checksum(), 0
            for first, last in chunks_of(end - begin):
                chunk = memory(begin + first, begin + last)
                count += self._read_into(file, chunk, piece, begin + first, name)
                checksum.update(chunk)
            if count < end - begin or checksum.hexdigest() != piece.checksums[number]:
                yield self._damage_of(piece, name, begin, end)

    def check_file(self, number: int) -> None:
        """Raise unless a file is there, has its size, and the header that was written.

        Raises:
            CheckpointError: It is not.
        """
        self._open(number)

    def _open(self, number: int) -> int:
        with self._opening:
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = self._opened(number)
            return file

    def _opened(self, number: int) -> int:
        stored, path = self.manifest.files[number], self.path_of(number)
        try:
            if self._fetch is not None and not disk.exists(path):
                self._fetch(path, self.manifest.save_id)
            file = disk.open_to_read(path)
        except OSError as error:
            raise _FileDamageError(path, f"it cannot be read: {error.strerror}") from None
        try:
            size = disk.size_of(file)
            if size != stored.size_bytes:
                raise _FileDamageError(path, f"it has {size} bytes, and was written with {stored.size_bytes}")
            header = bytearray(stored.header_bytes)
            count = disk.read_into(file, memoryview(header), 0)
            if count < len(header) or checksum_of(header) != stored.header_checksum:
                why = "its header is not the one that was written: it is damaged, or the file of another checkpoint"
                raise _FileDamageError(path, why)
        except OSError as error:
            disk.close(file)
            raise _FileDamageError(path, f"it cannot be read: {error.strerror}") from None
        except BaseException:
            disk.close(file)
            raise
        return file

    def _read_into(self, file: int, block: memoryview, piece: Piece, begin: int, name: str) -> int:
        try:
            return disk.read_into(file, block, piece.begin + begin)
        except OSError as error:
            raise _FileDamageError(self.path_of(piece.file), f"it cannot be read: {error.strerror}", name) from None

    def _damage_of(self, piece: Piece, name: str, begin: int, end: int) -> Damage:
        where = f"the bytes {piece.begin + begin} to {piece.begin + end} of the file are not those that were written"
        return Damage(file=self.path_of(piece.file), tensor=name, what=where)


class _FileDamageError(DamageError):
    """A file that cannot be read, or is not the one that was written."""

    def __init__(self, path: str, what: str, tensor: str = "") -> None:
        self.damage = Damage(file=path, tensor=tensor, what=what)
        error = damaged(self.damage)
        super().__init__(error.what, why=error.why, hint=error.hint)

    def __reduce__(self) -> tuple[object, ...]:
        return (_FileDamageError, (self.damage.file, self.damage.what, self.damage.tensor))


def verify(folder: str, others: Sequence[str] = ()) -> list[Damage]:
    """Read all of a checkpoint; what is wrong with it, nothing if it is whole.

    Args:
        folder: The checkpoint's.
        others: Folders where those of its files lie that are not in the first one.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(file=f"{folder}/{MANIFEST}", tensor="", what=error.why.rstrip(".") or error.what)]
    found: list[Damage] = []
    with Reader(folder, manifest, others) as reader:
        for number in range(len(manifest.files)):
            try:
                reader.check_file(number)
            except _FileDamageError as error:
                found.append(error.damage)
        broken = {damage.file for damage in found}
        for name, tensor in manifest.tensors.items():
            if not any(reader.path_of(piece.file) in broken for piece in tensor.pieces):
                found += reader.verify(name)
    return found


def _slices(first: list[int], last: list[int], offset: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple([slice(begin - at, end - at) for begin, end, at in zip(first, last, offset, strict=True)])
