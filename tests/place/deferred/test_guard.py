"""A model built without data that the program uses before it is distributed: right numbers, never made-up ones."""

from __future__ import annotations

import copy
import ctypes
import io

import pytest
import torch
from torch import nn

import farspan
from farspan.place.deferred.construction import CONSTRUCTION

WIDTH = 96


def built(*, deferred: bool = True) -> nn.Sequential:
    torch.manual_seed(2)
    if not deferred:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with farspan.deferred_init():
        return built(deferred=False)


def has_data(tensor: torch.Tensor) -> bool:
    return CONSTRUCTION.memory_of(tensor) is None


def test_it_can_be_called_and_trained_at_once() -> None:
    model, plain = built(), built(deferred=False)
    assert isinstance(model[0].get_parameter("weight"), nn.Parameter) and not has_data(model[0].get_parameter("weight"))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        each(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert type(model[0].get_parameter("weight")) is nn.Parameter


def test_only_what_is_used_is_made_and_questions_about_shapes_make_nothing() -> None:
    model = built()
    sum(item.numel() for item in model.parameters())
    model.requires_grad_(False).train().eval().zero_grad()
    repr(model)
    assert not has_data(model[0].get_parameter("weight")) and not has_data(model[1].get_parameter("weight"))
    assert torch.isfinite(model[0].get_parameter("weight")).all()
    assert has_data(model[0].get_parameter("weight")) and not has_data(model[1].get_parameter("weight"))


@pytest.mark.parametrize(
    "use",
    [
        lambda item: item.detach().numpy().copy(),
        lambda item: torch.tensor(item.tolist()),
        lambda item: copy.deepcopy(item).detach(),
        lambda item: item.data.clone(),
        lambda item: torch.from_dlpack(item.detach()).clone(),
        lambda item: _saved(item),
        lambda item: torch.stack(Listed([item, item]))[0],
        lambda item: (
            torch.frombuffer(bytearray(ctypes.string_at(item.data_ptr(), WIDTH * WIDTH * 4)), dtype=item.dtype)
            .view(WIDTH, WIDTH)
            .clone()
        ),
        lambda item: torch.from_dlpack(torch.to_dlpack(item.detach())).clone(),
        lambda item: torch.vmap(lambda row: row * 1)(item),
        lambda item: torch.func.grad(lambda weight: weight.square().sum() / 2)(item),
        lambda item: torch.vmap(lambda row: item * 1 + row)(torch.zeros(2, 1))[0],
        lambda item: nn.Parameter(item).detach(),
        lambda item: _made_a_parameter_in_a_mode(item).detach(),
    ],
    ids=[
        "numpy",
        "tolist",
        "deepcopy",
        "data",
        "dlpack",
        "save",
        "listed",
        "data_ptr",
        "to_dlpack",
        "vmap",
        "func.grad",
        "in vmap",
        "parameter",
        "parameter in a mode",
    ],
)
def test_every_way_to_its_data_makes_them(use: object) -> None:
    plain = built(deferred=False)[0].get_parameter("weight")
    assert torch.equal(torch.as_tensor(use(built()[0].get_parameter("weight"))), plain)  # type: ignore[operator]


def _made_a_parameter_in_a_mode(item: torch.Tensor) -> nn.Parameter:
    with torch.device("cpu"):
        return nn.Parameter(item)


def _saved(item: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save({"item": item}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["item"].detach()


class Listed(list[torch.Tensor]):
    """Tensors in a list of a program's own class."""


def test_what_is_made_under_autocast_is_made_as_it_was_to_be() -> None:
    def build() -> nn.Linear:
        torch.manual_seed(2)
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight.data = layer.weight.data @ layer.weight.data
        return layer

    with farspan.deferred_init():
        layer = build()
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, WIDTH))
    assert torch.equal(layer.weight, build().weight)


def test_a_model_built_in_two_goes() -> None:
    torch.manual_seed(3)
    with farspan.deferred_init():
        first = nn.Linear(WIDTH, WIDTH)
    with farspan.deferred_init():
        model = nn.Sequential(first, nn.Linear(WIDTH, WIDTH))
        first.weight.data.mul_(2)
    assert not has_data(first.weight)
    model = farspan.distribute(model)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert torch.equal(model[0].get_parameter("weight"), plain[0].get_parameter("weight") * 2) and torch.equal(
        model[1].get_parameter("weight"), plain[1].get_parameter("weight")
    )


def test_a_constructor_that_raises_leaves_nothing_strange() -> None:
    kept: list[nn.Module] = []

    def build() -> nn.Module:
        kept.append(nn.Linear(WIDTH, WIDTH))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        farspan.distribute(build)
    assert torch.isfinite(kept[0](torch.ones(1, WIDTH))).all()
    assert torch.ones(WIDTH, WIDTH).sum() == WIDTH * WIDTH


def test_tensors_of_torch_func_that_the_program_keeps_are_no_obstacle() -> None:
    kept: list[torch.Tensor] = []
    torch.vmap(lambda row: (kept.append(row), row.sum())[1])(torch.ones(3, 4))
    with farspan.deferred_init():
        layer = nn.Linear(64, 128)
    assert torch.equal(layer.weight, layer.weight.detach().clone())
