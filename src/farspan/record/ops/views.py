"""Tensors that share memory: a root, and views that know how they came from it. A write into one shows in all.

It is recorded as a write into a copy of the root, of which all that the program still holds are taken again:

    v = x[:, 1]        root x, view v = [:, 1]
    v.mul_(2)          x' = copy of x; x'[:, 1].mul_(2)
                       v' = x'[:, 1]

Where an operation changes the shape of a tensor and not its data (`v.squeeze_(1)`), that tensor alone is another view.

Backwards write into gradients, and modules into buffers: views of these are brought up to date before they are used.
So are views of parameters that have been taken while these lie in slices: they are views of copies.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farspan.call.leaf import Leaf
from farspan.call.naming import name_of
from farspan.call.pytree.template import flatten, flatten_arguments, rebuild
from farspan.graph import Call
from farspan.record.deferred.deferred_call import is_deferred
from farspan.record.memory.twins import leave_memory, main_of, put_value
from farspan.record.nodes.tensor_hooks import check_unhooked
from farspan.record.parameters.away import real_of
from farspan.record.tensor import LazyTensor
from farspan.record.unrecorded import plainly

if TYPE_CHECKING:
    from farspan.call.infer.entry import Entry
    from farspan.call.leaf import Placed
    from farspan.graph import Template
    from farspan.record.recording import Recording

__all__ = [
    "Through",
    "changes_shape",
    "is_shared",
    "join_family",
    "read_view",
    "refresh",
    "reshape",
    "retake",
    "root_of",
    "taken",
    "write_through",
]

_Link = tuple[Any, Any, int]
"""One step from a tensor to its view: (function, template of its arguments, which of its results)."""
_MANY = 32
_VIEWS = {
    getattr(owner, f"{name}_"): getattr(torch.Tensor, name)
    for owner in (torch, torch.Tensor)
    for name in ("as_strided", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze", "detach")
    if hasattr(owner, f"{name}_")
}
"""For what makes a tensor another view of its memory the function that takes that view."""
_DETACHES = frozenset([torch.detach, torch.Tensor.detach, torch.Tensor.data.__get__])  # type: ignore[attr-defined]


class _View(NamedTuple):
    root: Any
    links: tuple[_Link, ...] | None
    """The steps from the root, one after the other; None where a module has taken the view."""
    num_flushes: int = -1
    """Where the root is a gradient or a buffer, into which not only the program writes: how many steps had run when the
    view was taken. Where it is a parameter in slices: how often parameters had changed. Else -1."""
    has_history: bool = False
    """True if gradient flows through what has been written into it, and the root has none of that: `x.detach()`."""


def join_family(lazy: LazyTensor, base: Any, call: Call, result: int, placed: dict[int, Placed]) -> None:
    """`lazy` is the `result`-th result of `call`, and a view of `base`: a recorded tensor, or one of the parameters."""
    base = main_of(base) if type(base) is LazyTensor else base
    before = getattr(base, "_view", None) or _View(base, ())
    links = None
    if before.links is not None and type(call.target) is not Leaf and len(call.arguments or ()) == 1:
        links = (*before.links, (call.target, call.template, result))
    root = before.root
    own: dict[str, Any] = vars(lazy)  # past `__setattr__`: it looks for attributes of the program's own
    has_history = before.has_history and lazy._value.meta.requires_grad
    own["_view"] = _View(root, links, _time_of(lazy._recorder, root), has_history)
    _join(lazy, root, placed)


def _time_of(recorder: Recording, root: Any) -> int:
    """Returns when a view of `root` is taken now: what to compare later, to see whether it may be old; -1: never."""
    if type(root) is LazyTensor and root._is_gradient:
        return recorder.engine.num_flushes
    placed = _placed_of(recorder, root)
    if placed is not None and placed.is_parameter:
        return recorder.copies.epoch if placed.name in recorder.splitting.matrices.owned.slices else -1
    return -1 if type(root) is LazyTensor else recorder.engine.num_flushes


def _placed_of(recorder: Recording, root: Any) -> Placed | None:
    """Returns the parameter or buffer that a root is, or whose memory it is."""
    return root._alias_of if type(root) is LazyTensor else recorder.placed.get(id(root))


def _join(lazy: LazyTensor, root: Any, placed: dict[int, Placed]) -> None:
    if type(root) is not LazyTensor:
        family = placed[id(root)].aliases
    else:
        family = root._family
        if family is None:
            family = vars(root)["_family"] = []
    if len(family) > _MANY:
        family[:] = [member for member in family if member() is not None]
    family.append(weakref.ref(lazy))


def is_shared(lazy: LazyTensor) -> bool:
    """Returns whether a write into `lazy` shows in other tensors."""
    lazy = main_of(lazy)
    return lazy._view is not None or any(member() is not None for member in lazy._family or ())


def root_of(lazy: LazyTensor) -> Any:
    """Returns what `lazy` is a view of, or itself; None if it is not known how it was taken."""
    lazy = main_of(lazy)
    if lazy._view is None:
        return lazy
    return None if lazy._view.links is None else lazy._view.root


def refresh(recorder: Recording, lazy: LazyTensor) -> None:
    """Let a gradient that the program has kept, or a view of one or of a buffer, be what has been written by now."""
    view = main_of(lazy)._view
    memory = getattr(main_of(lazy) if view is None else view.root, "_parts_of_gradients", None)
    if memory is not None:
        recorder.gradients.memory.put_all(memory)
    root = root_of(lazy)
    if type(root) is LazyTensor and root._is_gradient:
        recorder.gradients.refresh(root)
    elif _is_old(recorder, main_of(lazy)):
        recorder.before_read(root)
        retake(recorder, main_of(lazy))


def read_view(recorder: Recording, lazy: LazyTensor) -> torch.Tensor | None:
    """Returns the data of a view of a buffer, or of a parameter in slices, that has changed since; None for others.

    Nothing is recorded, so one rank may read it alone.
    """
    view: Any = main_of(lazy)._view
    if view is None or not _is_old(recorder, main_of(lazy)):
        return None
    recorder.before_read(view.root)
    placed: Any = _placed_of(recorder, view.root)
    with plainly(recorder), torch.no_grad():
        return taken(view.links, real_of(recorder.engine.read_parameter(placed)))


def _is_old(recorder: Recording, lazy: LazyTensor) -> bool:
    """Returns whether what `lazy` is a view of may have changed since: a buffer that modules write, or a parameter that
    was in slices."""
    view = lazy._view
    if view is None or view.links is None or view.num_flushes < 0:
        return False
    placed = _placed_of(recorder, view.root)
    if placed is not None and placed.is_parameter:
        return view.num_flushes != recorder.copies.epoch
    if placed is None or not placed.is_written:
        return False
    if view.num_flushes != recorder.engine.num_flushes:
        return True
    graphs = (*recorder.pending, recorder.current)
    leaves = [call.target for graph in graphs for call in graph.calls if type(call.target) is Leaf]
    return any(placed in leaf.placed for leaf in leaves)


def taken(links: tuple[_Link, ...], tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a plain tensor."""
    for function, template, result in links:
        args, kwargs = rebuild(template, [tensor])
        tensor = flatten(function(*args, **kwargs))[1][result]
    return tensor


