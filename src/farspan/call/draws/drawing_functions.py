"""Lists the torch functions that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from farspan.call.surroundings.code import code_of, names_in

__all__ = ["DRAWS", "has_own_generator", "may_draw", "may_draw_inside"]

_TORCH = (
    "_fused_dropout", "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "alpha_dropout_", "bernoulli",
    "binomial", "dropout", "dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout",
    "feature_dropout_", "gru", "lstm", "multinomial", "native_dropout", "normal", "pca_lowrank", "poisson", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "rnn_relu", "rnn_tanh", "rrelu",
    "rrelu_",
)  # fmt: skip
_TENSOR = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
    "random_", "uniform_",
)  # fmt: skip
_FUNCTIONAL = (
    "alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
    "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices", "gumbel_softmax", "multi_head_attention_forward", "rrelu", "rrelu_",
    "scaled_dot_product_attention",
)  # fmt: skip
_INIT = (
    "kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "sparse_", "trunc_normal_", "uniform_",
    "xavier_normal_", "xavier_uniform_",
)  # fmt: skip

DRAWS: set[Any] = {
    getattr(room, name)
    for room, names in ((torch, _TORCH), (torch.Tensor, _TENSOR), (F, _FUNCTIONAL), (nn.init, _INIT))
    for name in names
    if hasattr(room, name)
}
"""Functions that may draw; every call of one has a number of its own, whether it draws or not (dropout in eval mode).

Those named here are known before anything runs, so that the numbers do not depend on what has run before. Others (of
other libraries) are added when a metadata run sees them draw.
"""


_NAMES = frozenset(function.__name__ for function in DRAWS) - {"gru", "lstm", "rnn_relu", "rnn_tanh"}
"""The names by which code draws, but for those that are often names of modules."""


def may_draw_inside(target: Any) -> bool:
    """Returns whether the modules of a leaf may draw: one of them is dropout in training, or their code names what
    draws."""
    modules = getattr(target, "modules", ())
    if any(module.training and getattr(module, "p", 0) and isinstance(module, _DROPOUT) for module in modules):
        return True
    return any(not _NAMES.isdisjoint(names_in(function)) for function in code_of(modules).functions)


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def has_own_generator(kwargs: Any) -> bool:
    """Returns whether a call draws from a generator that the user made: it is left alone."""
    return bool(kwargs) and kwargs.get("generator") not in (None, torch.default_generator)


_NAMESPACES = ("aten", "prims", "profiler")
"""Of torch's own operators: their tags say whether they draw. An optimizer's every step has a name for the profiler."""
_verdicts: dict[Any, bool] = {}


def may_draw(function: Any) -> bool:
    """Returns whether a call of `function` may draw: those known to, and those of which nothing is known."""
    verdict = _verdicts.get(function)
    if verdict is None:
        verdict = function in DRAWS or _is_unknown(function)
        if not verdict:  # of torch's own, which are not made again and again
            _verdicts[function] = verdict
    return verdict


def _is_unknown(function: Any) -> bool:
    if hasattr(function, "overloads"):  # torch.ops.aten.rand
        return any(_is_unknown(getattr(function, name)) for name in function.overloads())
    if hasattr(function, "tags"):  # torch.ops.aten.rand.default
        return torch.Tag.nondeterministic_seeded in function.tags or function.namespace not in _NAMESPACES
    room = getattr(function, "__module__", None)
    return room is not None and not room.startswith("torch")
