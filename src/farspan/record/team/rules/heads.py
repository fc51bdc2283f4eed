"""`F.multi_head_attention_forward`, which is one function to torch: its own Python, operation by operation.

nn.MultiheadAttention, nn.TransformerEncoderLayer and their like call it. Its products, views and its dropout are then
split like those of a model that writes them itself.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from farspan.call.draws.scope import active
from farspan.record.team.rules.protocol import Rules
from farspan.torch_private import without_overrides

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
    body = without_overrides(F.multi_head_attention_forward)
    if body is None or draws_by_path or splitting.current is None or splitting.matrices.view_of(first) is None:
        return NotImplemented
    attention = (embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p)
    with active.mode:  # which torch has put aside, for it runs this
        return body(query, key, value, *attention, *others, **more)


RULES: dict[Any, Any] = {F.multi_head_attention_forward: multi_head_attention}
"""By function, how members of a split stage run it in parts."""
