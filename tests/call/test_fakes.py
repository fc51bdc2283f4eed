"""Where torch's rules for fake tensors say something else than what a real run gives."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.promises.test_resolved_calls import Converted
from tests.support.plainly import X
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.call.side_effects import leaks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.out(self.attention(h, h, h, need_weights=False)[0])


def evaluated(model: Any) -> list[Any]:
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        return [model(torch.randn(3, 5, 8)).tolist() for _ in range(2)]


def test_attention_without_weights_on_the_fast_path() -> None:
    """The fast path gives no second tensor then; on fakes it gives one."""
    model = nn.Sequential(Block(), Block(), Block())
    wanted = evaluated(copy.deepcopy(model))
    names = ["attention", "norm", "out"]
    in_parts = {f"{block}.{name}": f"rank:{number % 2}" for block in range(3) for number, name in enumerate(names)}
    for plan in ({"0": "rank:0", "1": "rank:1", "2": "rank:0"}, in_parts):
        models = [copy.deepcopy(model) for _ in range(2)]
        found = run_threads(2, lambda rank: evaluated(farspan.distribute(models[rank], plan=plan)))  # noqa: B023
        assert found == [wanted, wanted]


def test_a_run_on_fakes_leaves_no_weak_reference_to_what_it_met() -> None:
    """Whether a tensor is known elsewhere must not depend on when garbage is collected."""
    average = torch.zeros(8)

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - average

    model = farspan.distribute(nn.Sequential(nn.Linear(8, 8), Centred()))
    gc.disable()
    try:
        for size in (2, 3, 4, 5):  # on fakes, and with symbols in the place of sizes
            model(torch.ones(size, 8))
        assert not weakref.getweakrefs(average)
    finally:
        gc.enable()


def test_what_fakes_cannot_tell_leaves_nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that came of others hold the frames of the run too. What the program was handling is left as it is."""
    removed: list[Any] = []
    remove = leaks._remove
    monkeypatch.setattr(leaks, "_remove", lambda made: [removed.append(made), remove(made)][1])
    models = [Converted() for _ in range(2)]

    def program(rank: int) -> bool:
        model = farspan.distribute(models[rank])
        try:
            raise KeyError("x")
        except KeyError as error:
            model(X).sum().item()
            return error.__traceback__ is not None

    assert run_threads(2, program) == [True, True]
    assert removed == []