def changes_shape(recorder: Recording, entry: Entry, tensors: list[torch.Tensor]) -> bool:
    """Returns whether a call changes how a tensor lies in memory that it shares with others, or of a parameter."""
    for number, argument in enumerate(entry.mutated):
        tensor: Any = tensors[argument]
        new = entry.metas[entry.num_results + number]
        placed = recorder.placed.get(id(tensor))
        if type(tensor) is not LazyTensor and placed is None:
            continue
        old = tensor._value.meta if placed is None else placed.meta
        if (old.shape, old.stride) == (new.shape, new.stride):
            continue
        if placed is not None or is_shared(tensor) or tensor._alias_of or main_of(tensor)._twins:
            return True
    return False


def reshape(
    recorder: Recording, function: Any, template: Template, tensors: list[torch.Tensor], name: str
) -> LazyTensor:
    """Lets a tensor be the view that `function` makes of it; the others that share its memory stay what they are."""
    tensor: Any = tensors[0]
    if function not in _VIEWS or type(tensor) is not LazyTensor:
        recorder.refuse(
            f"{name} gives another shape to a parameter, or to a tensor that shares its memory with others",
            hint="clone() it first, or take a view: y = x.view(...)",
        )
    taken = recorder.record(_VIEWS[function], template, tensors, None)
    if taken is not tensor:
        leave_memory(tensor)
        vars(tensor)["_value"], vars(tensor)["_view"] = taken._value, taken._view
        taken._value.lazy = weakref.ref(tensor)
        _join(tensor, taken._view.root, recorder.placed)
    return tensor


