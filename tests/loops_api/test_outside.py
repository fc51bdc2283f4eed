"""Tensors outside the model that require grad: inputs, learned weights of a loss, modules that stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, mlp, on_ranks, same_everywhere, weights
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import DivergenceError, RecordError

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's LBFGS does

_Distribute = Callable[[nn.Module], nn.Module]


def _linear(seed: int, num_in: int, num_out: int) -> nn.Module:
    """The same on all threads."""
    module = nn.Linear(num_in, num_out)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return module


def fast_gradient_sign(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(3):
        data = X.clone().requires_grad_()
        F.cross_entropy(model(data), Y).backward()
        assert data.grad is not None
        seen.append(data.grad.tolist())
        perturbed = torch.clamp(data + 0.1 * data.grad.sign(), -2, 2).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(perturbed), Y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, weights(model)


def a_perturbation_is_added(model: nn.Module, distribute: _Distribute) -> Any:
    """Adversarial training as it is often written: the input is no leaf, and the perturbation is updated in place."""
    distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        delta = torch.zeros_like(X, requires_grad=True)
        for _ in range(3):
            loss = F.cross_entropy(model(X + delta), Y)
            loss.backward()
            delta.data = (delta + 0.02 * delta.grad.detach().sign()).clamp(-0.05, 0.05)  # type: ignore[union-attr]
            delta.grad.zero_()  # type: ignore[union-attr]
        optimizer.zero_grad()
        F.cross_entropy(model(X + delta), Y).backward()
        optimizer.step()
    return delta.tolist(), weights(model)  # pyright: ignore[reportPossiblyUnboundVariable]


def _an_image_is_trained(kind: type[torch.optim.Optimizer], model: nn.Module, distribute: _Distribute) -> Any:
    model.requires_grad_(False)
    distribute(model)
    image = X.clone().requires_grad_()
    optimizer = kind([image], lr=0.1)  # type: ignore[call-arg]
    losses: list[float] = []
    for _ in range(3):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(image) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    return losses, image.tolist()


def an_image_is_trained_by_lbfgs(model: nn.Module, distribute: _Distribute) -> Any:
    return _an_image_is_trained(torch.optim.LBFGS, model, distribute)


def an_image_is_trained_by_adam(model: nn.Module, distribute: _Distribute) -> Any:
    return _an_image_is_trained(torch.optim.Adam, model, distribute)


def losses_have_learned_weights(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    log_variances = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), log_variances], lr=0.05)
    seen: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        for part in range(2):
            out = model(X + part)
            precision = torch.exp(-log_variances)
            both = torch.stack([F.cross_entropy(out, Y), out.square().mean()])
            loss = (precision * both + log_variances).sum()
            loss.backward()
            seen.append(loss.item() if part else 0.0)
        optimizer.step()
    return seen, log_variances.tolist(), weights(model)


def modules_around_stay_whole(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    before, after = _linear(5, 12, 12), _linear(6, 5, 3)
    parameters = [*before.parameters(), *model.parameters(), *after.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    seen: list[float] = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        losses = [after(torch.tanh(model(before(X * (part + 1))))).square().mean() for part in range(3)]
        for loss in losses:
            (loss / 3).backward()
        seen.append(nn.utils.clip_grad_norm_(parameters, 0.1).item())
        optimizer.step()
        seen += [loss.item() for loss in losses]
    return seen, weights(before), weights(model), weights(after)


def a_module_outside_has_an_optimizer_of_its_own(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    before = _linear(5, 12, 12)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(before.parameters(), lr=0.2)]
    for _ in range(3):
        F.cross_entropy(model(before(X)), Y).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    return weights(before), weights(model)


def gradients_on_both_sides_are_scaled(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    before = _linear(5, 12, 12)
    optimizer = torch.optim.AdamW([*before.parameters(), *model.parameters()], lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales: list[float] = []
    for step in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(before(X)), Y)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_([*before.parameters(), *model.parameters()], 0.02)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weights(before), weights(model)


def one_tensor_is_used_on_several_stages(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    scale = torch.full((5,), 1.5, requires_grad=True)
    shift = scale * 2
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    optimizer.zero_grad()
    hidden = model(X * shift.mean())
    ((hidden * scale + shift).square().mean() + (scale * 3).sum()).backward()
    gradient = scale.grad.tolist()  # type: ignore[union-attr]
    optimizer.step()
    return gradient, scale.tolist(), weights(model)


def a_graph_is_kept_for_a_second_backward(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    data = X.clone().requires_grad_()
    loss = model(torch.sin(data)).square().mean()
    loss.backward(retain_graph=True)
    first = data.grad.tolist()  # type: ignore[union-attr]
    loss.backward()
    second = data.grad.tolist()  # type: ignore[union-attr]
    data.grad = None
    model(torch.sin(data)).sum().backward()
    data.grad = None
    model(data).sum().backward()
    return first, second, data.grad.tolist(), [p.grad.tolist() for p in model.parameters()]  # type: ignore[union-attr]


def an_image_is_frozen_between_forward_and_backward(model: nn.Module, distribute: _Distribute) -> Any:
    distribute(model)
    data = X.clone().requires_grad_()
    seen: list[Any] = []
    for step in range(3):
        loss = model(data).square().mean()
        data.requires_grad_(step != 1)
        loss.backward()
        data.requires_grad_(True)
        seen.append(None if data.grad is None else data.grad.tolist())
        data.grad = None
    return seen, [p.grad.tolist() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "program",
    [
        fast_gradient_sign,
        a_perturbation_is_added,
        an_image_is_trained_by_lbfgs,
        an_image_is_trained_by_adam,
        losses_have_learned_weights,
        gradients_on_both_sides_are_scaled,
        modules_around_stay_whole,
        a_module_outside_has_an_optimizer_of_its_own,
        one_tensor_is_used_on_several_stages,
        a_graph_is_kept_for_a_second_backward,
        an_image_is_frozen_between_forward_and_backward,
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradient_flows_out_of_the_model(program: Any, num_ranks: int) -> None:
    same_everywhere(program, num_ranks)


def test_uses_on_both_sides_of_the_border_add_up() -> None:
    """In one process the sum of three or more has another order: equal but for rounding."""

    def program(model: nn.Module) -> torch.Tensor:
        data = X.clone().requires_grad_()
        (model(data).square().mean() + data.square().sum()).backward()
        assert data.grad is not None
        return data.grad

    wanted = program(mlp())
    for got in on_ranks(3, lambda model: program(farspan.distribute(model))):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def test_without_gradient_it_is_a_plain_input() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        data = X.clone().requires_grad_()
        with torch.no_grad():
            return model(data).tolist(), data.grad

    same_everywhere(program)


def test_a_write_before_the_step_is_a_named_error() -> None:
    def program(model: nn.Module) -> None:
        farspan.distribute(model)
        data = X.clone().requires_grad_()
        loss = model(data).sum()
        with torch.no_grad():
            data.add_(1)
        loss.backward()
        farspan.flush()

    with pytest.raises(RecordError, match="written to since"):
        on_ranks(2, program)


def test_ranks_with_different_ones_are_named() -> None:
    models = [mlp() for _ in range(2)]

    def program(rank: int) -> None:
        data = (X + rank).requires_grad_()
        farspan.distribute(models[rank])(data).sum().backward()
        farspan.flush()

    with pytest.raises(DivergenceError, match="checksum"):
        run_threads(2, program)
