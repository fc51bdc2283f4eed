"""What predictions depend on: a number for what is around some code, the same where all is as it was before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from farspan.call.surroundings.around import Surroundings

RATE = 0.5


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * RATE


def test_other_surroundings_have_another_number_and_the_same_ones_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings([Scaled])
    numbers = [around.snapshot.number]
    for rate in (0.25, 0.5, 0.125, 0.25):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        assert around.look()
        numbers.append(around.snapshot.number)
    assert not around.look()
    assert Scaled()(torch.ones(1)).item() == 0.25
    assert numbers[2] == numbers[0] and numbers[4] == numbers[1]
    assert len(set(numbers)) == 3