def write_through(
    recorder: Recording, function: Any, template: Template, tensors: list[torch.Tensor], number: int, stage: int | None
) -> None:
    """Record `function`, which writes into its `number`-th tensor, and let all that share its memory be new."""
    written: Any = main_of(tensors[number])  # type: ignore[arg-type]
    root = _with_base(recorder, root_of(written))
    links = () if written._view is None else written._view.links
    others = [tensor for i, tensor in enumerate(tensors) if i != number]
    is_in_place = _is_parameters(root)

    def write(links: tuple[_Link, ...], whole: Any) -> Any:
        given: Any = ((whole, *others), {})
        target = Through(links, function, template, number, is_in_place=is_in_place)
        return recorder.record(target, *flatten_arguments(*given), stage, given=given)

    family = [reference() for reference in getattr(root, "_family", None) or [weakref.ref(written)]]
    members = [member for member in family if member is not None and member is not root]
    for member in [root, *members] if type(root) is LazyTensor else members:
        check_unhooked(member, name_of(function), is_shared=True)
    has_history = not is_in_place and _is_past_detach(written, others)
    cut = _num_detached(links) if has_history else 0
    base = _base_of(recorder, written, members, cut) if has_history else written
    past = base._view.links if has_history else ()
    own = write(links[len(past) :], base) if has_history else None
    result = write(links, root)
    if not is_in_place:
        old, call = root._value, result._value.call
        put_value(root, result._value)
        if is_deferred(result._value):  # other ranks may yet ask for what it was
            call.tensors = [LazyTensor.make(old, recorder) if item is root else item for item in call.tensors]
        vars(root)["_is_written_through"] = True
        if root._parts_of_gradients is not None:
            recorder.gradients.memory.note_written(root)
    for member in members:
        if (
            own is None
            or (member._view.links or ())[: len(past)] != past
            or (member is not base and not member._view.has_history)
        ):
            retake(recorder, member, is_used=member is written)
    if own is not None:
        put_value(base, own._value)
        _retake_past(recorder, base, members)


def _with_base(recorder: Recording, root: Any) -> Any:
    """Returns `root`; or, where the call that made it gave a view of something (a linear layer does), a tensor of which
    it is a view from now on, as its views are: torch adds up by itself what gradient comes to each of them.
    """
    if _is_parameters(root) or root._twins or root._parts_of_gradients is not None:
        return root
    value = root._value
    if value.call is None or value.index not in value.call.entry.views or not value.meta.requires_grad:
        return root
    base: Any = LazyTensor.make(value, recorder)
    members = [member for reference in root._family or () if (member := reference()) is not None]
    for member in members:
        vars(member)["_view"] = member._view._replace(root=base)
    template, _ = flatten_arguments((root, ...), {})
    vars(root).update(_view=_View(base, ((torch.Tensor.__getitem__, template, 0),)), _family=None)
    for member in (root, *members):
        _join(member, base, recorder.placed)
    return base


def _retake_past(recorder: Recording, base: Any, members: list[Any]) -> None:
    """Takes the views of a detached tensor again from that tensor itself, which has a history of its own now."""
    past, has_history = base._view.links, base._value.meta.requires_grad
    base._view = base._view._replace(has_history=has_history)
    for member in members:
        view = member._view
        if member is not base and (view.links or ())[: len(past)] == past and _num_detached(view.links) <= len(past):
            put_value(member, _taken_again(recorder, view.links[len(past) :], base)._value)
            member._view = view._replace(has_history=has_history)


