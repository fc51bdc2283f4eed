"""`state_dict()` is alive: its tensors are the parameters. Where another rank owns them they are copies of that memory,
brought up to date when they are next used.

    sd = model.state_dict()          owner: the parameter's memory       elsewhere: a copy
    optimizer.step()                        changed                                 stale
    sd["head.weight"].sum()                                                         fetched, then summed

So is a part of a plain tensor to which the program has set a parameter's data: `p.data = flat[:3]`; and what the
program or a module has had of a parameter's memory since before `distribute`: `w = p.data`, the `weight` of the old
spectral_norm. A parameter that gets other memory (`p.data = v`) leaves them behind: they are copies of its old memory
then, wherever that goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from farspan.call.naming import PASS_THROUGH
from farspan.graph import Meta
from farspan.record.memory.twins import members, put_value
from farspan.record.ops.views import retake
from farspan.record.parameters.away import AwayParameter
from farspan.record.saving.reserved import reserved_memory
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction, is_wrapped, storage_at

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.graph import Value
    from farspan.record.recording import Recording

__all__ = ["Copies", "plain_in", "what_is_written"]

_T: Any = torch.Tensor
_NEEDS_NO_DATA = PASS_THROUGH - {_T.__reduce_ex__, _T.__repr__, _T.__format__}
_ALIASES = frozenset([_T.detach, _T.untyped_storage, _T.view, _T.view_as, _T.permute, _T.transpose, _T.t])
"""Functions whose result lies in the memory of their first argument, and read nothing of it; attributes are too."""
_ALIASES_OF_PLAIN = frozenset([_T.contiguous, _T.cpu])
"""The same, of a tensor without gaps on the CPU."""


_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(slots=True, eq=False)
class _Copy:
    placed: Placed
    storage: StorageWeakRef
    """A reference to the memory. Until it is released, the address of the memory is not used again."""
    epoch: int
    """The epoch in which it was up to date."""
    offset: int = 0
    """Which element of the memory is its first one."""
    stride: tuple[int, ...] | None = None
    """How it lies there; None for as the parameter lies in memory of its own."""
    old: torch.Tensor | None = None
    """What stands for the parameter's old memory, where this is a copy of that."""
    value: Value | None = None
    """What was in the old memory when it was up to date."""


