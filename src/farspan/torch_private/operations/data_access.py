"""Lists the functions of a tensor that read its data past torch's operations, and those that read none."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PAST_OPERATIONS", "WITHOUT_DATA"]

_Tensor: Any = torch.Tensor


def _methods(*names: str) -> list[Any]:
    return [getattr(_Tensor, name) for name in names if hasattr(_Tensor, name)]


PAST_OPERATIONS = frozenset(
    _methods("numpy", "__array__", "__dlpack__", "__reduce_ex__", "share_memory_", "pin_memory", "storage")
)
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
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "data_ptr",
        "is_floating_point", "is_complex", "is_contiguous", "is_conj", "is_neg", "is_signed", "is_inference",
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "get_device",
        "is_same_size", "__hash__", "__len__", "is_pinned",
    )
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size]
)  # fmt: skip
"""They ask for shapes and flags, or set them."""
