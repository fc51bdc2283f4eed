"""How a parameter lies on the members of a split stage."""

from __future__ import annotations

from dataclasses import dataclass

from farspan.record.team.team_tensor import SplitStage

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parameter lies on the members of a split stage.

    Attributes:
        split: The stage.
        dim: The dimension along which it is cut.
        sections: Into how many equal sections it falls along it, of each of which a member has a share.
    """

    split: SplitStage
    dim: int
    sections: int
