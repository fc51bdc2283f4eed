"""Operations that the members of a split stage do in a way of their own, since no member's part gives a part."""

from typing import Any

from farspan.record.team.rules import channels, draws, heads, sums, words

__all__ = ["RULES"]

RULES: dict[Any, Any] = {**words.RULES, **draws.RULES, **heads.RULES, **sums.RULES, **channels.RULES}
"""By function what records it: takes the split stages and the function's own arguments."""