def _base_of(recorder: Recording, written: Any, members: list[Any], cut: int) -> Any:
    """Returns the detached tensor that `written` is, or is a view of; `written` where the program no longer has it."""
    links = written._view.links
    bases = [member for member in members if member._view.links == links[:cut]]
    if len(links) == cut or not bases:
        return written
    if len(bases) > 1:
        recorder.refuse(
            "gradient is written into a view of a tensor that has been detached twice",
            hint="clone() after detach(), or use the out-of-place operation",
        )
    return bases[0]


def _num_detached(links: tuple[_Link, ...] | None) -> int:
    """Returns how many of the steps to a view there are up to the last one that detaches."""
    return max((number for number, link in enumerate(links or (), 1) if link[0] in _DETACHES), default=0)


def _is_past_detach(written: LazyTensor, others: list[torch.Tensor]) -> bool:
    """Returns whether a write into a view gives it a history that the root must not have, for it is detached."""
    view: Any = written._view
    if view is None or view.has_history:
        return view is not None
    has_gradient = torch.is_grad_enabled() and any(item.requires_grad for item in others)
    return has_gradient and _num_detached(view.links) > 0


def _is_parameters(tensor: Any) -> bool:
    """Returns whether a tensor is a parameter, its memory or its gradient."""
    return type(tensor) is not LazyTensor or tensor._alias_of is not None or tensor._is_gradient


def retake(recorder: Recording, member: LazyTensor, *, is_used: bool = False) -> None:
    """Takes `member` again as a view, after what it is a view of has been written: now, if `is_used`, or when it is."""
    view: Any = member._view
    if view.links is None:
        recorder.refuse(
            "a tensor is written into of which a module has returned a view that is still in use",
            hint="use the out-of-place operation, or write before the module is called",
        )
    if view.has_history:
        recorder.refuse(
            "memory is written into that a detached tensor shares, into which gradient has been written",
            why="it would have to change, and keep the gradient.",
            hint="clone() after detach(), or use the out-of-place operation",
        )
    tensor = _taken_again(recorder, view.links, view.root)
    if is_used:
        recorder.deferred.record_one(tensor)
    put_value(member, tensor._value)
    if view.num_flushes >= 0:
        is_parameters = (placed := _placed_of(recorder, view.root)) is not None and placed.is_parameter
        now = recorder.copies.epoch if is_parameters else recorder.engine.num_flushes
        member._view = view._replace(num_flushes=now)


def _taken_again(recorder: Recording, links: tuple[_Link, ...], tensor: Any) -> Any:
    """Returns a view of a recorded tensor, or of a parameter, by the steps that lead to it."""
    may_wait = recorder.engine.num_ranks > 1 and not _is_parameters(tensor)
    with torch.set_grad_enabled(torch.is_grad_enabled() or tensor.requires_grad):  # views keep their history, too
        for function, template, result in links:
            if may_wait:  # until it is used: so torch takes it again, too, and ranks may hold no such view
                taken = recorder.deferred.take(function, template, tensor)
            else:
                taken = recorder.record(function, template, [tensor], None)
            tensor = flatten(taken)[1][result]
    return tensor


class Through:
    """An in-place function, called on a view of a copy of its first argument; gives the copy."""

    __slots__ = ("function", "is_in_place", "links", "number", "template")

    def __init__(self, links: Any, function: Any, template: Template, number: int, *, is_in_place: bool) -> None:
        self.links = links
        self.function = function
        self.template = template
        """The template of the function's own arguments."""
        self.number = number
        """The number of the function's tensor that is the view."""
        self.is_in_place = is_in_place
        """True if the first argument itself is written: a parameter, or its gradient."""

    def __call__(self, root: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | None:
        if not self.is_in_place:
            with torch.set_grad_enabled(torch.is_grad_enabled() or root.requires_grad):  # a write keeps the history
                root = root.clone()
        view = taken(self.links, root)
        tensors = [*others[: self.number], view, *others[self.number :]]
        args, kwargs = rebuild(self.template, tensors)
        self.function(*args, **kwargs)
        return None if self.is_in_place else root

    def _key(self) -> tuple[Any, ...]:
        return (self.links, self.function, self.template, self.number, self.is_in_place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Through) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return name_of(self.function)
