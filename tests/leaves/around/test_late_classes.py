"""A class that the code of a module reaches only later keeps its attributes while earlier calls run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from farspan.call.surroundings.around import Surroundings


class Late:
    """Is reached once `tool` names it."""

    rate = 2.0


def use_late(x: Tensor) -> Tensor:
    return x * Late.rate


tool: Any = None


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if tool is None else tool(x)


def test_a_class_that_was_not_reached_when_a_call_was_made_keeps_its_attributes() -> None:
    global tool
    around = Surroundings([Part])
    earlier = around.snapshot
    tool = use_late
    try:
        assert around.look()
        later = around.snapshot
        earlier.put_back(later)
        assert tool is None
        assert Late.rate == 2.0
        later.put_back(earlier)
        assert tool is use_late
    finally:
        tool = None
