"""Does what was deferred: only what the wanted memory depends on, in the program's order, each with its own numbers.

wanted: head.weight      normal_(head.weight)         the latest write that leaves nothing of what was before
                         head.weight.mul_(scale)      and what follows; whatever these read likewise
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from farspan.place.deferred.draws import drawing_from
from farspan.place.deferred.memory import Memory, Operation, View, mapped, new_storage
from farspan.torch_private import alone, form_of, num_users_of

__all__ = ["Replay"]

_MOST_KEPT_BYTES = 32 << 20


class Replay:
    """Gives what memory would hold. Memory that was read lately is kept, as far as it is small."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Memory, tuple[Any, int]] = OrderedDict()
        """What was computed last, and before which operation."""

    def forget(self) -> None:
        """Free what is kept."""
        self._kept.clear()

    def contents(self, memories: Sequence[Memory], number: int) -> dict[Memory, Any]:
        """Returns what some memory holds before an operation, in storages that nobody else uses, or writes to."""
        storages = dict.fromkeys(memories)
        needed = self._needed(memories, number, {key: at for key, (_, at) in self._kept.items()})
        if needed is None:
            self.forget()
            needed = self._needed(memories, number, {})
            assert needed is not None
        operations, read_at = needed
        known = {memory: kept[0] for memory, kept in self._kept.items() if memory in read_at}
        for memory in known:
            del self._kept[memory]
        found = _run(operations, known, {*storages, *(m for m in read_at if _is_small(m) and _is_used(m))})
        for memory, storage in found.items():
            self._keep(memory, storage, read_at[memory])
        return {memory: found[memory] for memory in memories}

    def fill(self, memory: Memory, number: int) -> None:
        """Let memory that the program uses hold what it would hold before an operation."""
        needed = self._needed([memory], number, {})
        assert needed is not None
        _run(needed[0], {memory: memory.storage}, {memory})

    def _keep(self, memory: Memory, storage: Any, number: int) -> None:
        if _is_small(memory) and _is_used(memory):
            self._kept[memory] = (storage, number)
            while sum(each.size_bytes for each in self._kept) > _MOST_KEPT_BYTES:
                self._kept.popitem(last=False)

    def _needed(
        self, memories: Sequence[Memory], number: int, known: Mapping[Memory, int]
    ) -> tuple[list[Operation], dict[Memory, int]] | None:
        """The operations that some memory depends on, and before which operation each memory is read last.

        Returns:
            None where something known would be read, or written, as it was before.
        """
        operations: dict[int, Operation] = {}
        read_at: dict[Memory, int] = {}
        followed: set[tuple[Memory, int]] = set()
        todo = [(memory, number) for memory in memories]
        while todo:
            memory, before = todo.pop()
            read_at[memory] = max(before, read_at.get(memory, -1))
            since = known.get(memory, -1)
            for operation in memory.writes_before(before):
                if operation.number < since or (memory, operation.number) in followed:
                    break
                followed.add((memory, operation.number))
                if operation.number not in operations:
                    if any(known.get(each, -1) > operation.number for each in operation.memories):
                        return None
                    operations[operation.number] = operation
                    todo += [(each, operation.number) for each in operation.reads]
        return [operations[each] for each in sorted(operations)], read_at


def _is_small(memory: Memory) -> bool:
    return memory.size_bytes <= _MOST_KEPT_BYTES // 2


def _is_used(memory: Memory) -> bool:
    return memory.storage is not None and num_users_of(memory.key) > 1


def _run(operations: Sequence[Operation], known: Mapping[Memory, Any], wanted: set[Memory]) -> dict[Memory, Any]:
    """Returns what `wanted` holds after some operations; all else is freed when it is used last."""
    storages = dict(known)
    last: dict[Memory, int] = {}
    for operation in operations:
        for memory in operation.memories:
            last[memory] = operation.number
    with alone():
        for operation in operations:
            operation.settings.put()
            _do(operation, storages)
            for memory in operation.memories:
                if last[memory] == operation.number and memory not in wanted:
                    storages.pop(memory, None)
        return {memory: _storage(memory, storages) for memory in wanted if memory in storages or memory not in last}


def _do(operation: Operation, storages: dict[Memory, Any]) -> None:
    def real(item: Any) -> Any:
        return item.on(_storage(item.memory, storages)) if type(item) is View else item

    args, kwargs = mapped(operation.args, real), mapped(operation.kwargs, real)
    takes_generator = operation.random is not None and form_of(operation.function).takes_generator
    draws = drawing_from(operation.random, kwargs, takes_generator=takes_generator)
    with draws as kwargs:
        result = operation.function(*args, **kwargs)
    if not operation.results:
        return
    for view, item in zip(operation.results, result if type(result) in (tuple, list) else [result], strict=True):
        if view is None:
            continue
        storage = item.untyped_storage()
        is_alike = item.stride() == view.stride and item.storage_offset() == view.offset == 0 and storage.resizable()
        if view.memory not in storages and is_alike and storage.nbytes() == view.memory.size_bytes:
            storages[view.memory] = storage
        else:
            view.on(_storage(view.memory, storages)).copy_(item)


def _storage(memory: Memory, storages: dict[Memory, Any]) -> Any:
    if memory not in storages:
        storages[memory] = new_storage(memory.size_bytes)
    return storages[memory]
