"""Dropout of tensors of which each member of a split stage has a part: the whole's mask, of which each takes its part.

    F.dropout(h, 0.1)        where whole things run: the mask that one process draws      a part of it to each member
                             each member: h_part * mask_part / 0.9

A mask is a byte for each number (or for each channel), drawn at the place in the program's random numbers at which the
whole call would draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from farspan.call.draws.frame import key_of_function
from farspan.call.naming import name_of
from farspan.record.team.parts.shares import share_of
from farspan.record.team.rules.protocol import Rules
from farspan.record.team.team_tensor import SplitStage, TeamTensor, used

__all__ = ["RULES"]


def dropout(splitting: Rules, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Record `F.dropout` of a team's tensor; NotImplemented where nothing is drawn, or it is written in place."""
    if type(input) is not TeamTensor or not training or inplace or not _draws(p):
        return NotImplemented
    return _dropped(splitting, F.dropout, input, p, input._value.meta.shape, input._value.meta.stride)


def dropout_of_channels(
    function: Any, splitting: Rules, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Record `F.dropout2d` or its like of a batch that is a team's tensor; NotImplemented as for `F.dropout`."""
    if type(input) is not TeamTensor or not training or inplace or not _draws(p):
        return NotImplemented
    if input.dim() != _NUM_DIMS[function] or input._dim not in (None, 0, 1):
        return NotImplemented
    num_behind = input.dim() - 2
    shape, stride = (*input.shape[:2], *[1] * num_behind), (input.shape[1], *[1] * (num_behind + 1))
    return _dropped(splitting, function, input, p, shape, stride)


def _dropped(
    splitting: Rules, function: Any, input: TeamTensor, p: float, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TeamTensor:
    meta, split = input._value.meta, input._split
    masks = _masks(splitting, function, shape, stride, p, split, (input._dim, input._sections), input)
    parts = [
        splitting.record(_kept, (part, mask, p), stage)
        for part, mask, stage in zip(used(input)._parts, masks, split.members, strict=True)
    ]
    return TeamTensor.of(splitting, split, parts, input._dim, input._weights, meta, input._sections)


def attention(
    splitting: Rules,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Record `F.scaled_dot_product_attention` with dropout, heads of which lie on the members; NotImplemented for any
    other."""
    if not _draws(dropout_p) or not all(type(item) is TeamTensor for item in (query, key, value)):
        return NotImplemented
    heads, split = query.dim() - 3, query._split
    if any(item._dim != heads or item._sections != 1 or item._split != split for item in (query, key, value)):
        return NotImplemented
    num_parts = len(split.members)
    if heads < 0 or query.shape[heads] % num_parts or key.shape[heads] % num_parts:
        return NotImplemented
    if attn_mask is not None and attn_mask.requires_grad and type(attn_mask) is torch.Tensor:
        return NotImplemented
    shape = (*query.shape[:-1], key.shape[-2])
    stride = torch.empty(shape, device="meta").stride()
    function = F.scaled_dot_product_attention
    masks = _masks(splitting, function, shape, stride, dropout_p, split, (heads, 1), query)
    added = _added(splitting, attn_mask, query, split)
    ways = (is_causal, scale, enable_gqa, dropout_p)
    parts = [
        splitting.record(_attention, (q, k, v, more, mask, *ways), stage)
        for q, k, v, more, mask, stage in zip(
            used(query)._parts, used(key)._parts, used(value)._parts, added, masks, split.members, strict=True
        )
    ]
    weights = query._weights | key._weights | value._weights
    return TeamTensor.of(splitting, split, parts, heads, weights)


def _draws(p: Any) -> bool:
    return isinstance(p, (int, float)) and 0.0 < p < 1.0


def _masks(
    splitting: Rules,
    function: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    p: float,
    split: SplitStage,
    axis: tuple[int | None, int],
    like: torch.Tensor,
) -> list[Any]:
    """Returns each member's part of what a function keeps of a tensor."""
    recorder, num_parts = splitting.recorder, len(split.members)
    recorder.number = recorder.frame.count(key_of_function(function))
    whole = recorder.record_call(_drawn_as(function), (shape, stride, p, like.dtype, like.device), {}, split.home)
    dim, sections = axis
    if dim is None:
        return [whole] * num_parts
    return [
        splitting.record(_share_of, (whole, dim, sections, member, num_parts), split.home)
        for member in range(num_parts)
    ]


@functools.cache
def _drawn_as(function: Any) -> Callable[..., torch.Tensor]:
    """Returns what draws a mask, under the name of the function in whose place it draws: a seed depends on that."""

    def mask(
        shape: tuple[int, ...], stride: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        ones = torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1)
        return (function if function in _NUM_DIMS else F.dropout)(ones, p, True) != 0

    mask.__qualname__ = name_of(function)
    return mask


def _share_of(mask: torch.Tensor, dim: int, sections: int, member: int, num_parts: int) -> torch.Tensor:
    return share_of(mask, dim, sections, member, num_parts).contiguous()


def _noise(mask: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns what torch multiplies by in dropout."""
    return mask.to(dtype).div_(1 - p)


def _kept(part: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    return part * _noise(mask, p, part.dtype)


def _added(splitting: Rules, mask: Any, query: TeamTensor, split: SplitStage) -> list[Any]:
    """Returns what each member takes of an attention's mask."""
    num_parts = len(split.members)
    if mask is None:
        return [None] * num_parts
    dim = mask.dim() - 3
    is_by_heads = dim >= 0 and mask.shape[dim] == query.shape[query._dim or 0]
    return list(splitting.operand(mask, dim if is_by_heads else None, split, 1))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    added: torch.Tensor | None,
    mask: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    p: float,
) -> torch.Tensor:
    """Returns attention as torch computes it where it draws: heads of some queries, with a mask of what is kept."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * factor) @ (key * factor).transpose(-2, -1)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    if added is not None:
        is_bool = added.dtype == torch.bool
        scores = scores.masked_fill(~added, -torch.inf) if is_bool else scores + added
    is_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(is_nothing, 0)
    return (weights * _noise(mask, p, weights.dtype)) @ value


_NUM_DIMS: dict[Any, int] = {F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}
"""Functions that keep or drop whole channels, and how many dimensions a batch has."""
RULES: dict[Any, Any] = {
    **{function: functools.partial(dropout_of_channels, function) for function in _NUM_DIMS},
    F.dropout: dropout,
    torch.dropout: lambda splitting, input, p, train: dropout(splitting, input, p, train),
    F.scaled_dot_product_attention: attention,
}
"""By function, how members of a split stage draw."""
