"""Lists the functions of a tensor that read its data past torch's operations, those that read none, and others."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.overrides
import torch.utils.dlpack
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["NEW_PARAMETER", "PAST_OPERATIONS", "WITHOUT_DATA", "chooses_by_modes", "show_hidden", "show_ways_into_func"]

_Tensor: Any = torch.Tensor
NEW_PARAMETER: Any = torch.nn.Parameter.__new__
"""torch's own, before anything of farspan stands in for it."""


def _methods(*names: str) -> list[Any]:
    return [getattr(_Tensor, name) for name in names if hasattr(_Tensor, name)]


def _shown(function: Any) -> Any:
    """Returns `function`, seen by function modes and subclasses: with parameters alone, where torch is answered that
    what is recorded has none.
    """

    @functools.wraps(function)
    def shown(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        has = has_torch_function if isinstance(tensor, torch.nn.Parameter) else torch.overrides.has_torch_function
        if has((tensor,)):
            return handle_torch_function(shown, (tensor,), tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return shown


_to_dlpack = _shown(torch.utils.dlpack.to_dlpack)
_EXPORTS = ((torch, "to_dlpack", _to_dlpack), (torch.utils.dlpack, "to_dlpack", _to_dlpack))
_INTO_FUNC = tuple(
    (module, name, _shown(getattr(module, name)))
    for module, name in (
        (torch._functorch.vmap, "_add_batch_dim"),
        (torch._functorch.eager_transforms, "_wrap_for_grad"),
        (torch._functorch.eager_transforms, "_wrap_functional_tensor"),
    )
)


def show_hidden() -> None:
    """Let function modes and subclasses see what torch hides from them: exports, and the ways into `torch.func`."""
    for module, name, function in _EXPORTS:
        setattr(module, name, function)
    show_ways_into_func()


def show_ways_into_func() -> None:
    """Let function modes and subclasses see what goes into `torch.func`."""
    for module, name, function in _INTO_FUNC:
        setattr(module, name, function)


PAST_OPERATIONS = frozenset(
    _methods(
        "numpy", "__array__", "__dlpack__", "__reduce_ex__", "share_memory_", "pin_memory", "storage", "data_ptr",
        "untyped_storage", "__repr__", "__format__",
    )
) | {_to_dlpack}  # fmt: skip
"""They look at memory itself."""

_ASKED = _methods(
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "names", "is_meta",
    "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_xpu", "is_mps", "is_sparse_csr",
    "itemsize", "nbytes", "retains_grad", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    "name", "is_xla", "is_vulkan", "is_ipu", "is_maia",
)  # fmt: skip

WITHOUT_DATA = frozenset(
    [each.__get__ for each in _ASKED]
    + [each.__set__ for each in _methods("requires_grad", "grad", "_backward_hooks")]
    + [each.__delete__ for each in _methods("grad")]
    + _methods(
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset",
        "is_floating_point", "is_complex", "is_contiguous", "is_conj", "is_neg", "is_signed", "is_inference",
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "get_device",
        "is_same_size", "__hash__", "__len__", "is_pinned",
    )
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size]
)  # fmt: skip
"""They ask for shapes and flags, or set them."""

_SPECTRAL = frozenset(
    [torch.linalg.svdvals, torch.linalg.eigvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank]
)
_NORMS = frozenset([torch.linalg.norm, torch.linalg.matrix_norm, torch.norm, _Tensor.norm])


def chooses_by_modes(function: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a call takes another algorithm below a dispatch mode: one that gives vectors, too, to nobody.

    torch does so where no gradient is wanted. The values are then not the same bit for bit.
    """
    if function in _NORMS:
        return any(type(each) in (int, float, str) and each in (2, -2, "nuc") for each in [*args, *kwargs.values()])
    return function in _SPECTRAL
