"""An entry of the metadata cache: all that is known of a call before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from farspan.call.draws.movement import Draws
from farspan.call.leaf import WholeError
from farspan.call.pytree.canonical import digest_of
from farspan.call.side_effects.changes import Changes
from farspan.graph import Meta
from farspan.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from farspan.graph import Template

__all__ = ["Entry", "Raised", "Recent", "Unknown", "intern", "meta_of", "refuse_nested"]


_FEW, _MANY = 256, 4096
_FLUSHES = 32


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The prediction for one kind of call."""

    is_foreseen: ClassVar[bool] = True

    name: str
    """Name of the target, for people."""
    template: Template
    """Structure of the result; slot numbers index `metas`."""
    changes: Changes
    """The changes that the call makes to the lists, dictionaries and objects it is given."""
    names_arguments: bool
    """True if the result or a change refers to an argument object."""
    unused: frozenset[int]
    """Arguments that the call only passes by: their data is not needed."""
    attributes: tuple[str, ...]
    """The attributes that the call writes on its leaf's modules, by the modules' numbers and names."""
    metas: tuple[Meta, ...]
    """Metadata of the tensors of the result and of the changes, then of the arguments written in place (their new
    versions)."""
    num_results: int
    depends_on: tuple[tuple[int, ...], ...]
    """For each output, the arguments its gradient flows to."""
    parameters: tuple[tuple[int, ...], ...]
    """For each output, the parameters its gradient may flow to, by their numbers in the leaf's `placed`."""
    mutated: tuple[int, ...]
    """Arguments that the call writes in place."""
    same_as: tuple[int, ...]
    """For each result, the argument it is (the same tensor object), or -1."""
    shares: tuple[int, ...]
    """For each result, an argument whose memory it shares (a view), or -1."""
    has_tensors_only: bool
    """False where the result holds a number or bool computed from data."""
    is_one_new_tensor: bool
    """True if the result is one tensor that shares nothing with the arguments, and none of these is changed."""
    is_random: bool
    """True if it draws random numbers."""
    is_random_in_python: bool
    """True if some of them come from Python's or numpy's generator."""
    is_ordered: bool
    """True if its backward must come before the next call: the call writes into parameters of its leaf, of which there
    are no versions, or its backward writes into buffers (a normalisation in a checkpoint).
    """
    flops: int
    """Floating-point operations of its products, in the forward."""
    digest: int
    """Equal on all ranks for equal calls."""
    draws: Draws | None = None
    """Its draws from torch's CPU generator; None where only a run shows how far it moves that."""
    histories: tuple[str, ...] = ()
    """For each of `metas`, how torch shows its `grad_fn`; "" where it has none."""
    views: tuple[int, ...] = ()
    """The results that are views of memory that the call has made: others may be views of the same."""
    differentiable: tuple[int, ...] = field(init=False)
    """Arguments to which gradient flows from any output."""
    requires_grad: bool = field(init=False)
    """Returns whether any output requires grad."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "differentiable", tuple(dict.fromkeys(chain.from_iterable(self.depends_on))))
        object.__setattr__(self, "requires_grad", any(meta.requires_grad for meta in self.metas))


class Recent:
    """A table that forgets what has not been used for a while: a program of ever new sizes needs no more memory for it.

    It holds what was used since the last turn, and what was used between the last two. A turn comes after 32 flushes;
    not while the table is small.
    """

    def __init__(self) -> None:
        self._used: dict[Any, Any] = {}
        self._before: dict[Any, Any] = {}
        self._num_flushes = 0

    def get(self, key: Any) -> Any:
        """Returns the value of a key, or None."""
        value = self._used.get(key)
        if value is None and self._before:
            value = self._before.pop(key, None)
            if value is not None:
                self._used[key] = value
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._used[key] = value
        if len(self._used) >= _MANY:
            self._turn()

    def __len__(self) -> int:
        return len(self._used) + len(self._before)

    def flushed(self) -> None:
        """The program has run what it had recorded."""
        self._num_flushes += 1
        if self._num_flushes >= _FLUSHES and len(self._used) >= _FEW:
            self._turn()

    def forget(self, is_gone: Callable[[Any], bool]) -> None:
        """Drop the keys for which `is_gone` holds."""
        for table in (self._used, self._before):
            for key in [key for key in table if is_gone(key)]:
                del table[key]

    def _turn(self) -> None:
        self._used, self._before, self._num_flushes = {}, self._used, 0


interned = Recent()
"""The one object for each metadata."""


def meta_of(tensor: torch.Tensor, device: torch.device | None = None) -> Meta:
    """Returns the metadata of `tensor`, as if it were on `device` if one is given; equal metadata is the same object
    (see `intern`).

    Raises:
        WholeError: It is a nested tensor.
    """
    with DisableTorchFunction():  # seven questions that the function mode need not see
        if tensor.is_nested:
            refuse_nested(tensor)
        stride = tuple(map(int, tensor.stride())) if tensor.layout is torch.strided else ()
        parts = (
            tuple(map(int, tensor.shape)),
            stride,
            tensor.dtype,
            device or tensor.device,
            tensor.requires_grad,
            False,
        )
    return interned.get(parts) or intern(Meta(*parts))


def refuse_nested(*tensors: torch.Tensor) -> None:
    """Raise if one of `tensors` cannot be recorded.

    Raises:
        WholeError: It is a nested tensor, whose sizes are no numbers.
    """
    if any(tensor.is_nested for tensor in tensors):
        raise WholeError(
            "a nested tensor cannot be given to a module of a distributed model, nor come out of one.",
            why="its sizes are no numbers that all ranks could know.",
            hint="give the values and offsets: values = nested.values(), offsets = nested.offsets(), and make it\n"
            "inside the module: torch.nested.nested_tensor_from_jagged(values, offsets)",
        )


def intern(meta: Meta) -> Meta:
    """Returns the object that stands for all metadata equal to `meta`, unless that has not been used for a while."""
    parts = (meta.shape, meta.stride, meta.dtype, meta.device, meta.requires_grad, meta.is_parameter)
    known = interned.get(parts)
    if known is None:
        known = interned[parts] = meta
    return known


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of the user's code, without the frames, which hold what it has made."""

    error: Exception
    traceback: str


