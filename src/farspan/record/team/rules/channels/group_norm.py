"""`F.group_norm` of a tensor of whose channels each member of a split stage has some: its own groups."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from farspan.record.team.rules.channels.convolutions import whole_meta
from farspan.record.team.rules.protocol import Rules
from farspan.record.team.team_tensor import TeamTensor, used

__all__ = ["RULES"]


def group_norm(
    splitting: Rules, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Record `F.group_norm` of channels that lie on the members; NotImplemented where groups lie across them."""
    if type(input) is not TeamTensor or input._dim != 1 or type(num_groups) is not int:
        return NotImplemented
    split, sections, num_parts = input._split, input._sections, len(input._parts)
    if num_groups < 1 or num_groups % (sections * num_parts):
        return NotImplemented
    factors = [[None] * num_parts] * 2
    for number, item in enumerate((weight, bias)):
        if item is not None:
            if tuple(item.shape) != (input.shape[1],):
                return NotImplemented
            factors[number] = list(splitting.operand(item, 0, split, sections))
    parts = [
        splitting.record(F.group_norm, (part, num_groups // num_parts, *own, eps), stage)
        for part, stage, *own in zip(used(input)._parts, split.members, *factors, strict=True)
    ]
    meta = whole_meta(parts[0]._value.meta, 1, input.shape[1])
    return TeamTensor.of(splitting, split, parts, 1, input._weights, meta, sections)


RULES: dict[Any, Any] = {F.group_norm: group_norm}
"""By function what records it."""
