"""Networks of random connections, placed at random: every gradient is the sum of one process, to the last bit.

Modules and parameters are used any number of times and in any order, and so are values: on the stage that made them
before and after another stage has used them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.support.plainly import X, assert_same_as_plainly, train
from torch import Tensor, nn

WIDTH = X.shape[-1]


class Tangle(nn.Module):
    """Each operation takes what it finds; the loss looks at all, in another order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        values = [x]
        for _ in range(9):
            a, b = choose.choice(values), choose.choice(values)
            layer: Any = choose.choice(list(self.layers))
            results = [
                lambda a=a, layer=layer: 1.3 * torch.tanh(layer(a)),
                lambda a=a, b=b: torch.sin(a * b),
                lambda a=a, b=b: a + b * self.scale,
                lambda a=a, layer=layer: a * layer.weight[0],
            ]
            values.append(choose.choices(results, [6, 2, 1, 2])[0]())
        seen = values[1:]
        choose.shuffle(seen)
        return torch.stack([value.square().mean() / number for number, value in enumerate(seen, 1)]).sum()


def plan(seed: int, num_ranks: int) -> dict[str, str]:
    choose = random.Random(seed)
    ranks = [*range(num_ranks), *(choose.randrange(num_ranks) for _ in range(4 - num_ranks))]
    choose.shuffle(ranks)
    placed = {f"layers.{number}": f"rank:{rank}" for number, rank in enumerate(ranks)}
    return {**placed, "scale": f"rank:{choose.randrange(num_ranks)}"}


@pytest.mark.parametrize(("seed", "num_ranks"), [(seed, 2 + seed % 3) for seed in range(16)])
def test_same_numbers_as_one_process_whatever_is_connected(seed: int, num_ranks: int) -> None:
    def program(model: Any) -> Any:
        return train(model, loss_of=lambda loss: loss)

    assert_same_as_plainly(lambda: Tangle(seed), program, num_ranks, plan=plan(seed, num_ranks))