class Copies:
    """The copies in state dictionaries that this rank's program holds."""

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self.by_storage: dict[int, list[_Copy]] = {}
        """The copies in each memory; empty while the program holds none."""
        self.of_gradients: dict[int, Any] = {}
        """Memory of plain tensors, of which gradients are parts (`memory.of_gradients`)."""
        self.epoch = 0
        """Counts the moments at which parameters may have changed."""
        self._pruned = 0

    def add(self, tensor: torch.Tensor, placed: Placed) -> None:
        """The program gets `tensor`, which is the parameter or a copy of it as it is now."""
        storage = tensor.untyped_storage()
        known = self.by_storage.get(storage._cdata, ())
        if not any(copy.placed is placed and copy.old is None and not copy.storage.expired() for copy in known):
            self.by_storage[storage._cdata] = [_Copy(placed, StorageWeakRef(storage), self.epoch)]

    def add_part(self, part: torch.Tensor, placed: Placed, *, is_known: bool = True) -> None:
        """A parameter's data are a part of other memory, which the program may use by other names.

        Args:
            part: As it lies there.
            placed: The parameter.
            is_known: Whether every rank has there what its owner has.
        """
        storage = part.untyped_storage()
        epoch = self.epoch if is_known else -1
        copy = _Copy(placed, StorageWeakRef(storage), epoch, int(part.storage_offset()), part.stride())
        self.by_storage.setdefault(storage._cdata, []).append(copy)

    def memory_of(self, placed: Placed) -> torch.Tensor | None:
        """Returns the parameter in the memory of a copy that the program holds, as another name of it; None where it
        holds none."""
        for copies in self.by_storage.values():
            for copy in copies:
                if copy.placed is placed and copy.old is None and not copy.storage.expired():
                    storage = storage_at(copy.storage.cdata)
                    reserved = reserved_memory.get(storage._cdata)
                    if reserved is None or reserved.is_filled:
                        self._refresh(copy, storage)
                    return _in_memory(copy, storage, placed.meta)
        return None

    def take_memory(self, old: LazyTensor) -> torch.Tensor | None:
        """Returns the memory of a copy of a parameter's old memory, as that is now, and forgets such copies: what
        stands for it is to become that plain memory. None where there is no copy."""
        found: torch.Tensor | None = None
        for key, copies in list(self.by_storage.items()):
            for copy in [copy for copy in copies if copy.old is old]:
                if not copy.storage.expired():
                    storage = storage_at(copy.storage.cdata)
                    self._refresh(copy, storage)
                    found = _in_memory(copy, storage, old)
                copies.remove(copy)
            if not copies:
                del self.by_storage[key]
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` lies in the memory of a placed parameter, or in a copy of it."""
        return bool(self._of(tensor))

    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Brings up to date what a function that is about to run uses.

        Returns:
            Whether it writes into a parameter.
        """
        if function in _NEEDS_NO_DATA or _is_alias(function, args, kwargs):
            return False
        self.fill(function, args, kwargs)
        if self.of_gradients:
            self._recorder.gradients.memory.before(function, args, kwargs, what_is_written(function, args, kwargs))
        if self._recorder.transfer is not None:
            return False
        self._prune()
        used = [tensor for tensor in plain_in((args, kwargs)) if self._of(tensor)]
        if not used:
            return False
        recorder, reason = self._recorder, "a tensor of a state dictionary is written"
        changed = list(plain_in(what_is_written(function, args, kwargs)))
        written = [(copy, tensor.untyped_storage()) for tensor in changed for copy in self._of(tensor)]
        is_written = bool(written)
        if is_written and recorder.has_pending():
            recorder.engine.flush(reason)
        of_parameters = [copy.placed for copy, _ in written if copy.old is None]
        for placed in of_parameters:
            recorder.splitting.matrices.owned.need_whole(placed, "is written")
            recorder.splitting.matrices.owned.note_written([placed.name])
        self.refresh(used)
        for copy, storage in written:
            _keep_value(copy.value, storage)
        if is_written:
            recorder.engine.barrier(reason)  # until now the others may have needed it as it was
            recorder.engine.groups.begin_write(reason, [placed.name for placed in of_parameters])
        return is_written

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function has written into parameters, at their owners and into the copies. Of what was in slices when the
        program got it, the owner has a copy, too."""
        if _has_recorded((args, kwargs)):
            self._recorder.engine.barrier("a tensor of a state dictionary has been written")  # others may still fetch
        self._recorder.engine.parameters_changed()
        for tensor in plain_in((args, kwargs)):
            for copy in self._of(tensor):
                copy.epoch = self.epoch
                self._put_back(copy, tensor.untyped_storage())
        self._recorder.engine.groups.end_write()

    def _put_back(self, copy: _Copy, storage: Any) -> None:
        if copy.old is not None:
            self._write_old(copy, storage)
            return
        own = copy.placed.tensor
        if type(own) is AwayParameter:  # it is written where it is
            return
        if copy.placed.is_owned and own.untyped_storage()._cdata != storage._cdata:
            with torch.no_grad(), DisableTorchFunction():
                own.copy_(_in_memory(copy, storage, own))

    def fill(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function is about to run: what it uses of memory that has only been reserved is filled."""
        if not reserved_memory or function in _NEEDS_NO_DATA or _is_alias(function, args, kwargs):
            return
        for tensor in plain_in((args, kwargs)):
            if tensor.layout is torch.strided and not is_wrapped(tensor):
                reserved = reserved_memory.get(tensor.untyped_storage()._cdata)
                if reserved is not None and not reserved.is_filled:
                    reserved.fill()

    def refresh(self, used: Any) -> None:
        """Bring what is about to be used up to date."""
        for tensor in plain_in(used) if self.by_storage else ():
            for copy in self._of(tensor):
                self._refresh(copy, tensor.untyped_storage())

    def leave(self, placed: Placed) -> list[_Copy]:
        """A parameter is about to get other memory; returns its copies, as they are before that."""
        known = [copy for copies in self.by_storage.values() for copy in copies if not copy.storage.expired()]
        left = [copy for copy in known if copy.placed is placed and copy.old is None]
        for copy in left:
            self._refresh(copy, storage_at(copy.storage.cdata))
        return left

    def stay_with(self, left: Sequence[_Copy], old: LazyTensor) -> None:
        """The parameter has got other memory: these copies are of the one that it had, for which `old` stands now."""
        for copy in left:
            copy.old, copy.value = old, old._value

    def come_with(self, old: LazyTensor, placed: Placed) -> None:
        """Memory that a parameter had before is that of `placed` from now on, and so are the copies of it."""
        for copies in self.by_storage.values():
            for copy in copies:
                if copy.old is old:
                    copy.placed, copy.old, copy.value, copy.epoch = placed, None, None, -1

    def _refresh(self, copy: _Copy, storage: Any) -> None:
        if copy.old is not None:
            self._refresh_old(copy, storage)
            return
        reserved, placed = reserved_memory.get(storage._cdata), copy.placed
        if placed.is_written and not placed.is_parameter:  # batch statistics, which each forward changes
            self._recorder.before_read(placed.tensor)
        elif copy.epoch == self.epoch and (reserved is None or reserved.is_filled):
            return
        copy.epoch = self.epoch
        if reserved is not None:
            reserved.fill()
            return
        if placed.is_owned and placed.tensor.untyped_storage()._cdata == storage._cdata:
            return
        data = self._recorder.engine.read_parameter(placed)
        with torch.no_grad(), DisableTorchFunction():  # this is no write of the program's
            _in_memory(copy, storage, data).copy_(data)

    def _refresh_old(self, copy: _Copy, storage: Any) -> None:
        old = copy.old
        if type(old) is LazyTensor and (copy.epoch != self.epoch or copy.value is not old._value):
            before, copy.epoch, copy.value = copy.value, self.epoch, old._value
            data = old.read()
            if data.untyped_storage()._cdata != storage._cdata:
                _keep_value(before, storage)
                with torch.no_grad(), DisableTorchFunction():
                    _in_memory(copy, storage, data).copy_(data)

    def _write_old(self, copy: _Copy, storage: Any) -> None:
        """What has been written into a copy of a parameter's old memory is in all that is that memory."""
        old, recorder = copy.old, self._recorder
        if type(old) is not LazyTensor:
            return
        value = old._value
        data = _in_memory(copy, storage, old) if recorder.engine.is_mine(value) else None
        (copy.value,) = recorder.engine.new_sources([(value.meta, value.stage, data)])
        put_value(old, copy.value)
        for member in members(old):
            retake(recorder, member)

    def _of(self, tensor: torch.Tensor) -> Sequence[_Copy]:
        if id(tensor) in self._recorder.placed or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return ()
        return () if is_wrapped(tensor) else self.by_storage.get(tensor.untyped_storage()._cdata, ())

    def _prune(self) -> None:
        if self._pruned != self.epoch:
            self._pruned = self.epoch
            for key in [key for key, copies in self.by_storage.items() if copies[0].storage.expired()]:
                del self.by_storage[key]


def _keep_value(value: Value | None, storage: Any) -> None:
    """Memory is about to be written: what uses the value that is there, if it is a parameter's old one, is still to
    find that."""
    if value is not None and value.data is not None and value.data.untyped_storage()._cdata == storage._cdata:
        value.data = value.data.clone()


def _in_memory(copy: _Copy, storage: Any, like: torch.Tensor | Meta) -> torch.Tensor:
    """Returns a copy as it lies in its memory."""
    own = like.stride if isinstance(like, Meta) else like.stride()
    stride = own if copy.stride is None else copy.stride
    return torch.empty(0, dtype=like.dtype).set_(storage, copy.offset, like.shape, stride)


def _is_alias(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a function of reserved memory that is not filled reads none of it, and gives a tensor there."""
    is_view = function in _ALIASES or getattr(function, "__name__", "") == "__get__"
    if not reserved_memory or not (is_view or function in _ALIASES_OF_PLAIN):
        return False
    tensor = args[0]
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or is_wrapped(tensor):
        return False
    reserved = reserved_memory.get(tensor.untyped_storage()._cdata)
    if reserved is None or reserved.is_filled:
        return False
    return is_view or (len(args) == 1 and not kwargs and tensor.is_contiguous())


def plain_in(item: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors among arguments, at any depth."""
    if type(item) in _PLAIN:
        yield item
    elif isinstance(item, (list, tuple)):
        for each in item:
            yield from plain_in(each)
    elif isinstance(item, dict):
        yield from plain_in(list(item.values()))


def _has_recorded(item: Any) -> bool:
    """Returns whether there are recorded tensors among arguments, at any depth."""
    if isinstance(item, dict):
        item = list(item.values())
    return any(map(_has_recorded, item)) if isinstance(item, (list, tuple)) else type(item) is LazyTensor


def what_is_written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a torch function writes into, by torch's rules for names."""
    name = getattr(function, "__name__", "")
    is_in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return [args[:1] if is_in_place else None, kwargs.get("out")]
