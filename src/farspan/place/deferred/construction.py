"""Knows all memory of this process that has not been filled, and what was to be done to it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import torch

from farspan.place.deferred.draws import Draws
from farspan.place.deferred.memory import Memory, Operation, RandomState, View, mapped
from farspan.place.deferred.pages import release_pages
from farspan.place.deferred.replay import Replay
from farspan.torch_private import (
    has_own_dispatch,
    has_storage,
    key_of_storage,
    num_users_of,
    settings_now,
    tensor_on,
    without_any_mode,
)

__all__ = ["CONSTRUCTION", "Construction"]

_SWEPT_EVERY = 1024


class Construction:
    """The memory that holds nothing yet, by tensor, and how it is filled. Threads may construct beside each other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.draws = Draws()
        self._memories: dict[int, Memory] = {}
        self._replay = Replay()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._memories)

    def waiting(self) -> list[Memory]:
        """Returns all memory that has not been filled and that the program uses."""
        self.sweep()
        return list(self._memories.values())

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Returns the memory of a tensor, if it has not been filled."""
        if not self._memories or has_own_dispatch(type(tensor)):
            return None
        with without_any_mode():
            is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
            if not is_plain or not has_storage(tensor):
                return None
            return self._memories.get(key_of_storage(tensor.untyped_storage()))

    def view_of(self, tensor: torch.Tensor) -> View | None:
        """Returns the view that a tensor is of memory that has not been filled; None if it is plain data."""
        memory = self.memory_of(tensor)
        if memory is None:
            return None
        if tensor.is_conj() or tensor.is_neg():
            self.fill(memory)
            return None
        with without_any_mode():
            return View(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of the program in memory that holds nothing."""
        with without_any_mode(), torch.no_grad():
            tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
        return self.adopt(tensor)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a new tensor for one that holds nothing."""
        with without_any_mode():
            memory = Memory(tensor.untyped_storage())
            release_pages(memory.storage)
        with self.lock:
            self._memories[memory.key] = memory
        return tensor

    def note(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        written: Sequence[View] = (),
        results: Sequence[View | None] = (),
        random: RandomState | None = None,
        overwrites: Memory | None = None,
    ) -> None:
        """Put an operation off.

        Args:
            function: What the program calls.
            args: With views for tensors in memory that holds nothing.
            kwargs: The same.
            written: Those that are written in place.
            results: What it gives, if that is new.
            random: What it draws from.
            overwrites: Memory of which nothing is left that was there before.
        """
        args, kwargs = mapped(args, _copied), mapped(kwargs, _copied)
        reads: dict[Memory, None] = {}

        def note_memory(item: Any) -> Any:
            if type(item) is View:
                reads[item.memory] = None

        mapped((args, kwargs), note_memory)
        if overwrites is not None:
            del reads[overwrites]
        with self.lock:
            if self._number % _SWEPT_EVERY == _SWEPT_EVERY - 1:
                self.sweep()
            operation = Operation(
                number=self._number,
                function=function,
                args=args,
                kwargs=kwargs,
                results=tuple(results),
                reads=tuple(reads),
                random=random,
                settings=settings_now(),
                overwrites=overwrites,
            )
            self._number += 1
            if overwrites is not None:
                overwrites.digest = b""  # what was there before does not matter
            digest = operation.digest()
            for number, view in enumerate([*written, *results]):
                if view is not None:
                    memory = view.memory
                    memory.digest = hashlib.blake2b(
                        memory.digest + digest + bytes([number % 256]), digest_size=16
                    ).digest()
                    if not memory.writes or memory.writes[-1] is not operation:
                        memory.writes.append(operation)

    def contents(self, views: Sequence[View], *, are_written: bool = False) -> list[torch.Tensor]:
        """Returns what some tensors would hold now: copies; those of the same memory share it.

        Args:
            views: The tensors.
            are_written: Whether the copies are written to.
        """
        with self.lock:
            storages = self._replay.contents(list(dict.fromkeys(view.memory for view in views)), self._number)
            with without_any_mode(), torch.no_grad():
                if are_written:
                    storages = {memory: storage.clone() for memory, storage in storages.items()}
                return [view.on(storages[view.memory]) for view in views]

    def fill(self, memory: Memory, *, with_sources: bool = False) -> None:
        """Let memory hold what it should; from now on it is as any other.

        Args:
            memory: That has not been filled.
            with_sources: Whether to fill what it is computed from, and with, too: autograd may have kept that.
        """
        with self.lock:
            todo = [memory]
            while todo:
                memory = todo.pop()
                if self._memories.pop(memory.key, None) is None:
                    continue
                self._replay.fill(memory, self._number)
                memory.storage = None
                if with_sources:
                    todo += [each for write in memory.writes for each in write.memories]

    def sweep(self) -> None:
        """Forget memory that no tensor of the program uses any more."""
        with self.lock:
            for key, memory in list(self._memories.items()):
                if num_users_of(key) <= 1:
                    del self._memories[key]
                    memory.storage = None

    def end(self) -> None:
        """The program leaves a constructor: free what only construction needs."""
        with self.lock:
            self.draws.forget_scratch()
            self._replay.forget()
            self.sweep()


def _copied(item: Any) -> Any:
    """Returns a copy of data that the program may write to before the operation is done."""
    if not isinstance(item, torch.Tensor):
        return item
    with without_any_mode(), torch.no_grad():
        storage = item.untyped_storage().clone()  # a copy of the tensor alone could have other strides
        return tensor_on(storage, item.dtype, item.shape, item.stride(), int(item.storage_offset()))


CONSTRUCTION = Construction()
"""Of this process."""
