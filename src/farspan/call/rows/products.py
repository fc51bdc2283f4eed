"""Operations that add up: reductions, products, and layers that treat each row by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from farspan.call.rows.layout import Layout, Mixed, Op, Partial, Replicate, Shard, joined, normal

__all__ = ["PRODUCTS"]


def _reduced(op: Op) -> Layout:
    """Lays out a reduction along some dimensions, or all."""
    tensor = op["self"]
    layout, ndim = op.of(tensor), tensor.dim()
    if isinstance(layout, Replicate):
        return Replicate(layout.is_zero and op.name == "sum")
    if isinstance(layout, Partial):
        is_like = op.results[0].is_floating_point() == tensor.is_floating_point()  # else each part is rounded
        return layout if op.name == "sum" and is_like else op.mixed()
    if not isinstance(layout, Shard) or layout.is_index:
        return op.mixed()
    given = op.given.get("dim")
    dims = given if isinstance(given, (list, tuple)) else [given]
    dims = [normal(dim, ndim) for dim in dims if dim is not None] or list(range(ndim))
    if layout.dim in dims:
        return Partial() if op.name == "sum" else Mixed(f"{op.name} over the rows")
    keeps = bool(op.given.get("keepdim", False))
    return layout if keeps else replace(layout, dim=layout.dim - sum(dim < layout.dim for dim in dims))


def _product(op: Op, one: Any, two: Any, batches: int) -> Layout:
    """Lays out a product of matrices, behind `batches` dimensions that both have. Vectors have no rows or no
    columns."""
    left, right = op.of(one), op.of(two)
    if isinstance(left, Replicate) and isinstance(right, Replicate):
        return Replicate(left.is_zero or right.is_zero)
    if isinstance(left, Partial) or isinstance(right, Partial):
        return (
            (left if isinstance(left, Partial) else right)
            if isinstance(left, Replicate) or isinstance(right, Replicate)
            else op.mixed()
        )
    for layout in (left, right):
        if not isinstance(layout, Replicate) and (not isinstance(layout, Shard) or layout.is_index):
            return op.mixed()
    inner_left, inner_right = one.dim() - 1, max(two.dim() - 2, batches)
    if isinstance(left, Shard) and isinstance(right, Shard):
        sizes = op.units(one.shape[left.dim]), op.units(two.shape[right.dim])
        if sizes[0] != sizes[1] or left.outer != right.outer:
            return op.mixed()
        if left.dim == right.dim and left.dim < batches:
            return left
        return Partial() if left.dim == inner_left and right.dim == inner_right else op.mixed()
    if isinstance(left, Shard):
        return left if batches <= left.dim < inner_left else op.mixed()
    assert isinstance(right, Shard)
    if right.dim <= inner_right:
        return op.mixed()
    return replace(right, dim=right.dim - 1 if one.dim() - batches == 1 else right.dim)


def _matmul(op: Op) -> Layout:
    names = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor")}
    one, two = names[op.name]
    return _product(op, op[one], op[two], 1 if op.name == "bmm" else 0)


def _plus_matmul(op: Op) -> Layout:
    """`addmm` and its like: a product, plus what broadcasts to it."""
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}
    one, two = names[op.name]
    layout = _product(op, op[one], op[two], 1 if op.name == "baddbmm" else 0)
    own, added, ndim = op.of(op["self"]), op["self"], op.results[0].dim()
    if isinstance(layout, Replicate) and isinstance(own, Replicate):
        return Replicate()
    if isinstance(layout, Shard) and isinstance(own, Replicate):
        dim = layout.dim - ndim + added.dim()
        return layout if dim < 0 or added.shape[dim] == 1 else op.mixed()
    return layout if isinstance(layout, Shard) and own == layout and added.dim() == ndim else op.mixed()


def _per_row(*, kept: Callable[[Op], int] | None = None, first: str = "") -> Callable[[Op], Any]:
    """Lays out a layer that treats each row by itself, whatever it does along its last dimensions.

    Args:
        kept: How many leading dimensions of its first argument it treats each by itself; one, if nothing says so.
        first: The name of that argument.
    """

    def rule(op: Op) -> Any:
        layouts = [(item, op.of(item)) for item in op.tensors]
        sharded = [(item, layout) for item, layout in layouts if isinstance(layout, Shard)]
        if any(isinstance(layout, (Partial, Mixed)) for _, layout in layouts):
            return op.mixed()
        if not sharded:
            return Replicate()
        tensor = op[first] if first else op.tensors[0]
        own = op.of(tensor)
        if not isinstance(own, Shard) or own.dim >= (1 if kept is None else kept(op)):
            return op.mixed()
        for item, layout in sharded:
            is_like = (layout.dim, layout.outer, layout.is_index) == (own.dim, own.outer, False)
            if not is_like or op.units(item.shape[layout.dim]) != op.units(tensor.shape[own.dim]):
                return op.mixed()
        is_backward = op.name.endswith("_backward")
        found: list[Layout] = []
        for result in op.results:
            dim = op.sharded_dim(result)
            if dim not in (-1, own.dim):
                return op.mixed()
            found.append(own if dim == own.dim else Partial() if is_backward else Replicate())
        return found

    return rule


def _but_last(number: int, first: str = "") -> Callable[[Op], Any]:
    return _per_row(kept=lambda op: (op[first] if first else op.tensors[0]).dim() - number, first=first)


def _layer_norm(op: Op) -> Any:
    return _per_row(kept=lambda op: op["input"].dim() - len(op["normalized_shape"]), first="input")(op)


def _batch_norm(op: Op) -> Any:
    is_training = op.given.get("training", op.given.get("train", op.name != "_native_batch_norm_legit_no_training"))
    if not is_training:
        return _per_row(first="input")(op)
    own = op.of(op["input"])
    if not isinstance(own, Shard) or own.dim != 1 or op.name not in _NORMS_OF_CHANNELS:
        return Mixed("batch_norm in training")
    for item in op.tensors:  # `instance_norm`: rows and channels are one dimension, and each has statistics of its own
        layout, dim = op.of(item), 0 if item.dim() == 1 else 1
        if not isinstance(layout, Shard) or (layout.dim, layout.outer, layout.is_index) != (dim, own.outer, False):
            return op.mixed()
    return [Shard(dim, own.outer) if (dim := op.sharded_dim(item)) >= 0 else Replicate() for item in op.results]


_NORMS_OF_CHANNELS = ("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward")


def _convolution(op: Op) -> Any:
    if op["input"].dim() < 3 or not isinstance(op.of(op["weight"]), Replicate):
        return op.mixed()
    return _per_row(first="input")(op)


def _attention(op: Op) -> Any:
    """Queries, keys and values are [.., heads, time, width]; a mask broadcasts over what is in front."""
    query = op["query"]
    own, mask = op.of(query), op.given.get("attn_mask", op.given.get("attn_bias"))
    if mask is not None and isinstance(own, Shard) and own.dim < query.dim() - 2:
        layout = joined(op, [mask], query.dim())
        if isinstance(layout, Mixed) or (isinstance(layout, Shard) and layout != own):
            return op.mixed()
        given = {name: value for name, value in op.given.items() if value is not mask}
        results = op.results
        return _but_last(2, "query")(_with_arguments(op, given, results))
    return _but_last(2, "query")(op)


def _with_arguments(op: Op, given: dict[str, Any], results: Any) -> Op:
    """Returns the same operation, without some of its arguments."""
    return Op(op.name, given, results, op.of, op.rows)


def _recurrent(op: Op) -> Any:
    """Lays out one layer of an RNN, over [time, rows, width]."""
    tensors = op.tensors
    layouts = [(item, op.of(item)) for item in tensors]
    if any(isinstance(layout, (Partial, Mixed)) for _, layout in layouts):
        return op.mixed()
    if op.of(op["input"]) != Shard(1):
        return op.mixed() if any(isinstance(layout, Shard) for _, layout in layouts) else Replicate()
    rows = op.units(op["input"].shape[1])
    if any(
        isinstance(layout, Shard) and (layout.outer != 1 or op.units(item.shape[layout.dim]) != rows)
        for item, layout in layouts
    ):
        return op.mixed()
    is_backward = op.name.endswith("_backward")
    dims = [op.sharded_dim(item) for item in op.results]
    if any(dim == -2 for dim in dims):
        return op.mixed()
    return [Shard(dim) if dim >= 0 else Partial() if is_backward else Replicate() for dim in dims]


def _nll(op: Op) -> Any:
    """`nll_loss` and its gradient."""
    reduction = op["reduction"]
    layout = joined(op, [op["target"]], op["target"].dim())
    own = op.of(op["self"])
    if isinstance(own, Replicate) and isinstance(layout, Replicate):
        return Replicate()
    if reduction == 1:
        return Mixed(f"{op.name} (a mean)")
    is_plain = isinstance(own, Shard) and own.dim == 0 and layout == own
    if not is_plain or not isinstance(op.of(op.given.get("weight")), Replicate):
        return op.mixed()
    if op.name.endswith("_backward"):
        fits = isinstance(op.of(op["grad_output"]), Replicate) if reduction == 2 else op.of(op["grad_output"]) == own
        return own if fits else op.mixed()
    return [Partial() if reduction == 2 else own, Partial()]


def _fft(op: Op) -> Layout:
    layout, dims = op.of(op["self"]), op["dim"]
    if not isinstance(layout, Shard) or layout.is_index:
        return layout if isinstance(layout, Replicate) else op.mixed()
    return op.mixed() if layout.dim in {normal(dim, op["self"].dim()) for dim in dims} else layout


def _by_name(op: Op) -> int:
    """Leading dimensions of what pools, scales or pads as many of the last ones as its name says (`avg_pool2d`)."""
    number = next(each for each in (1, 2, 3) if f"{each}d" in op.name)
    return op.tensors[0].dim() - number


_POOLS = [
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices_backward",
    "avg_pool2d_backward", "max_pool3d_with_indices_backward", "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
    "adaptive_avg_pool1d", "avg_pool1d", "max_pool1d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d", "upsample_bicubic2d",
    "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
    "upsample_bilinear2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward",
    "upsample_bicubic2d_backward", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward",
]  # fmt: skip


def _of_weights(op: Op) -> Any:
    """Returns the layouts of gradients that are linear in that of a weight, which is made of what is the same for all
    rows (`weight_norm`).
    """
    gradient = op["grad_w"]
    layout, others = op.of(gradient), [item for item in op.tensors if item is not gradient]
    fits = isinstance(layout, (Partial, Replicate)) and all(isinstance(op.of(item), Replicate) for item in others)
    return [layout if fits else op.mixed()] * len(op.results)


PRODUCTS: dict[str, Callable[[Op], Any]] = {
    **dict.fromkeys(
        [
            "sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "any", "all", "prod", "var", "std",
            "var_mean", "std_mean", "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian", "mode",
            "nansum", "nanmean", "count_nonzero",
        ],
        _reduced,
    ),
    **dict.fromkeys(["mm", "bmm", "mv", "dot"], _matmul),
    **dict.fromkeys(["addmm", "baddbmm", "addmv"], _plus_matmul),
    **dict.fromkeys(["convolution", "convolution_backward", "_convolution"], _convolution),
    **dict.fromkeys([
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    ], _layer_norm),
    **dict.fromkeys(["native_group_norm", "native_group_norm_backward"], _per_row(first="input")),
    **dict.fromkeys(
        ["native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
         "native_batch_norm_backward", "_batch_norm_with_update", "batch_norm_backward"],
        _batch_norm,
    ),
    **dict.fromkeys(
        [f"_scaled_dot_product_{kind}{direction}"
         for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                      "fused_attention_overrideable", "attention_math")
         for direction in ("", "_backward")],
        _attention,
    ),
    **dict.fromkeys(["mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"], _recurrent),
    **dict.fromkeys(["nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"], _nll),
    **dict.fromkeys(_POOLS, _per_row(kept=_by_name)),
    **dict.fromkeys(["grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
                     "im2col", "col2im"], _per_row()),
    **dict.fromkeys(["pixel_shuffle", "pixel_unshuffle"], _but_last(3)),
    **dict.fromkeys(["_cdist_forward", "linalg_inv_ex", "linalg_cholesky_ex", "_linalg_det", "_linalg_svd", "linalg_qr",
                     "_linalg_eigh", "linalg_matrix_exp", "triangular_solve", "linalg_solve_triangular"], _but_last(2)),
    **dict.fromkeys(["_fft_r2c", "_fft_c2c", "_fft_c2r"], _fft),
    "_weight_norm_interface_backward": _of_weights,
}  # fmt: skip
