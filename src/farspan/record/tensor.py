"""LazyTensor: what the user's code gets back from a recorded call. It knows all but its data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from farspan.call.leaf import LeakError, WholeError
from farspan.devices import device_here, is_accelerator
from farspan.errors import RecordError
from farspan.graph import plain_of
from farspan.launch.raised.tracebacks import cut_frames
from farspan.record.nodes.tensor_hooks import Node, is_retained, register_hook, retain_grad
from farspan.torch_private import (
    DisableTorchFunction,
    disabled_torch_function,
    is_wrapped,
    make_wrapper,
    make_wrapper_subclass,
    with_history,
)

if TYPE_CHECKING:
    from farspan.call.leaf import Placed
    from farspan.graph import Meta, Value
    from farspan.record.recording import Recording

__all__ = ["LazyTensor", "PassedBy", "StubParameter", "memory_of", "not_given", "plain_versions"]


class LazyTensor(torch.Tensor):
    """A tensor that has been recorded and not computed, or computed and held by another rank.

    Metadata answers at once; an operation on it is recorded; reading its data (`item`, `tolist`, `print`, `bool`)
    runs what has been recorded so far and gives the owner's value on whichever ranks read it.
    """

    _value: Value
    _recorder: Recording
    _alias_of: Placed | None = None
    """The parameter whose memory this is, for `param.data`."""
    _is_counted = False
    """True if autograd sees a write into it as one into that parameter: for `param.detach()`."""
    _is_gradient = False
    """True if it is a parameter's `.grad`."""
    _view: Any = None
    """How it is taken from a tensor whose memory it shares (`ops.views`)."""
    _family: list[Any] | None = None
    """Weak references to the views of it."""
    _parts_of_gradients: Any = None
    """The gradients that are parts of its memory (`memory.of_gradients`)."""
    _twin_of: LazyTensor | None = None
    """The tensor of the same memory and shape that represents both (`memory.twins`)."""
    _is_torn = False
    """True if it has shared its memory with others and is a copy since, or they are: nothing may write into it."""
    _is_written_through = False
    """True if its memory has been written in place while others shared it."""
    _twins: list[Any] | None = None
    """Weak references to what this one stands for."""
    _farspan_shown_as: Any = None
    """In a step: a weak reference to the value as which the program knows it (`optimizers.own`)."""

    @staticmethod
    def make(value: Value, recorder: Recording) -> LazyTensor:
        meta = value.meta
        lazy: LazyTensor = make_wrapper_subclass(
            LazyTensor,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        own: dict[str, Any] = lazy.__dict__  # type: ignore[assignment]
        own["_value"], own["_recorder"] = value, recorder
        value.lazy = weakref.ref(lazy)
        return lazy

    def __setattr__(self, name: str, item: Any) -> None:
        """An attribute of the program's own stays with this object, which modules called as a whole do not see."""
        if name not in _NAMES:
            self._recorder.held_objects.are_marked = True
        super().__setattr__(name, item)

    @property
    def is_marked(self) -> bool:
        """Returns whether the program has set an attribute of its own."""
        return not vars(self).keys() <= _NAMES

    @property
    def may_be_old(self) -> bool:
        """Returns whether this may be memory into which backwards or modules write: a gradient, or a view."""
        view = self._view
        if self._is_gradient or self._twin_of is not None or self._parts_of_gradients is not None:
            return True
        return view is not None and (
            view.num_flushes >= 0 or getattr(view.root, "_parts_of_gradients", None) is not None
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = _recorder_in(args, kwargs)
        if not recorder.is_recording and not recorder.is_in_optimizer:
            return recorder.changing_backwards.read(func, args, kwargs or {})
        return recorder.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = _recorder_in(args, kwargs)
        kind = RecordError if recorder.frame is recorder.root else WholeError  # in a module, which can be one unit
        error = kind(
            f"{func} reached a tensor that has no data on this rank.",
            why="torch.func (vmap, jacrev, ...), or code that is not Python (compiled, scripted), uses it: that\n"
            "cannot be recorded over a distributed model.",
            hint="put the operation into a module of the model without buffers, which runs as a whole where it is\n"
            "placed, or read the value first (tensor.item(), tensor.tolist())",
        )
        recorder.reached = error  # what runs scripted code raises an error of its own
        raise error

    # Metadata, without a dispatch: plain attributes of the class come before torch's own.
    shape = property(lambda self: torch.Size(self._value.meta.shape))  # type: ignore[assignment]
    dtype = property(lambda self: self._value.meta.dtype)  # type: ignore[assignment]
    device = property(lambda self: self._value.meta.device)  # type: ignore[assignment]
    ndim = property(lambda self: len(self._value.meta.shape))  # type: ignore[assignment]
    is_leaf = property(lambda self: not self._value.meta.requires_grad)  # type: ignore[assignment]
    grad: Any = None
    """The gradient that `retain_grad` has kept."""

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._value.meta.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return Node(self) if self._value.meta.requires_grad else None

    def dim(self) -> int:
        return len(self._value.meta.shape)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return torch.Size(self._value.meta.shape) if dim is None else self._value.meta.shape[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._value.meta.stride if dim is None else self._value.meta.stride[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        meta = self._value.meta
        with DisableTorchFunction():
            like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            return like.is_contiguous(memory_format=memory_format)

    def numel(self) -> int:
        return self._value.meta.numel

    def nelement(self) -> int:
        return self._value.meta.numel

    def __len__(self) -> int:
        shape = self._value.meta.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    def requires_grad_(self, requires_grad: bool = True) -> LazyTensor:
        if requires_grad and not self._value.meta.requires_grad:
            self._recorder.become_leaf(self)
        elif requires_grad != self._value.meta.requires_grad:
            raise RuntimeError(
                "you can only change requires_grad flags of leaf variables. If you want to use a computed variable in "
                "a subgraph that doesn't require differentiation use var_no_grad = var.detach()."
            )
        return self

    # Reading.
    def read(self) -> torch.Tensor:
        """Returns the value as a plain tensor without gradient history; computes what has been recorded if
        necessary."""
        data, named = self._data(), self._value.meta.device
        if data.device == named:
            return data
        device = device_here(named)  # this rank may have no such one
        return data.to(device, non_blocking=is_accelerator(device))

    def _data(self) -> torch.Tensor:
        """Returns the same, on whatever device it is."""
        try:
            return self._recorder.read(self)
        except Exception as error:
            cut_frames(error)
            raise

    def item(self) -> Any:
        return self._data().item()

    def tolist(self) -> Any:
        return self._data().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._data().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._data().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.read().__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.read().__dlpack_device__()

    def __bool__(self) -> bool:
        return bool(self._data())

    def __int__(self) -> int:
        return int(self._data())

    def __float__(self) -> float:
        return float(self._data())

    def __complex__(self) -> complex:
        return complex(self._data())

    def __index__(self) -> int:
        return self._data().__index__()

    def __contains__(self, element: Any) -> bool:
        return element in self._data()

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        value, call = self.read(), self._value.call
        histories = () if call is None else call.entry.histories
        name = histories[self._value.index] if self._value.index < len(histories) else ""
        if not self._value.meta.requires_grad or not name:
            return repr(value)
        with DisableTorchFunction():
            return repr(with_history(value, name))

    def __format__(self, spec: str) -> str:
        return format(self._data(), spec) if not self.dim() or spec else repr(self)

    def __dir__(self) -> list[str]:
        """Returns torch's names and the program's: of more than 750 Python would suggest none for one that is not."""
        with DisableTorchFunction():
            names = set(torch.Tensor.__dir__(self)) - _OWN_NAMES
        return sorted(name for name in names if not name.startswith("_farspan_"))

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.requires_grad:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment."
            )
        return self.read().clone()

    # Gradients.
    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        ways = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        try:
            self._recorder.backward([self], [gradient], **ways)
        except Exception as error:
            cut_frames(error)
            raise

    def register_hook(self, hook: Any) -> Any:
        return register_hook(self, hook)

    def retain_grad(self) -> None:
        retain_grad(self)

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return is_retained(self)


_NAMES = frozenset(dir(LazyTensor)) | LazyTensor.__annotations__.keys()
"""Attributes that are not the program's."""
_OWN_NAMES = _NAMES.difference(dir(torch.Tensor))
LazyTensor.__name__ = "Tensor"  # as in torch's errors: 'Tensor' object has no attribute ...


class StubParameter(torch.Tensor):
    """A parameter or buffer that another rank owns: right shape, dtype and device, no storage.

    `isinstance(stub, torch.nn.Parameter)` holds where it stands for a parameter; optimizers skip it because its
    gradient is None. Reading it asks the owner.
    """

    _is_param = False
    _name: str
    _recorder: Recording

    @staticmethod
    def make(name: str, meta: Any, recorder: Recording, *, is_parameter: bool) -> StubParameter:
        stub: StubParameter = make_wrapper(StubParameter, meta)  # type: ignore[assignment]
        stub._is_param = is_parameter
        stub._name = name
        stub._recorder = recorder
        return stub

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = sorted({part._name for part in args if isinstance(part, StubParameter)})
        raise LeakError(
            f"{func} reached {', '.join(names) or 'a parameter'}, which another rank owns.",
            why="a module that runs here uses a parameter outside itself, so the plan did not know of the use.",
            hint='place both on one stage, for example farspan.distribute(model, plan={"'
            + (names or ["name"])[0]
            + '": ...})',
        )

    def read(self) -> torch.Tensor:
        return self._recorder.read_parameter(self)

    def item(self) -> Any:
        return self.read().item()

    def tolist(self) -> Any:
        return self.read().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.read().numpy(force=True)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        value = self.read().detach()
        return repr(torch.nn.Parameter(value, self.requires_grad) if self._is_param else value)

    def __hash__(self) -> int:
        return id(self)


class PassedBy(torch.Tensor):
    """Stands for a tensor whose data a call was foreseen not to need, and whose data may not be here."""

    _meta: Meta

    @staticmethod
    def make(meta: Meta) -> PassedBy:
        tensor: PassedBy = make_wrapper(PassedBy, meta)  # type: ignore[assignment]
        tensor._meta = meta
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # needs no data: remat detaches what it keeps
            return PassedBy.make(replace(args[0]._meta, requires_grad=False))
        raise RecordError(
            f"{func} uses a tensor that its module was foreseen only to pass on.",
            why="what the module does depends on data, or on state that another rank has.",
            hint="let the module do the same with its arguments every time, or place its parts, not the whole",
        )


def not_given() -> LeakError:
    """Returns the error of a module that runs as one call, and uses what is recorded, and is none of its arguments. A
    module that does is called part by part."""
    return LeakError(
        "a module uses a tensor of another module, or of the program, that it is not given.",
        why="it runs as one call, on one rank, and only its arguments and its own attributes are there.",
        hint="give it the tensor as an argument of its forward",
    )


def _recorder_in(args: Any, kwargs: Any) -> Any:
    """Returns the recorder of the first lazy tensor among the arguments, at any depth of lists and tuples."""
    stack = [*args, *(kwargs or {}).values()]
    while stack:
        item = stack.pop()
        if type(item) is LazyTensor:
            return item._recorder
        if isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    raise AssertionError("no lazy tensor among the arguments")


def memory_of(tensor: torch.Tensor) -> int:
    """Returns the same number for all tensors of one memory, also in a transformation of `torch.func`."""
    with DisableTorchFunction():
        has_memory = tensor.layout is torch.strided and not is_wrapped(tensor)
        return tensor.untyped_storage()._cdata if has_memory else id(tensor)


def plain_versions(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Returns how often each plain tensor among `arguments` has been written to."""
    plain = map(plain_of, arguments)
    with DisableTorchFunction():
        return tuple([item._version for item in plain if isinstance(item, torch.Tensor) and not item.is_inference()])
