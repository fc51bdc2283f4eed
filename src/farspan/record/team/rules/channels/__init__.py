"""Operations on tensors with channels ([batch, channels, height, width]) of which the members of a split stage have
some each.
"""

from typing import Any

from farspan.record.team.rules.channels import convolutions, group_norm

__all__ = ["RULES"]

RULES: dict[Any, Any] = {**convolutions.RULES, **group_norm.RULES}
"""By function what records it: takes the split stages and the function's own arguments."""
