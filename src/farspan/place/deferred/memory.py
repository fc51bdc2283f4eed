"""Memory that has not been filled: who has it, and the operations that would have written into it.

weight = nn.Parameter(torch.empty(4096, 4096))     Memory, its storage not touched: takes no physical memory
nn.init.normal_(weight)                            Operation normal_(View of it), with the generator's state
weight.data[0].zero_()                             Operation zero_(View of a part of it)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from farspan.torch_private import Settings, key_of_storage, tensor_on

__all__ = ["Memory", "Operation", "RandomState", "View", "mapped", "new_storage"]


class Memory:
    """Memory that tensors of the program use, and that holds nothing yet."""

    __slots__ = ("digest", "key", "size_bytes", "storage", "writes")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        """None once no tensor of the program uses it: later operations may still read what was in it."""
        self.key = key_of_storage(storage)
        self.size_bytes: int = storage.nbytes()
        self.writes: list[Operation] = []
        """In the program's order."""
        self.digest = b""
        """Equal where all that was written into it is."""

    def writes_before(self, number: int) -> Iterator[Operation]:
        """Yields the writes that come before an operation, the latest first, as far as they matter."""
        for operation in reversed(self.writes):
            if operation.number < number:
                yield operation
                if operation.overwrites is self:
                    return


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor in memory that has not been filled."""

    memory: Memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def is_whole(self) -> bool:
        """Returns whether it is all of its memory, each element once."""
        expected = 1
        for size, step in sorted(zip(self.shape, self.stride, strict=True), key=lambda pair: (pair[1], pair[0])):
            if size != 1 and step != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == self.memory.size_bytes

    def on(self, storage: Any) -> torch.Tensor:
        """Returns the same tensor on other memory of the same size."""
        return tensor_on(storage, self.dtype, self.shape, self.stride, self.offset)

    def __repr__(self) -> str:
        return f"{self.memory.digest.hex()}{self.dtype}{self.shape}{self.stride}{self.offset}"


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state that an operation draws from.

    Attributes:
        state: Of the generator before it.
        generator: The one that the program has given; None for torch's own.
    """

    state: torch.Tensor
    generator: torch.Generator | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation:
    """An operation that has not been done.

    Attributes:
        number: In the order of the program.
        function: What to call.
        args: With a `View` for each tensor in memory that has not been filled, and copies of others.
        kwargs: The same.
        results: Where what it returns goes, if that is new.
        reads: All memory that it reads, or writes only in part.
        random: What it draws from.
        settings: What its kernel chooses by, as it was at that time.
        overwrites: Memory of which nothing is left that was there before.
    """

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    reads: tuple[Memory, ...]
    random: RandomState | None
    settings: Settings
    overwrites: Memory | None

    @property
    def memories(self) -> set[Memory]:
        """Returns all memories that it reads or writes."""
        written = {view.memory for view in self.results if view is not None}
        return {*self.reads, *written} | ({self.overwrites} if self.overwrites is not None else set())

    def digest(self) -> bytes:
        """Equal for operations that give the same."""
        words = (
            str(self.function),
            self.args,
            self.kwargs,
            [view and (view.shape, view.stride) for view in self.results],
        )
        text = repr(mapped(words, _shown))
        state = b"" if self.random is None else self.random.state.numpy().tobytes()
        return hashlib.blake2b(text.encode() + state, digest_size=16).digest()


def _shown(item: Any) -> Any:
    """Returns what represents an argument in a digest."""
    if isinstance(item, torch.Tensor):
        data = item.detach().contiguous().flatten().view(torch.uint8)
        return f"{item.dtype}{tuple(item.shape)}{hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()}"
    return "generator" if isinstance(item, torch.Generator) else item


def mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments, at any depth of lists, tuples and dictionaries, with each put through `change`."""
    if type(item) in (tuple, list):
        return type(item)(mapped(each, change) for each in item)
    if type(item) is dict:
        return {name: mapped(each, change) for name, each in item.items()}
    return change(item)


def new_storage(size_bytes: int) -> Any:
    """Memory of this process."""
    return torch.UntypedStorage(size_bytes)
