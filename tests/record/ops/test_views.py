"""`x.unsqueeze_(0)`, `x.t_()`: x alone is another view of its memory, and who shares it keeps its shape. A write shows
in views, which have the gradient that they have in torch, added up in its order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.loop import X, mlp, on_ranks, same_everywhere
from torch import Tensor, nn

import farspan
from farspan.errors import RecordError


def shapes_of_outputs_change(model: nn.Module, distribute: Any) -> Any:
    """Views of a module's result: they kept their shape, and so broadcast to something else."""
    distribute(model)
    h = model(X)
    column, row = h[:, :1], h.detach()
    column.squeeze_(1)
    row.t_()
    other = h.t()
    h.transpose_(0, 1).unsqueeze_(0)
    shapes = [tuple(item.shape) for item in (column, row, other, h)]
    weighted = h * torch.arange(1.0, 6).view(5, 1)
    (weighted.square().sum() + (column * torch.arange(6.0)).sum()).backward()
    gradients = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        other.mul_(2)
    return shapes, h.stride(), h.is_contiguous(), gradients, h.tolist(), column.tolist(), row.tolist(), other.tolist()


def shapes_of_memory_change(model: nn.Module, distribute: Any) -> Any:
    """The memory of a parameter and of a gradient, by another name; the parameter keeps its shape."""
    distribute(model)
    model(X).sum().backward()
    seen = []
    for p in model.parameters():
        assert p.grad is not None
        memory, gradient = p.data, p.grad.data
        memory.unsqueeze_(0)
        gradient.unsqueeze_(0)
        if p.dim() == 2:
            memory.transpose_(1, 2)
        memory[0, 0] += 1
        gradient.mul_(2)
        seen.append((tuple(p.shape), tuple(p.grad.shape), tuple(memory.shape), p.tolist(), p.grad.tolist()))
    return seen


def many_uses_after_a_write(model: nn.Module, distribute: Any) -> Any:
    """Three gradients come to what was written; which is added first depends on when the view is taken again."""
    distribute(model)
    h = model(X) + 0.1
    row, column = h[0], h[:, 1]
    h.mul_(0.5)
    loss = h.square().mean() + h.tanh().sum() + row.exp().sum() + h.sin().mean() + column.square().sum()
    loss.backward()
    return [p.grad.tolist() for p in model.parameters() if p.grad is not None]


def output_of_a_layer(model: nn.Module, distribute: Any) -> Any:
    """What a linear layer gives for sequences is a view: what comes to it is added up before what comes to others."""
    distribute(model)
    h = model(X.expand(3, *X.shape))
    row = h[0]
    h.mul_(0.5)
    (h.square().mean() + row.exp().sum() + h.sin().mean()).backward()
    row = (g := model(X.expand(3, *X.shape)))[1]
    row.mul_(0.5)
    (g.square().mean() + row.exp().sum() + g.sin().mean() + g[0].square().sum()).backward()
    return [p.grad.tolist() for p in model.parameters() if p.grad is not None]


def write_without_gradient(model: nn.Module, distribute: Any) -> Any:
    """A view of what is written under no_grad has the history that it had."""
    distribute(model)
    h = model(X) + 0.1
    row = h[0]
    with torch.no_grad():
        h.mul_(0.5)
    (h.square().mean() + row.exp().sum()).backward()
    return row.requires_grad, [p.grad.tolist() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "program",
    [
        shapes_of_outputs_change,
        shapes_of_memory_change,
        many_uses_after_a_write,
        output_of_a_layer,
        write_without_gradient,
    ],
    ids=lambda p: p.__name__,
)
def test_the_same_as_in_one_process(program: Any) -> None:
    same_everywhere(program, 2)


def retained_and_written(h: Tensor) -> None:
    h.retain_grad()
    h.mul_(0.5)


def hooked_and_written_through(h: Tensor) -> None:
    row = h[0]
    row.register_hook(lambda gradient: gradient)
    h.mul_(0.5)


def written_through_and_retained(h: Tensor) -> None:
    row = h[0]
    h.mul_(0.5)
    h.retain_grad()
    row.sum()


@pytest.mark.parametrize("program", [retained_and_written, hooked_and_written_through, written_through_and_retained])
def test_gradients_of_what_is_written_in_place_are_refused(program: Any) -> None:
    def on_rank(model: nn.Module) -> str:
        farspan.distribute(model)
        with pytest.raises(RecordError, match=r"a hook, or retain_grad\(\)") as error:
            program(model(X))
        return str(error.value)

    assert len(set(on_ranks(2, on_rank, mlp))) == 1


def test_another_shape_that_is_no_view_is_refused() -> None:
    def program(model: nn.Module) -> list[str]:
        farspan.distribute(model)
        found = []
        for change in (lambda: model(X).detach().resize_(3), lambda: parameter(model).t_()):
            with torch.no_grad(), pytest.raises(RecordError, match="gives another shape") as error:
                change()
            found.append(str(error.value).splitlines()[0])
        return found

    def parameter(model: nn.Module) -> Tensor:
        return next(p for p in model.parameters() if p.dim() == 2)

    assert len({tuple(found) for found in on_ranks(2, program, mlp)}) == 1
