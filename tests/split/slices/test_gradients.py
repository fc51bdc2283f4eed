"""Gradients in slices that a program views, keeps and exchanges: the numbers of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.split.slices.harness import Act, assert_close, first, run
from tests.wide.loops import loss_of

from farspan.record.parameters.gradients import Gradients

LOOPS: dict[str, Act] = {}


def loop(function: Act) -> Act:
    LOOPS[function.__name__] = function
    return function


@loop
def views(model: Any, optimizer: Any, step: int) -> Any:
    """What is written into the gradient, or added to it, is in a view of it, and the other way round."""
    if step < 4:
        return None
    weight = first(model)
    row, columns = weight.grad[0], model.blocks[1].b.weight.grad.t()
    seen = [float(row.norm())]
    weight.grad.mul_(2.0)
    seen.append(float(row.norm()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    seen += [float(row.norm()), float(columns.norm())]
    loss_of(model, step + 1).backward()
    seen += [float(row.norm()), float(columns.norm())]
    row.zero_()
    model.blocks[2].a.weight.grad[:, 1] *= 3.0
    return [*seen, float(weight.grad.norm()), float(model.blocks[2].a.weight.grad.norm())]


@loop
def views_of_what_was_cleared(model: Any, optimizer: Any, step: int) -> Any:
    """A gradient that no parameter has any more is a tensor like any other."""
    if step < 4:
        return None
    kept = first(model).grad
    optimizer.zero_grad()
    loss_of(model, step + 1).backward()
    row = kept[0]
    kept.mul_(2.0)
    return [float(row.norm()), float(kept.norm()), float(first(model).grad.norm())]


@loop
def exchanges(model: Any, optimizer: Any, step: int) -> None:
    if step >= 4:
        one, other = first(model), model.blocks[1].a.weight
        one.grad, other.grad = other.grad, one.grad


@loop
def puts_kept_ones_back(model: Any, optimizer: Any, step: int) -> Any:
    if step < 4:
        return None
    kept = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    for p, gradient in zip(model.parameters(), kept, strict=True):
        p.grad = gradient * 0.1
    optimizer.step()
    for p, gradient in zip(model.parameters(), kept, strict=True):
        p.grad = gradient
    return [float(gradient.norm()) for gradient in kept]


@loop
def keeps_them_while_parameters_come_home(model: Any, optimizer: Any, step: int) -> Any:
    """What comes home knows them, also those that the program has since before the latest backward."""
    if step < 4:
        return None
    kept = first(model).grad
    loss_of(model, step + 1).backward()
    with torch.no_grad():
        first(model).mul_(0.9)
    seen = [float(kept.norm())]
    loss_of(model, step + 2).backward()
    return [*seen, float(kept.norm())]


@pytest.mark.parametrize("name", LOOPS)
def test_one_process_within_rounding(name: str) -> None:
    wanted, found = run(LOOPS[name])
    for seen, _ in found:
        assert_close(seen, wanted)
    assert max(found[0][1]) >= 8, "the loop has been in slices"


def test_a_gradient_in_slices_is_cleared_where_it_is_and_another_one_is_set_at_home() -> None:
    class AtHomeError(Exception):
        pass

    def come_home(reason: str) -> None:
        raise AtHomeError(reason)

    cleared: list[Any] = []
    owned = SimpleNamespace(slices={"w": ()}, come_home=come_home)
    recorder = SimpleNamespace(
        hooks=SimpleNamespace(commit=lambda: None), splitting=SimpleNamespace(matrices=SimpleNamespace(owned=owned))
    )
    own = torch.ones(2)
    gradients: Any = SimpleNamespace(recorder=recorder, get=lambda placed: own, _clear_slices=cleared.append)
    placed: Any = SimpleNamespace(name="w")
    Gradients.set(gradients, placed, None)
    assert cleared == [placed]
    Gradients.set(gradients, placed, own)
    with pytest.raises(AtHomeError, match=r"w\.grad is set"):
        Gradients.set(gradients, placed, torch.ones(2))
    assert cleared == [placed]
