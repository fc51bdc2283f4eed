"""Every way to step: scaled gradients, closures with several evaluations, gradients written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, on_ranks, same_everywhere, weights
from torch import nn

import farspan
from farspan.errors import RecordError

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's LBFGS does

_Distribute = Callable[[nn.Module], nn.Module]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("overflow", ["loss", "one gradient", "none"])
def test_gradients_may_be_scaled(clips: bool, overflow: str) -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        seen: list[Any] = []
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(X), Y)
            if overflow == "loss" and step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if overflow == "one gradient" and step == 2:
                list(model.parameters())[-1].grad.fill_(float("nan"))  # type: ignore[union-attr]
            if clips:
                scaler.unscale_(optimizer)
                seen.append(str(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), str(loss.item())))
        return seen, scaler.state_dict(), weights(model)

    same_everywhere(program, 3)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_a_closure_may_be_evaluated_several_times_in_a_step(line_search: str | None) -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(3)], weights(model)

    same_everywhere(program, 2)


def test_a_backward_may_begin_from_a_recorded_gradient() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(X)
        out.backward(gradient=torch.ones_like(out) * 0.3)
        out = model(X)
        torch.autograd.backward([out, out.sum()], [out.detach() * 2, None])
        optimizer.step()
        return weights(model)

    same_everywhere(program)


def test_gradients_may_be_written_again_and_again() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(X), Y).backward()
        gradients: Any = [p.grad for p in model.parameters()]
        for gradient in gradients:
            gradient.mul_(0.5)
        seen = [gradient.norm().item() for gradient in gradients]
        for _ in range(2):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for gradient in gradients:
                gradient.add_(0.5)
        seen += [p.grad.tolist() for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        return seen, weights(model)

    same_everywhere(program)


def test_the_memory_of_parameters_may_be_written_again_and_again() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        memories = [p.data for p in model.parameters()]
        flat = [p.data.view(-1) for p in model.parameters()]
        for memory in [*memories, *flat, *memories]:
            memory.mul_(0.5)
            memory.add_(1.0)
        return [memory.tolist() for memory in memories], weights(model)

    same_everywhere(program, 2)


def test_momentum_may_be_kept_by_hand() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        momenta = [torch.zeros_like(p) for p in model.parameters()]
        losses = []
        for _ in range(3):
            model.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            with torch.no_grad():
                for p, momentum in zip(model.parameters(), momenta, strict=True):
                    momentum.mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
                    p.sub_(momentum * 0.1)
            losses.append(loss.item())
        return losses, weights(model)

    same_everywhere(program)


def test_a_step_size_may_be_a_recorded_number() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        F.cross_entropy(model(X), Y).backward()
        parameters: Any = list(model.parameters())
        with torch.no_grad():
            flat = torch.cat([p.grad.view(-1) for p in parameters])
            size = 1.0 / flat.abs().sum()
            for p in parameters:
                p.add_(flat[: p.numel()].view_as(p), alpha=size)
        return weights(model)

    same_everywhere(program)


def test_second_derivatives_are_refused_by_name() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        with pytest.raises(RecordError, match="create_graph"):
            model(X).sum().backward(create_graph=True)

    on_ranks(2, program)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_each_parameter_may_have_an_optimizer_that_steps_in_its_hook(kind: type[torch.optim.Optimizer]) -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizers: dict[Any, Any] = {item: kind([item], lr=0.05) for item in model.parameters()}  # type: ignore[call-arg]

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        losses: list[float] = []
        for shift in range(4):
            loss = F.cross_entropy(model(X + shift), Y)
            loss.backward()
            losses.append(loss.item())
        states = [optimizer.state_dict()["state"] or {0: {}} for optimizer in optimizers.values()]
        kept = [{name: str(torch.as_tensor(value).tolist()) for name, value in state[0].items()} for state in states]
        return losses, weights(model), kept, [parameter.grad for parameter in model.parameters()]

    same_everywhere(program)


def test_a_program_may_catch_that_a_graph_was_not_kept() -> None:
    """Nothing has been added to a gradient then, in torch neither, and the program goes on."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        model = distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []

        def again(loss: Any) -> None:
            try:
                loss.backward()
            except RuntimeError as error:
                seen.append(str(error)[:50])

        for retain_graph in (False, True):
            losses = [F.cross_entropy(model(X + shift), Y) for shift in range(2)]
            twice, alone = losses[0] * 2, model(X - 1).sum()
            for loss in (*losses, alone):
                loss.backward(retain_graph=retain_graph)
            again(losses[0])
            again(twice)
            again(alone)
            seen.append([parameter.grad.sum().item() for parameter in model.parameters() if parameter.grad is not None])
            optimizer.step()
            if not retain_graph:  # else it would need the weights from before the step
                again(losses[1])
            optimizer.zero_grad()
        return seen, weights(model)

    same_everywhere(program)
