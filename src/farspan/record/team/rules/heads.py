"""`F.multi_head_attention_forward`, which is one function to torch: its own Python, operation by operation.

nn.MultiheadAttention, nn.TransformerEncoderLayer and their like call it. Its products, views and its dropout are then
split like those of a model that writes them itself.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from farspan.call.draws.scope import active
from farspan.record.team.rules.protocol import Rules

__all__ = ["RULES"]


def multi_head_attention(
    splitting: Rules,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    *others: Any,
    **more: Any,
) -> Any:
    """Record it operation by operation, if one of its matrices is to be split; NotImplemented otherwise."""
    training = more.get("training", others[2] if len(others) > 2 else True)
    draws_by_path = training and dropout_p > 0 and not splitting.recorder.draws.is_plain
    separate = more.get("use_separate_proj_weight", others[6] if len(others) > 6 else False)
    first = more.get("q_proj_weight", others[7] if len(others) > 7 else None) if separate else in_proj_weight
    body = _body()
    if body is None or draws_by_path or splitting.current is None or splitting.matrices.view_of(first) is None:
        return NotImplemented
    attention = (embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p)
    with active.mode:  # which torch has put aside, for it runs this
        return body(query, key, value, *attention, *others, **more)


def _body() -> Callable[..., Any] | None:
    """Returns the function without the question whether some tensor's class takes it as a whole."""
    function: Any = F.multi_head_attention_forward
    if not isinstance(function, types.FunctionType):
        return None
    room = {**function.__globals__, "has_torch_function": lambda tensors: False}
    body = types.FunctionType(function.__code__, room, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


RULES: dict[Any, Any] = {F.multi_head_attention_forward: multi_head_attention}
"""The one function."""
