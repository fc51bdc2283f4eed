"""SlicedGradient: the gradient of a parameter in slices, which no rank has as a whole.

clip_grad_norm_    norm(g) = norm(norm(g1), norm(g2))     g1 *= c, g2 *= c     numbers alone go from rank to rank
g.abs().max()      of g1 and g2 behind each other         recorded, for what reads it
g.add_(noise)      the same, and what it has become is written into g1 and g2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.naming import PASS_THROUGH, READERS, SHOWS
from farspan.call.pytree.template import flatten_arguments, map_tensors
from farspan.graph import EVERYWHERE, Value
from farspan.record.ops.views import is_shared
from farspan.record.team.parts.shares import share_of
from farspan.record.team.slices.layout import Layout
from farspan.record.team.team_tensor import whole_of
from farspan.record.tensor import LazyTensor
from farspan.torch_private import DisableTorchFunctionSubclass, make_wrapper, unscale_

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.graph import Meta
    from farspan.record.recording import Recording

__all__ = ["SlicedGradient", "dispatch_gradient"]

_T: Any = torch.Tensor
_NORMS = frozenset([torch.linalg.vector_norm, torch.norm, _T.norm])
_ITSELF = frozenset([_T.detach, _T.detach_, _T.data.__get__, torch.detach, torch.detach_])
"""For gradients, which have no history, these give the same again."""
_OF_NUMBERS = frozenset(
    ["add", "clamp", "clamp_max", "clamp_min", "clip", "div", "fill", "mul", "nan_to_num", "neg", "sub", "zero"]
)
"""What treats each element by itself, where all else that it takes are numbers."""
_OPERATORS = {"__imul__": "mul_", "__itruediv__": "div_", "__iadd__": "add_", "__isub__": "sub_"}


class SlicedGradient(LazyTensor):
    """What the program gets as `p.grad`. Its slices are the gradients of those of the parameter."""

    _placed: Placed
    _layout: Layout
    _parts: Sequence[LazyTensor]
    _norms: dict[Any, tuple[tuple[Value, ...], LazyTensor]]
    """Norms that have been recorded ahead, by their arguments, each with what the slices were."""
    _home: LazyTensor | None = None
    """The gradient as a whole, if it was the parameter's when that came home."""

    @staticmethod
    def of(recorder: Recording, placed: Placed, layout: Layout, parts: Sequence[Any], meta: Meta) -> SlicedGradient:
        """Returns the gradient of a parameter, of which the members have `parts`."""
        gradient: SlicedGradient = make_wrapper(SlicedGradient, meta)  # type: ignore[assignment]
        vars(gradient).update(
            _value=Value(meta, EVERYWHERE),  # for its metadata; it is in no graph
            _recorder=recorder,
            _placed=placed,
            _layout=layout,
            _parts=tuple(parts),
            _norms={},
        )
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch_gradient(func, args, kwargs or {})

    def _data(self) -> torch.Tensor:
        """Returns the data of the whole, as a plain tensor."""
        if self._home is not None:
            return self._home.read()
        return whole_of([part.read() for part in self._parts], self._layout.dim, self._layout.sections)

    def whole(self) -> LazyTensor:
        """Returns the whole as one recorded tensor: a copy, while the parameter is in slices."""
        if self._home is not None:
            return self._home
        self._recorder.splitting.matrices.owned.is_looked_at = True
        return self.record(_joined, list(self._parts), self._layout.dim, self._layout.sections)

    def record(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a function, where what it takes is."""
        self._recorder.number = -1  # it draws nothing
        return self._recorder.dispatch(function, args, kwargs)


def dispatch_gradient(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a function of which an argument is the gradient of a parameter in slices."""
    if function in PASS_THROUGH and function not in SHOWS:
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    args, kwargs = map_tensors((args, kwargs), _at_home)
    tensors = flatten_arguments(args, kwargs)[1]
    found = [item for item in tensors if type(item) is SlicedGradient]
    if not found:
        return function(*args, **kwargs)
    if function in READERS or function in SHOWS:
        args, kwargs = map_tensors((args, kwargs), lambda item: item.read() if type(item) is SlicedGradient else item)
        return function(*args, **kwargs)
    first, name = found[0], _name_of(function)
    if args and args[0] is first and len(found) == 1:
        if function in _ITSELF:
            return first
        if function in _NORMS and (order := _order_of(args, kwargs)) is not None:
            return _norm(first, function, order, args[1:], kwargs)
        if name.endswith("_") and name[:-1] in _OF_NUMBERS and all(item is first or not item.dim() for item in tensors):
            for part in first._parts:
                own = map_tensors((args, kwargs), lambda item, part=part: part if item is first else item)
                first.record(function, *own[0], **own[1])
            return first
    if name == "_foreach_norm" and not kwargs and (order := _order_of(args, kwargs)) is not None:
        return [torch.linalg.vector_norm(item, *args[1:]) for item in args[0]]
    if _writes_numbers_in_each(name, args, kwargs):
        number = len(args[0])
        spread = [_spread(item, args[0]) if _is_list(item, number) else item for item in args]
        function(*spread, **kwargs)
        return None
    return _on_whole(function, args, kwargs, found)


def _at_home(item: Any) -> Any:
    return item._home if type(item) is SlicedGradient and item._home is not None else item


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return _OPERATORS.get(name, name)


def _order_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Returns of which order a norm is, if it is one of all elements that can be made of those of slices."""
    given = dict(zip(("input", "p", "dim", "keepdim"), args, strict=False)) | kwargs
    order = given.get("ord", given.get("p", 2))
    order = 2 if order in (None, "fro") else order
    if not isinstance(order, (int, float)) or not order > 0:
        return None
    is_of_all = given.get("dim") is None and not given.get("keepdim") and given.get("out") is None
    return order if is_of_all else None


def _norm(gradient: SlicedGradient, function: Any, order: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a norm; and of all other gradients in slices, too, for who reads one after the other."""
    for part in gradient._parts:
        gradient._recorder.gradients.refresh(part)  # a backward may have added to it
    key = (function, args, tuple(sorted(kwargs.items())))
    values, known = gradient._norms.pop(key, (None, None))
    if values == tuple(part._value for part in gradient._parts):
        return known
    for each in gradient._recorder.gradients.in_slices():
        if each is not gradient and each._home is None:
            each._norms[key] = (
                tuple(part._value for part in each._parts),
                _own_norm(each, function, order, args, kwargs),
            )
    return _own_norm(gradient, function, order, args, kwargs)


def _own_norm(
    gradient: SlicedGradient, function: Any, order: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    norms = [gradient.record(function, part, *args, **kwargs) for part in gradient._parts]
    return gradient.record(_norm_of, norms, float(order))


def _writes_numbers_in_each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a function writes into each tensor of its first list by itself, and takes numbers besides."""
    if name == unscale_.__name__:
        return True
    if not (name.startswith("_foreach_") and name.endswith("_") and name[9:-1] in _OF_NUMBERS) or kwargs:
        return False
    others = [zip(item, args[0], strict=True) if _is_list(item, len(args[0])) else [(item, None)] for item in args[1:]]
    return all(item is written or _is_number(item) for pairs in others for item, written in pairs)


def _is_number(item: Any) -> bool:
    return not item.dim() if isinstance(item, torch.Tensor) else isinstance(item, (int, float))


def _is_list(item: Any, number: int) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == number


def _spread(items: Sequence[Any], written: Sequence[Any]) -> list[Any]:
    """Returns `items`, with each as often as what is written in its place has slices; slices in the place of these."""
    spread: list[Any] = []
    for item, target in zip(items, written, strict=True):
        parts: Sequence[Any] = target._parts if type(target) is SlicedGradient else [target]
        spread += parts if item is target else [item] * len(parts)
    return spread


def _on_whole(function: Any, args: Any, kwargs: Any, found: Sequence[SlicedGradient]) -> Any:
    """Do an operation on wholes that are put together for it; what it writes into them is in the slices, too.

    Where its result is a view, the gradient is whole from then on: what is written into one is in the other.
    """
    wholes = {id(item): item.whole() for item in found}
    before = {number: whole._value for number, whole in wholes.items()}
    on_wholes = map_tensors((args, kwargs), lambda item: wholes.get(id(item), item))
    result = function(*on_wholes[0], **on_wholes[1])
    written = [item for item in found if wholes[id(item)]._value is not before[id(item)]]
    viewed = [item for item in found if wholes[id(item)]._value is before[id(item)] and is_shared(wholes[id(item)])]
    for item in written:
        _write_back(item, wholes[id(item)])
    recorder = found[0]._recorder
    if viewed and not (written or recorder.hooks.are_running):
        del result, on_wholes
        recorder.splitting.matrices.owned.come_home(f"a view is taken of {viewed[0]._placed.name}.grad")
        for item in viewed:
            if item._home is None:  # it is no parameter's gradient any more
                vars(item)["_home"] = wholes[id(item)]
        return dispatch_gradient(function, args, kwargs)
    for item in viewed:
        whole = wholes[id(item)]
        vars(whole)["_is_torn"] = True  # nothing may write into it through a view: the slices would not see it
    known = {id(wholes[id(item)]): item for item in found}
    return map_tensors(result, lambda item: known.get(id(item), item))


def _write_back(gradient: SlicedGradient, whole: LazyTensor) -> None:
    """Let the slices be those of the whole, into which an operation has written."""
    layout = gradient._layout
    for member, part in enumerate(gradient._parts):
        own = gradient.record(share_of, whole, layout.dim, layout.sections, member, len(gradient._parts))
        gradient.record(torch.Tensor.copy_, part, own)


def _joined(parts: list[torch.Tensor], dim: int, sections: int) -> torch.Tensor:
    return whole_of(parts, dim, sections)


def _norm_of(norms: list[torch.Tensor], order: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms), order)
