"""Computing deferred calls on this rank, of values that other ranks have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.modes import apply_modes
from farspan.call.pytree.template import flatten, rebuild
from farspan.call.wire.users_line import note_line
from farspan.devices import device_here
from farspan.graph import Value
from farspan.record.deferred.deferred_call import MOST_BYTES, DeferredCall, is_local, sources_of, viewed_by
from farspan.record.unrecorded import plainly
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.record.recording import Recording

__all__ = ["Computing"]


class Computing:
    """Computes deferred calls, and keeps what it has fetched for them for a while."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._fetched: weakref.WeakKeyDictionary[Value, torch.Tensor] = weakref.WeakKeyDictionary()

    def can_compute(self, value: Any) -> bool:
        """Returns whether it is the result of a deferred call that has not been run by its owner."""
        call = value.call if isinstance(value, Value) else None
        if type(call) is not DeferredCall or (call.is_outdated and call.results is None):
            return False
        return is_local(value)

    def compute(self, last: Any) -> Any:
        """Returns the results of a call."""
        todo = [last]
        while todo:
            call = todo[-1]
            if call.results is not None:
                todo.pop()
                continue
            try:
                call.results = self._parts(call)
            except Exception as error:
                note_line(error, call)
                raise
            if call.results is not None:
                continue
            needed = [item.call for item in call.arguments if self.can_compute(item) and item.call.results is None]
            if needed:
                todo += needed
                continue
            try:
                call.results = self._results(call)
            except Exception as error:
                note_line(error, call)
                raise
        return last.results

    def compute_all(self, calls: Sequence[DeferredCall]) -> None:
        """Compute several calls, with one request to each rank that has something of what they take."""
        sources = dict.fromkeys(value for call in calls for value in sources_of(call, is_to_compute=True))
        far = [value for value in sources if value.data is None and value.ticket is None and value not in self._fetched]
        with DisableTorchFunction():
            fetched = self.recorder.engine.fetch([each for each in far if each.meta.size_bytes <= MOST_BYTES])
            for value, data in fetched.items():
                self._keep(value, data)
        for call in calls:
            self.compute(call)

    def forget(self) -> None:
        """Drop the fetched data: a step is about to run, which may change them at their owners."""
        self._fetched.clear()

    def _results(self, call: DeferredCall) -> list[torch.Tensor]:
        tensors = [self._data_of(item) for item in call.arguments or ()]
        args, kwargs = rebuild(call.template, tensors)
        with plainly(self.recorder), apply_modes(call.modes), torch.no_grad():
            results = flatten(call.target(*args, **kwargs))[1]
        return [item.clone() if any(item is each for each in tensors) else item for item in results]

    def _data_of(self, item: Any) -> torch.Tensor:
        if not isinstance(item, Value):
            return item
        if self.can_compute(item):
            return item.call.results[item.index]  # type: ignore[union-attr]
        known = self._fetched.get(item)
        if known is not None:
            return known
        with DisableTorchFunction():  # it is no use of the program's
            return self._keep(item, self.recorder.engine.read(item))

    def _keep(self, value: Value, data: torch.Tensor) -> torch.Tensor:
        """Keep what was fetched, laid out as the program's tensor; expanded dimensions share their memory there."""
        meta = value.meta
        kept = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device_here(meta.device))
        once = [slice(0, 1) if stride == 0 else slice(None) for stride in meta.stride]
        kept[tuple(once)].copy_(data[tuple(once)])
        self._fetched[value] = kept
        return kept

    def _parts(self, last: DeferredCall) -> list[torch.Tensor] | None:
        """Returns what the program has taken a view of, for a large value that another rank has; None for all else."""
        links: list[tuple[DeferredCall, int]] = []
        call, index, source = last, 0, None
        while (viewed := viewed_by(call)) is not None:
            links.append((call, index))
            source: Any = viewed
            if not self.can_compute(source):
                break
            if source.call.results is not None:
                return None
            call, index = source.call, source.index
        if source is None or source.meta.size_bytes <= MOST_BYTES or source.data is not None:
            return None
        meta = source.meta
        view = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        views: list[torch.Tensor] = []
        with plainly(self.recorder), torch.no_grad():
            for call, index in reversed(links):
                args, kwargs = rebuild(call.template, [view])
                views = flatten(call.target(*args, **kwargs))[1]
                view = views[index]
        if any(each.dtype != meta.dtype or each.is_conj() or each.is_neg() for each in (*views, view)):
            return None  # its sizes and strides count other elements than those of the source
        engine, device = self.recorder.engine, device_here(meta.device)
        return [engine.read(source, (each.size(), each.stride(), each.storage_offset())).to(device) for each in views]
