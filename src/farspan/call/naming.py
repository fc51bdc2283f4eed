"""Names leaves and torch functions, lists those that recording must treat apart, and finds the user's line of a
call."""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "CHANGES_GRADIENT_FLOW",
    "METADATA_OF_ONE",
    "PASS_THROUGH",
    "READERS",
    "REFUSED",
    "RUNNING_STATISTICS",
    "SHOWS",
    "find_where",
    "format_where",
    "is_users_file",
    "is_torchs_own",
    "name_of",
]

_T: Any = torch.Tensor


def _getters(*names: str) -> list[Any]:
    """Returns those of the attributes that this release of torch has."""
    return [getattr(_T, name).__get__ for name in names if hasattr(getattr(_T, name, None), "__get__")]


PASS_THROUGH: frozenset[Any] = frozenset(
    [
        *_getters(
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta",
            "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xla", "is_xpu", "is_ipu", "is_mtia",
            "names", "itemsize", "nbytes", "output_nr", "_version", "grad_fn", "_base", "is_vulkan", "is_maia",
            "_is_param", "grad",
        ),
        _T.dim, _T.size, _T.stride, _T.numel, _T.nelement, _T.ndimension, _T.is_contiguous, _T.is_floating_point,
        _T.is_complex, _T.element_size, _T.storage_offset, _T.get_device, _T.is_signed, _T.is_inference, _T.__len__,
        _T.__hash__, _T.is_conj, _T.is_neg, _T.requires_grad_,
        _T.requires_grad.__set__, _T.grad.__set__, _T.grad.__delete__, _T.__reduce_ex__, _T.__repr__, _T.__format__,
        _T.dim_order,
        torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.is_storage,
        torch.is_conj, torch.is_neg, torch.is_inference, torch.is_signed, torch.result_type, torch.get_device,
    ]
)  # fmt: skip
"""Functions that ask for metadata only, and answer without data."""

SHOWS = frozenset([_T.__repr__, _T.__format__, _T.__reduce_ex__])
"""Those of them that need the data of a parameter or buffer after all."""

METADATA_OF_ONE: frozenset[Any] = frozenset(
    [
        *_getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu"),
        _T.dim, _T.size, _T.stride, _T.numel, _T.is_contiguous, _T.is_floating_point, _T.__len__, _T.__hash__,
    ]
)  # fmt: skip
"""Those that programs ask most, each of one tensor, its first argument: of a plain one there is nothing to record."""

READERS: frozenset[Any] = frozenset(
    [
        _T.item, _T.tolist, _T.numpy, _T.__bool__, _T.__int__, _T.__float__, _T.__complex__, _T.__index__,
        _T.__contains__, _T.__array__, _T.equal, _T.allclose, _T.is_nonzero, _T.__deepcopy__,
        torch.equal, torch.allclose, torch.is_nonzero, _T.is_pinned, _T.is_same_size, torch.is_same_size,
    ]
)  # fmt: skip
"""Functions that ask for the data: the value is fetched from its owner and they run on it."""

REFUSED: dict[Any, str] = {
    _T.retain_grad: "keep the module that needs the gradient on one stage",
    _T.share_memory_: (
        "call share_memory() before farspan.distribute, or share a copy: another = Net(), then\n"
        "another.load_state_dict(model.state_dict()), another.share_memory()"
    ),
    _T.storage: "read the tensor first: tensor.read()",
    _T.untyped_storage: "read the tensor first: tensor.read()",
    _T.data_ptr: "read the tensor first: tensor.read()",
}
"""Functions that cannot be right on recorded tensors, with what to do instead."""

CHANGES_GRADIENT_FLOW: frozenset[Any] = frozenset([_T.requires_grad_, _T.requires_grad.__set__])

RUNNING_STATISTICS: dict[Any, str] = {
    torch.nn.functional.batch_norm: "training",
    torch.nn.functional.instance_norm: "use_input_stats",
}
"""Functions that write into plain arguments without saying so, and the keyword that switches it on."""

_is_users: dict[str, bool] = {}
"""By file: whether its code is the user's, not torch's or farspan's."""
_NOT_USERS = (
    *(
        f"{folder}/"
        for file, above in ((__file__, 1), (torch.__file__, 0))
        for folder in dict.fromkeys((Path(file).parents[above], Path(file).resolve().parents[above]))
    ),
    contextlib.__file__,
    copy.__file__,
)
"""Folders of farspan and torch, as Python names them and without symbolic links; and what stands between them and the
program where one of them is in a `with`, or a model is copied."""


_PREFIXES = {"_VariableFunctionsClass.": "torch.", "TensorBase.": "Tensor."}
"""How torch's functions of the module `torch` and methods of tensors begin, and how people know them."""


def name_of(function: Any) -> str:
    """Returns the name of a leaf or a torch function, the same in every process."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and owner is not None:
        return f"Tensor.{owner.__name__}"
    name = getattr(function, "__qualname__", None) or str(function)
    for prefix, known in _PREFIXES.items():
        if name.startswith(prefix):
            return known + name[len(prefix) :]
    return name


_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
_IN_PYTHON = ("torch._tensor", "torch.functional", "torch.nn.functional")
"""Modules of torch's whose functions run no code but torch's."""


def is_torchs_own(target: Any) -> bool:
    """Returns whether `target` is a function of torch's that runs no code but torch's."""
    if isinstance(target, types.FunctionType):
        return target.__module__ in _IN_PYTHON
    room = getattr(target, "__module__", None)
    return isinstance(target, _IN_C) and (room is None or room.startswith("torch."))


def is_users_file(name: str) -> bool:
    """Returns whether the code of a file is the user's, or a library's that it uses: not torch's, not farspan's."""
    found = _is_users.get(name)
    if found is None:
        found = _is_users[name] = not name.startswith(_NOT_USERS)
    return found


def find_where(num_callers: int = 1) -> Any:
    """Returns the user's line that is being recorded, as (code object, line number).

    Args:
        num_callers: How many of the callers are known to be farspan's: they are skipped, for each costs time.
    """
    frame = sys._getframe(num_callers)
    while frame is not None:
        code = frame.f_code
        is_users = _is_users.get(code.co_filename)
        if is_users is None:
            is_users = _is_users[code.co_filename] = not code.co_filename.startswith(_NOT_USERS)
        if is_users:
            return (code, frame.f_lineno)
        frame = frame.f_back
    return None


def format_where(where: Any) -> str:
    if where is None:
        return "an unknown line"
    code, line = where
    return f"{code.co_filename}:{line}, in {code.co_name}"
