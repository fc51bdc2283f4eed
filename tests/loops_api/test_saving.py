"""Saving on any rank is whole, loading gives each rank its part, and a resumed run goes on as if never stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.cases import CASES
from tests.support.loop import mlp, on_ranks, same_everywhere, steps, weights
from tests.support.parity import build
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.execute.process.world import current_engine
from farspan.record.tensor import StubParameter

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's LBFGS does

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad, whose constructor makes its state": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=2),
}


def _saved(*parts: Any) -> list[Any]:
    """What a file of the states of `parts` gives back."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_a_resumed_run_equals_the_run_that_was_never_stopped(kind: str) -> None:
    make = _OPTIMIZERS[kind]

    def train(model: nn.Module, optimizer: Any, schedule: Any) -> Any:
        losses: list[Any] = []
        for _ in range(2):
            if isinstance(optimizer, torch.optim.LBFGS):
                losses.append(float(optimizer.step(lambda: _backward(model, optimizer))))
            else:
                losses += steps(model, optimizer, 1)
            schedule.step()
        return losses, weights(model)

    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        train(model, optimizer, schedule)
        state = _saved(model, optimizer, schedule)
        saved = str(state)
        uninterrupted = train(model, optimizer, schedule)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for part, loaded in zip((model, optimizer, schedule), state, strict=True):
            part.load_state_dict(loaded)
        assert train(model, optimizer, schedule) == uninterrupted
        return saved, uninterrupted

    same_everywhere(program, 2)


def _backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 12)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("saving", [0, 2])
def test_one_rank_alone_may_save(saving: int) -> None:
    def train(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer)
        return optimizer

    plain = mlp()
    wanted = str(_saved(plain, train(plain)))

    def program(model: nn.Module) -> str:
        farspan.distribute(model)
        optimizer = train(model)
        engine = current_engine()
        text = str(_saved(model, optimizer)) if engine is not None and engine.rank == saving else ""
        steps(model, optimizer)
        return text

    texts = on_ranks(3, program)
    assert texts[saving] == wanted and sum(map(bool, texts)) == 1


def test_each_rank_keeps_the_moments_of_its_own_parameters_only() -> None:
    plain = mlp()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    steps(plain, optimizer)
    state = _saved(optimizer)[0]

    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own.load_state_dict(state)
        own.step()
        for parameter, kept in own.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                is_here = kept[name]._value.data is not None
                assert is_here == (not isinstance(parameter, StubParameter))

    on_ranks(3, program)


def test_a_state_that_does_not_fit_is_refused_as_ever() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> str:
        distribute(model)
        other = torch.optim.AdamW(list(model.parameters())[:3]).state_dict()
        with pytest.raises(ValueError, match="size of optimizer's group") as raised:
            torch.optim.AdamW(model.parameters()).load_state_dict(other)
        return str(raised.value)

    same_everywhere(program, 2)


def test_names_of_one_parameter_share_memory_on_every_rank() -> None:
    """By which savers (safetensors, transformers) know that one of them is enough."""
    models = [build(CASES["gpt_tied"]) for _ in range(3)]

    def shared(rank: int) -> set[tuple[str, ...]]:
        names: dict[int, list[str]] = {}
        for name, tensor in farspan.distribute(models[rank]).state_dict().items():
            names.setdefault(tensor.data_ptr(), []).append(name)
        return {tuple(each) for each in names.values() if len(each) > 1}

    assert run_threads(3, shared) == [{("embed.weight", "head.weight")}] * 3
