"""What torch's schemas say of an operation, and how tensors share storages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Form",
    "PlainMode",
    "form_of",
    "has_own_dispatch",
    "has_storage",
    "key_of_storage",
    "num_users_of",
    "tensor_on",
]


class PlainMode(TorchDispatchMode):
    """A dispatch mode that is never compiled: else its first operation imports the compiler (1,700 modules)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an operation does to its arguments, whatever they are.

    Attributes:
        name: Without its overload, such as "normal_".
        is_view: Whether a result shares the memory of an argument that is not written.
        is_metadata: Whether it changes shapes or strides in place.
        written: Of the arguments written in place, the positions; or the names of those given by name.
        num_results: How many it returns.
        returns_list: Whether what it returns is a list of any length.
        is_random: Whether it draws random numbers.
        takes_generator: Whether it can be given a generator.
        takes_device: Whether its caller can say where its result is to lie.
        needs_data: Whether what it returns, or its shape, depends on data.
        writes_more: Whether it writes into arguments of which its schema does not say so, or also returns what is new.
        is_known_by_form: Whether its kernel for meta tensors tells the strides of its results on any device; of others
            only if all arguments are contiguous.
    """

    name: str
    is_view: bool
    is_metadata: bool
    written: tuple[int | str, ...]
    num_results: int
    returns_list: bool
    is_random: bool
    takes_generator: bool
    takes_device: bool
    needs_data: bool
    writes_more: bool
    is_known_by_form: bool


_WRITES_MORE = frozenset(["native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"])  # running statistics
_WRITES_WHAT_IT_LIKES = frozenset(["c10d"])
_WRONG_AS_META = frozenset(
    [
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "_linalg_svd",
        "linalg_eig",
        "mkldnn_rnn_layer",
        "quantize_per_channel",
        "quantize_per_tensor",
        "quantize_per_tensor_dynamic",
    ]
)
_RIGHT_AS_META = frozenset(
    ["_to_copy", "addmm", "baddbmm", "bmm", "cat", "clone", "linalg_qr", "mm"]  # of any strides, as tried on the CPU
)


@functools.cache
def form_of(operation: Any) -> Form:
    """The form of an aten operation."""
    schema, tags = operation._schema, operation.tags
    written = [
        (argument.name if argument.kwarg_only else number)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = [each.alias_info for each in schema.returns]
    space, _, name = schema.name.rpartition("::")
    makes_alike = name.endswith("_like") or name.startswith("new_")
    return Form(
        name=name,
        is_view=any(alias is not None and not alias.is_write for alias in returned),
        is_metadata=torch.Tag.inplace_view in tags,
        written=tuple(written),
        num_results=len(returned),
        returns_list=any(isinstance(each.type, torch.ListType) for each in schema.returns),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        takes_generator=any(argument.name == "generator" for argument in schema.arguments),
        takes_device=any(argument.name == "device" for argument in schema.arguments),
        needs_data=(
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags or name in _WRONG_AS_META
        ),
        writes_more=(name in _WRITES_MORE or space in _WRITES_WHAT_IT_LIKES or (bool(written) and None in returned)),
        is_known_by_form=torch.Tag.pointwise in tags or makes_alike or name in _RIGHT_AS_META,
    )


def has_own_dispatch(kind: type) -> bool:
    """Returns whether tensors of class `kind` do for themselves what operations on them are."""
    return getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN


_PLAIN: Any = torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def key_of_storage(storage: Any) -> int:
    """Equal for the same memory, while it is there."""
    return storage._cdata


has_storage: Callable[[torch.Tensor], bool] = torch._C._has_storage
"""Whether a tensor lies in memory of its own: not inside `torch.func`, where torch puts another one around it."""
num_users_of: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and Python objects use the memory with a key."""


def tensor_on(storage: Any, dtype: torch.dtype, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    """A tensor in memory that is there; whoever calls has switched all modes off."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
