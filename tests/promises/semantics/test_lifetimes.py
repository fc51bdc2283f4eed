"""Values live as long as anything needs them: a later micro-batch, a second loss, the program's own lists."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import assert_same_as_plainly
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan

_generator = torch.Generator().manual_seed(2)
PIECES = [(torch.randn(2, 3, 4, generator=_generator), torch.randn(2, 3, 1, generator=_generator)) for _ in range(8)]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.middle = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, state = self.cell(self.embed(x), state)
        assert state is not None
        return self.out(torch.tanh(self.middle(x))), state


def carried_on(model: nn.Module) -> Any:
    """Truncated back-propagation: each micro-batch begins with the state of the one before, without its history."""
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    state, losses = None, []
    for number, (x, y) in enumerate(PIECES):
        out, state = model(x, state)
        loss = F.mse_loss(out, y)
        loss.backward()
        state = state.detach()
        losses.append(loss)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert state is not None
    return [loss.item() for loss in losses], state.tolist(), [each.tolist() for each in model.parameters()]


def layer_by_layer(model: Any) -> Any:
    """A loss and a backward for each layer; the next one takes what this one has made."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in PIECES[:3]:
        hidden = model.embed(x)
        hidden.mean().backward()
        for _ in range(3):
            hidden = hidden.detach() + model.middle(hidden.detach())
            losses.append(F.mse_loss(hidden[..., :1], y))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist(), [each.tolist() for each in model.parameters()]


def for_two_optimizers(model: Any) -> Any:
    """What one half makes, detached for the other half's loss, and then with its history for its own."""
    maker = torch.optim.Adam([*model.embed.parameters(), *model.middle.parameters()], 0.02)
    critic = torch.optim.Adam(model.out.parameters(), 0.02)
    losses, kept = [], []
    for x, _ in PIECES[:3]:
        made = model.middle(torch.tanh(model.embed(x)))
        critic.zero_grad()
        model.out(made.detach()).square().mean().backward()
        losses.append(model.out(made.detach() + 1).mean())
        losses[-1].backward()
        critic.step()
        maker.zero_grad()
        losses.append(-model.out(made).mean())
        losses[-1].backward()
        maker.step()
        kept += [made, made[:1, :, 0]]
    return [loss.item() for loss in losses], [(2 * each).tolist() for each in kept]


@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "program", [carried_on, layer_by_layer, for_two_optimizers], ids=lambda program: program.__name__
)
def test_what_is_needed_later_is_still_there(program: Callable[[Any], Any], num_ranks: int, schedule: str) -> None:
    assert_same_as_plainly(Recurrent, program, num_ranks, schedule=schedule)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_that_the_program_has_no_more_is_gone_when_its_step_has_run(num_ranks: int) -> None:
    def program(rank: int) -> bool:
        model = farspan.distribute(Recurrent())
        batch = torch.ones(2, 3, 4)
        loss = model(batch)[0].sum()
        loss.backward()
        float(loss)
        seen = weakref.ref(batch)
        del batch, loss
        gc.collect()
        return seen() is None

    assert run_threads(num_ranks, program) == [True] * num_ranks
