"""LaneTensor: a tensor of the whole batch, which has been recorded as several lanes: micro-batches of one batch.

    x [32, ..] --model--> lanes [8, ..] [8, ..] [8, ..] [8, ..]       what the program sees: one tensor [32, ..]

It is the lanes behind each other, or, a number such as a loss, their sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.infer.entry import intern
from farspan.graph import EVERYWHERE, Meta, Value
from farspan.record.ops.views import is_shared, root_of
from farspan.record.tensor import LazyTensor
from farspan.torch_private import make_wrapper

if TYPE_CHECKING:
    from farspan.record.lanes.batches import Lanes

__all__ = ["LaneTensor", "join_all", "lane_tensors"]


class LaneTensor(LazyTensor):
    """The tensor of a batch that is recorded lane by lane. What cannot be done lane by lane joins them (`join`)."""

    _window: Lanes
    _lanes: Sequence[LazyTensor]
    _dim: int | None
    """Along which the lanes lie behind each other; None where the tensor is their sum."""

    @staticmethod
    def of(window: Lanes, lanes: Sequence[Any], dim: int | None) -> LaneTensor:
        """Returns the tensor that `lanes` are together.

        Args:
            window: Where they are recorded.
            lanes: One recorded tensor of each lane, alike but for their size along `dim`.
            dim: See the attribute.
        """
        first = lanes[0]._value.meta
        shape = list(first.shape)
        if dim is not None:
            shape[dim] = sum(lane.shape[dim] for lane in lanes)
        strides = [1] * len(shape)
        for number in range(len(shape) - 1, 0, -1):
            strides[number - 1] = strides[number] * max(shape[number], 1)
        meta = intern(Meta(tuple(shape), tuple(strides), first.dtype, first.device, first.requires_grad))
        tensor: LaneTensor = make_wrapper(LaneTensor, meta)  # type: ignore[assignment]
        vars(tensor).update(
            _value=Value(meta, EVERYWHERE),  # for its metadata; it is in no graph
            _recorder=lanes[0]._recorder,
            _window=window,
            _lanes=tuple(lanes),
            _dim=dim,
        )
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        window = next(item._window for item in lane_tensors((args, kwargs or {})))
        return window.dispatch(func, args, kwargs or {})

    def is_cut_by(self, window: Lanes) -> bool:
        """Returns whether its lanes are rows of the batch as `window` has them."""
        rows = tuple(lane.shape[0] for lane in self._lanes) if self._dim == 0 else ()
        return self._window is window and rows == window.sizes

    def _data(self) -> torch.Tensor:
        """Returns the data of the whole batch, as a plain tensor."""
        lanes = [lane.read() for lane in self._lanes]
        return torch.cat(lanes, self._dim) if self._dim is not None else torch.stack(lanes).sum(0, dtype=lanes[0].dtype)

    def join(self) -> LazyTensor:
        """Become one recorded tensor: the lanes are brought together where they are needed."""
        is_torn = any(is_shared(lane) or lane._is_torn for lane in self._lanes)
        if is_torn:  # who shares the memory of the lanes does not share the joined one's
            for root in map(root_of, self._lanes):
                if root is not None:
                    vars(root)["_is_torn"] = True
        lanes, dim = list[torch.Tensor](self._lanes), self._dim
        joined: Any = torch.stack(lanes).sum(0, dtype=lanes[0].dtype) if dim is None else torch.cat(lanes, dim)
        own: dict[str, Any] = vars(self)
        for name in ("_window", "_lanes", "_dim"):
            del own[name]
        self.__class__ = LazyTensor  # type: ignore[assignment]
        own["_value"], own["_is_torn"] = joined._value, is_torn
        joined._value.lazy = weakref.ref(self)
        return self

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        if self._window.backward([self], [gradient], retain_graph, create_graph, inputs):
            return
        self.join().backward(gradient, retain_graph, create_graph, inputs)

    def register_hook(self, hook: Any) -> Any:
        self.check_unused("register_hook")
        return self.join().register_hook(hook)

    def retain_grad(self) -> None:
        self.check_unused("retain_grad")
        self.join().retain_grad()

    def check_unused(self, name: str) -> None:
        """Refuse what asks for the gradient of the whole batch where that comes to the lanes: a loss has taken them."""
        lanes = {id(lane._value) for lane in self._lanes}
        calls = (call for graph in self._window.graphs for call in graph.calls if call.entry.requires_grad)
        if any(id(item) in lanes for call in calls for item in call.arguments or ()):
            self._window.recorder.refuse(
                f"{name} on a tensor of a batch that is cut, which has already been used",
                why="its gradient comes in parts.",
                hint="before the loss; or leave out micro_batches= of farspan.distribute",
            )


def lane_tensors(item: Any) -> list[LaneTensor]:
    """Returns the lane tensors in `item`, at any depth of lists, tuples and dictionaries."""
    if type(item) is LaneTensor:
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    return [found for each in item for found in lane_tensors(each)] if isinstance(item, (list, tuple)) else []


def join_all(item: Any) -> None:
    """Join all lane tensors in `item`."""
    for tensor in lane_tensors(item):
        if type(tensor) is LaneTensor:  # it may be there twice
            tensor.join()
