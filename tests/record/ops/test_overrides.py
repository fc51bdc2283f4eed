"""Functions of torch that programs seldom call, and that recording got wrong: each as in one process."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.loop import X, same_everywhere
from torch import nn


def test_a_python_function_for_each_element() -> None:
    """`apply_` ended the process: torch looks for data where a run on fakes has none."""

    class Binary(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.detach() > 0).float().apply_(lambda value: 2 * value + 1)

    def program(model: nn.Module, distribute: Any) -> Any:
        last = nn.Linear(5, 2)
        nn.init.ones_(last.weight)
        nn.init.zeros_(last.bias)
        model = nn.Sequential(model, Binary(), last)
        distribute(model)
        seen: list[float] = []
        for _ in range(2):
            y = model(X)
            y.sum().backward()
            rounded = y.detach().clone()
            rounded.apply_(lambda value: [seen.append(value), round(value, 1)][1])
            rounded.map_(torch.ones(6, 2), lambda a, b: a + b)
            last.bias.data.apply_(lambda value: value + 1)
        return y.tolist(), rounded.tolist(), seen, last.bias.tolist()

    same_everywhere(program, 2)


def test_numbers_that_are_drawn_with_probability_zero_are_drawn() -> None:
    """`bernoulli(0)` was taken for a dropout that is off, and the generator stayed where it was."""

    def program(model: nn.Module, distribute: Any) -> Any:
        distribute(model)
        torch.manual_seed(0)
        y = model(X).detach()
        drawn = [y.bernoulli(0.0), torch.bernoulli(y.clone(), 0.0), y.clone().bernoulli_(y.sigmoid())]
        return [item.tolist() for item in drawn], torch.rand(2).tolist()

    same_everywhere(program, 2)


def test_shapes_of_others_sizes_and_dtypes() -> None:
    def program(model: nn.Module, distribute: Any) -> Any:
        distribute(model)
        y = model(X).detach()
        flat = y.clone().view(-1)
        flat.view_as(y).copy_(2 * y)
        alike = y.is_same_size(flat), torch.is_same_size(y, y + 1), y.is_pinned()
        seldom = [y.abs().to(dtype).tolist() for dtype in (torch.uint16, torch.uint32, torch.uint64)]
        return flat.norm().item(), alike, seldom, X[:, :5].reshape_as(y).tolist(), y[:1].expand_as(y).tolist()

    same_everywhere(program, 2)


def test_a_parameter_in_the_shape_of_another_tensor_is_written_where_it_is() -> None:
    """A view of that kind reached the parameter's memory, which other ranks do not have (`orthogonal_`)."""

    def program(model: nn.Module, distribute: Any) -> Any:
        distribute(model)
        weight = next(item for item in model.parameters() if item.dim() == 2)
        torch.manual_seed(0)
        nn.init.orthogonal_(weight)
        with torch.no_grad():
            weight.reshape_as(weight.detach().flatten()).mul_(0.5)
        loss = model(X).sum() + (weight.view_as(weight) * torch.ones(1, 1).expand_as(weight)).sum()
        loss.backward()
        return (
            loss.item(),
            [item.grad.tolist() for item in model.parameters() if item.grad is not None],
            [item.tolist() for item in model.parameters()],
        )

    same_everywhere(program, 2)