class Unknown:
    """A call that a run on fakes cannot foresee: nothing is known of it, or what it gave last."""

    __slots__ = ("digest", "is_dynamic", "is_refused", "last", "name", "raised")

    is_foreseen: ClassVar[bool] = False
    histories: tuple[str, ...] = ()
    views: tuple[int, ...] = ()
    is_random = True
    is_random_in_python = True
    draws: Draws | None = None
    unused: frozenset[int] = frozenset()
    parameters: tuple[tuple[int, ...], ...] = ()
    mutated: tuple[int, ...] = ()
    same_as: tuple[int, ...] = ()
    metas: tuple[Meta, ...] = ()
    differentiable: tuple[int, ...] = ()
    requires_grad = False

    def __init__(self, name: str, *, is_dynamic: bool, raised: Raised | None = None, is_refused: bool = False) -> None:
        self.name = name
        self.digest = digest_of(name)
        self.raised = raised
        """The exception that the user's code has raised on fakes. It may raise that in a run too, or not."""
        self.is_refused = is_refused
        """True if torch has rules for such a call on fakes, which it breaks: a run may do so too, whatever the data."""
        self.is_dynamic = is_dynamic
        """True if it is certain that the next run may give other shapes."""
        self.last: Entry | None = None

    def confirms(self, entry: Entry) -> bool:
        """Returns whether the call gave the same a second time, so that it may be expected to go on so."""
        last, self.last = self.last, entry
        return not self.is_dynamic and entry.has_tensors_only and last is not None and last.digest == entry.digest
