"""The loop around the model works as before: optimizers, gradients, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases import next_token, tokens
from tests.support.loop import X, Y, mlp, on_ranks, same_everywhere, steps, weights
from tests.support.models import GPT
from tests.support.ranks import run_threads
from torch import nn

import farspan


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
    ],
)
def test_optimizers_work_as_before(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        return steps(model, make(model.parameters())), weights(model)

    same_everywhere(program)


def test_an_optimizer_made_before_distribute_works() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        distribute(model)
        return steps(model, optimizer), weights(model)

    same_everywhere(program)


def test_groups_and_schedulers_work_as_before() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        losses = []
        for _ in range(3):
            losses += steps(model, optimizer, 1)
            cosine.step()
            plateau.step(losses[-1])
        return losses, weights(model), cosine.get_last_lr()

    same_everywhere(program)


@pytest.mark.parametrize("where", ["before_forward", "between", "after_step", "to_zero"])
def test_zero_grad_may_stand_anywhere(where: str) -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            if where in ("before_forward", "to_zero"):
                optimizer.zero_grad(set_to_none=where != "to_zero")
            loss = F.cross_entropy(model(X), Y)
            if where == "between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if where == "after_step":
                model.zero_grad()
            losses.append(loss.item())
        return losses, weights(model)

    same_everywhere(program)


@pytest.mark.parametrize(
    "options", [{}, {"norm_type": 1.0}, {"norm_type": float("inf")}, {"foreach": True}, {"foreach": False}]
)
def test_stock_clipping_is_right(options: dict[str, Any]) -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, **options).item())
            optimizer.step()
        return norms, weights(model)

    same_everywhere(program)


def test_gradients_can_be_read_and_changed_by_hand() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            for scale in (1.0, 2.0):
                (F.cross_entropy(model(X), Y) * scale).backward()
            seen.append([p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None])
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            seen.append([p.grad.norm().item() for p in model.parameters() if p.grad is not None])
            optimizer.step()
        return seen, weights(model)

    same_everywhere(program)


def test_a_loss_read_inside_the_window_is_right() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            for shift in (0.0, 1.0, 2.0):
                loss = F.cross_entropy(model(X + shift), Y)
                losses.append(loss.item())
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
        return losses, weights(model)

    same_everywhere(program)


def test_evaluation_works_at_any_batch_size_between_steps() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for size in (6, 2, 5):
            steps(model, optimizer, 1)
            model.eval()
            with torch.no_grad():
                out = model(X[:size])
                seen.append((out.tolist(), (out.argmax(-1) == Y[:size]).sum().item(), f"{out.mean():.6f}"))
            model.train()
        return seen

    same_everywhere(program)


def test_losses_collected_over_steps_can_be_stacked() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        running = torch.zeros(())
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            kept.append(loss.detach())
            running = running * 0.9 + loss.detach() * 0.1
        return torch.stack(kept).mean().item(), running.item(), kept[0].item()

    same_everywhere(program)


def test_only_one_rank_need_print_the_loss() -> None:
    models = [mlp() for _ in range(3)]

    def program(rank: int) -> str:
        model = farspan.distribute(models[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        said = ""
        for _ in range(3):
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            if rank == 1:
                said += f"{loss.item():.3f} "
        return said

    said = run_threads(3, program)
    assert said[0] == said[2] == "" and len(said[1].split()) == 3


def test_a_second_model_may_be_distributed_after_the_first_has_trained() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        other = copy.deepcopy(model)
        distribute(model)
        first = steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        distribute(other)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        optimizer.zero_grad()
        return first, steps(other, optimizer), weights(model), weights(other)

    same_everywhere(program)


def test_two_models_in_one_program() -> None:
    def program(model: nn.Module, distribute: Callable[[nn.Module], nn.Module]) -> Any:
        teacher = copy.deepcopy(model)
        distribute(model)
        distribute(teacher)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for shift in (0.0, 1.0, 2.0):
            with torch.no_grad():
                target = teacher(X + shift).softmax(-1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, weights(model), weights(teacher)

    same_everywhere(program)


def test_dropout_repeats_for_a_seed_differs_between_micro_batches_and_is_off_in_eval() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.drop(self.a(x)))

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return Dropped()

    def program(model: nn.Module) -> Any:
        farspan.distribute(model, seed=5)
        first, second = model(X).tolist(), model(X).tolist()
        model.eval()
        with torch.no_grad():
            return first, second, model(X).tolist() == model(X).tolist()

    once, twice = on_ranks(1, program, build), on_ranks(1, program, build)
    assert once == twice
    assert once[0][0] != once[0][1] and once[0][2]


def test_growing_sequences_and_the_last_step_are_known() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [GPT() for _ in range(2)]

    def program(rank: int) -> Any:
        model = farspan.distribute(models[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in tokens(17, [(2, 4), (2, 7)], steps=1)[0]:
            next_token(model, batch).backward()
        optimizer.step()
        step = farspan.last_step()
        assert step is not None
        return step.bubble, step.duration_s, step.num_micro_batches

    for bubble, duration_s, num_micro_batches in run_threads(2, program):
        assert 0 <= bubble < 1 and duration_s > 0 and num_micro_batches == 2
