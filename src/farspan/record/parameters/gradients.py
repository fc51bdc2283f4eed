"""`param.grad` outside the optimizer: the same answer on every rank, with recorded values.

A gradient that the program has kept, and a view of one, are brought up to date before they are used:

    g = p.grad; row = g[0]
    loss.backward()              adds to the memory of both
    row.sum()                    the backward runs first, and the groups average

A sparse gradient is not recorded: every rank has a plain tensor, its owner the gradient itself and the others a copy.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.call.pytree.template import flatten_arguments
from farspan.graph import Meta, Value
from farspan.record.across_ranks.prefetch import Reads
from farspan.record.memory.of_gradients.gradient_memory import GradientMemory, Way, become_gradient, is_copied, way_of
from farspan.record.memory.twins import put_value
from farspan.record.ops.views import read_view, refresh
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunction, raw_grad

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from farspan.call.leaf import Placed
    from farspan.record.recording import Recording

__all__ = ["Gradients"]


class Gradients:
    """The gradients of all placed parameters, as the user's program sees them."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self._views: dict[str, LazyTensor] = {}
        """One tensor for each gradient, so that a write through it shows when it is read again."""
        self._kept: dict[str, weakref.ref[LazyTensor]] = {}
        """The tensors that the program has got before the latest backward, if it still has them."""
        self._sparse: dict[str, torch.Tensor] = {}
        """Copies of sparse gradients of other ranks."""
        self.memory = GradientMemory(recorder)
        self._reads = Reads(self.get, recorder.placed.values)

    def get(self, placed: Placed) -> torch.Tensor | None:
        """Run the backwards that wait, and return the gradient; None where there is none."""
        engine = self.recorder.engine
        has_passed_barrier = self.recorder.num_pending_backwards > 0
        if has_passed_barrier:
            engine.flush(f"{placed.name}.grad", ends_window=True)
        self.recorder.hooks.commit()
        engine.average_gradients(has_passed_barrier=has_passed_barrier)
        self.recorder.hooks.check_read(placed)
        view = self._views.get(placed.name)
        if view is None:
            if not engine.has_gradient(placed):
                return None
            owned = self.recorder.splitting.matrices.owned
            if (slices := owned.slices.get(placed.name)) is not None:
                kept = self._kept.pop(placed.name, None)
                known = None if kept is None else kept()
                view = owned.gradient_of(self.recorder, placed, [self.get(each) for each in slices], known)
            elif engine.has_sparse_gradient(placed):
                return self._get_sparse(placed)
            else:
                view = self._show(placed)
            self._views[placed.name] = view
        if self.memory.pairs:
            self.memory.bring([placed])
        return view

    def is_kept(self, placed: Placed) -> bool:
        """Returns whether the program still has a tensor that it has got before the latest backward."""
        kept = self._kept.get(placed.name)
        return kept is not None and kept() is not None

    def in_slices(self) -> list[Any]:
        """Returns the gradients of all parameters in slices that have one."""
        names = self.recorder.splitting.matrices.owned.slices
        gradients = [self.get(placed) for placed in self.recorder.placed.values() if placed.name in names]
        return [gradient for gradient in gradients if gradient is not None]

    def is_held(self, placed: Placed) -> bool:
        """Returns whether the program has a gradient that it may look at again, or has taken views of it."""
        view = self._views.get(placed.name)
        kept = self._kept.get(placed.name)
        return view is not None or (kept is not None and kept() is not None)

    def take_up(self, names: Iterable[str]) -> None:
        """Let the gradients in slices that the program has kept over a backward be known as the present ones."""
        for name in names:
            if (kept := self._kept.get(name)) is not None and kept() is not None:
                self.get(self.recorder.engine.parameters[name])

    def renew(self, items: Mapping[str, Placed]) -> None:
        """Parameters have come to this rank, which were another one's, with their gradients."""
        for name in [name for name in self._views if name in items]:
            self._views[name]._value.data = raw_grad(items[name].tensor)

    def come_home(self, names: Iterable[str]) -> None:
        """Let the gradients in slices that the program has got be those of whole parameters, which are here."""
        owned = self.recorder.splitting.matrices.owned
        for name in names:
            view = self._views.pop(name, None)
            for each in owned.slices[name]:
                self._views.pop(each.name, None)
            if view is not None:
                vars(view)["_home"] = self._views[name] = self._show(self.recorder.engine.parameters[name])

    def _show(self, placed: Placed) -> LazyTensor:
        """Returns the tensor for a gradient as it is now: the one that the program has already, if it has."""
        meta = placed.meta
        value = Value(intern(Meta(meta.shape, meta.stride, meta.dtype, meta.device, False)), placed.stage)
        kept = self._kept.pop(placed.name, None)
        known = None if kept is None else kept()
        is_same = known is not None and known._is_gradient and self.recorder.engine.is_present_gradient(known._value)
        self.recorder.engine.show_gradient(placed, value)
        if known is not None and is_same:
            put_value(known, value)
            return known
        view = LazyTensor.make(value, self.recorder)
        view._is_gradient = True
        return view

    def refresh(self, kept: LazyTensor) -> None:
        """Let a gradient that the program has kept be what has been made of it by now."""
        if self.recorder.hooks.are_running:
            return
        engine, name = self.recorder.engine, kept._value.gradient_of
        if not engine.is_present_gradient(kept._value):
            return
        if self._is_waiting() or name not in self._views:
            self.get(engine.parameters[name])
        elif self.memory.pairs:
            self.memory.bring([engine.parameters[name]])

    def _get_sparse(self, placed: Placed) -> torch.Tensor:
        copy = self._sparse.get(placed.name)
        if copy is None:
            copy = self.recorder.engine.sparse_gradient(placed)
            if not placed.is_owned:
                self._sparse[placed.name] = copy
        return copy

    def set(self, placed: Placed, gradient: Any) -> None:
        """`param.grad = gradient`."""
        recorder, owned = self.recorder, self.recorder.splitting.matrices.owned
        recorder.hooks.commit()
        if placed.name in owned.slices:
            if gradient is None:
                self._clear_slices(placed)
                return
            if gradient is self.get(placed):
                return
            owned.come_home(f"{placed.name}.grad is set")
        gradient = owned.whole_gradient(gradient)
        _check_like(placed, gradient)
        recorder.deferred.record_one(gradient)
        way = way_of(recorder, placed, gradient)
        moved = gradient
        if type(gradient) is LazyTensor and is_copied(gradient, placed, way):
            template, tensors = flatten_arguments((gradient,), {})  # sent to where the parameter is
            moved = recorder.record(torch.clone, template, tensors, placed.stage, given=((gradient,), {}))
        if recorder.num_pending_backwards or (gradient is not None and recorder.has_pending()):
            recorder.engine.flush(f"{placed.name}.grad = ...")
        view = self._views.pop(placed.name, None)
        if view is not None and gradient is view:
            self._views[placed.name] = view
            return
        self.memory.release(placed.name)
        self._note_sparse(placed, gradient)
        if type(gradient) is torch.Tensor and way is not Way.ALONE:
            moved = gradient.detach() if way is Way.ITSELF else gradient.detach().clone()
        recorder.engine.set_gradient(placed, moved._value if type(moved) is LazyTensor else moved)
        if gradient is not None:
            recorder.engine.groups.touch(placed)
        if way is Way.ITSELF:
            self._views[placed.name] = become_gradient(recorder, placed, gradient)
        elif way is Way.PART and gradient is not None:
            self._views[placed.name] = view = self._show(placed)
            self.memory.add(placed, view, gradient)

    def _clear_slices(self, placed: Placed) -> None:
        """`param.grad = None` for a parameter in slices."""
        if self.recorder.num_pending_backwards:
            self.recorder.engine.flush(f"{placed.name}.grad = ...")
        self.recorder.engine.clear_gradients([placed])
        self._forget_views([placed])

    def clear(self, items: Sequence[Placed]) -> bool:
        """`param.grad = None` for each of several parameters that has one; False where each is to be seen by itself."""
        recorder = self.recorder
        if recorder.hooks.are_there or recorder.hooks.are_running or recorder.num_pending_backwards:
            return False
        recorder.hooks.commit()
        recorder.engine.average_gradients(has_passed_barrier=False)
        recorder.engine.clear_gradients(items)
        self._forget_views(items)
        return True

    def _forget_views(self, items: Sequence[Placed]) -> None:
        owned = self.recorder.splitting.matrices.owned
        for item in [*items, *owned.spread(items)] if owned.slices else items:
            if self.memory.pairs:
                self.memory.release(item.name)
            self._views.pop(item.name, None)
            self._sparse.pop(item.name, None)

    def accumulate(self, placed: Placed, gradient: Any) -> None:
        """Add `gradient` to `param.grad` as autograd does."""
        self.recorder.splitting.matrices.owned.need_whole(placed, "gets gradient as a whole")
        self._keep(placed.name)
        self.recorder.engine.accumulate(placed, gradient._value.data if type(gradient) is LazyTensor else gradient)

    def put(self, placed: Placed, gradient: torch.Tensor | None, *, is_owners: bool) -> None:
        """`param.grad = gradient` in an optimizer's step, where nothing waits to be run; `is_owners`: others only know
        of the gradient."""
        self._views.pop(placed.name, None)
        self.memory.release(placed.name)
        gradient = self.recorder.deferred.computed(gradient)
        self._note_sparse(placed, gradient)
        value = gradient._value if type(gradient) is LazyTensor else gradient
        self.recorder.engine.set_gradient(placed, value, is_owners=is_owners)

    def _note_sparse(self, placed: Placed, gradient: torch.Tensor | None) -> None:
        """The program sets a gradient: a sparse one is the same tensor on every rank, as it is."""
        self._sparse.pop(placed.name, None)
        if type(gradient) is torch.Tensor and gradient.layout is not torch.strided and not placed.is_owned:
            self._sparse[placed.name] = gradient

    def read(self, lazy: LazyTensor) -> torch.Tensor:
        """Returns the data of a recorded tensor. One that is made of a parameter's gradient alone is likely to be read
        of other parameters too, and so computed together with theirs.
        """
        if lazy.may_be_old:
            data = read_view(self.recorder, lazy)
            if data is not None:
                return data
            refresh(self.recorder, lazy)
        value = lazy._value
        is_alone = value.meta.numel > 1 or self._is_waiting()  # other gradients are about to change
        known = self._reads.foresee(value) if value.pending and not is_alone else None
        return self.recorder.engine.read(value if known is None else known)

    def end_step(self) -> None:
        """An optimizer has stepped, or calls its closure."""
        self.forget()
        if self.memory.pairs:
            self.memory.end_step()

    def forget(self) -> None:
        """The gradients are other tensors now: a backward or an optimizer step has run."""
        for name in list(self._views):
            self._keep(name)
        self._sparse.clear()
        if self._reads.has_any:
            self._reads.forget()

    def _is_waiting(self) -> bool:
        """Returns whether something recorded, or an averaging over the groups, has yet to change gradients."""
        return self.recorder.num_pending_backwards > 0 or self.recorder.engine.groups.is_due

    def _keep(self, name: str) -> None:
        """Something is added to a gradient: who has its tensor already is to see it."""
        view = self._views.pop(name, None)
        if view is not None:
            self._kept[name] = weakref.ref(view)


def _check_like(placed: Placed, gradient: Any) -> None:
    """Raise what torch raises of a gradient that the parameter cannot have, on every rank."""
    meta, is_tensor = placed.meta, isinstance(gradient, torch.Tensor)
    if gradient is None or (is_tensor and gradient.dtype == meta.dtype and gradient.shape == meta.shape):
        return
    with DisableTorchFunction():
        like: Any = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        if hasattr(placed.tensor, "grad_dtype"):
            like.grad_dtype = placed.tensor.grad_dtype
        if is_tensor:
            gradient = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        like.grad = gradient  # torch's words
