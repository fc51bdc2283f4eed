from __future__ import annotations

import pytest
import torch
from torch import nn

from farspan.errors import PlanError
from farspan.plan import resolve
from farspan.planner import auto_plan
from farspan.profile import tied, units_of

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class GPT(nn.Module):
    """Direct parameter, embedding, list of blocks, tied head: what planning has to cope with."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(16, WIDTH))
        self.embed = nn.Embedding(64, WIDTH)
        self.drop = nn.Dropout()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight


def _names(model: nn.Module, num_stages: int) -> list[str]:
    return [unit.name for unit in units_of(model, num_stages)]


def _costs(model: nn.Module, num_stages: int) -> dict[str, float]:
    return {unit.name: unit.cost for unit in units_of(model, num_stages)}


def test_blocks_in_a_list_stay_whole() -> None:
    assert _names(GPT(8), 2) == ["position", "embed", *(f"blocks.{i}" for i in range(8)), "norm", "head"]


def test_blocks_too_heavy_for_the_number_of_stages_are_opened() -> None:
    names = _names(GPT(2), 2)
    assert "blocks.0" not in names
    assert "blocks.0.attention" in names  # whole: its own code uses the weights of its children
    assert "blocks.0.mlp.1" not in names  # no parameters: runs where its input is


def test_what_is_to_be_apart_is_a_unit_of_its_own() -> None:
    names = [unit.name for unit in units_of(GPT(8), 2, ["blocks.3.mlp.2", "blocks.4.*", "drop"])]
    assert {"blocks.3.norm", "blocks.3.mlp.0", "blocks.3.mlp.2", "blocks.4.attention", "blocks.5"} <= set(names)
    assert "blocks.3.attention.in_proj_weight" not in names  # it cannot be
    with pytest.raises(PlanError, match=r"the hint 'block\.\*' matches nothing"):
        units_of(GPT(8), 2, ["block.*"])


def test_the_parameters_of_a_list_are_placed_one_by_one() -> None:
    model = nn.ModuleDict({"weights": nn.ParameterList([torch.zeros(3, 4), torch.zeros(4, 3)])})
    model["more"] = nn.ParameterDict({"a": torch.zeros(2, 2)})
    assert _costs(model, 3) == {"weights.0": 12.0, "weights.1": 12.0, "more.a": 4.0}


def test_a_sequential_too_short_for_the_stages_is_opened_down_to_its_layers() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert _names(model, 3) == ["0.0", "0.2", "1"]


def test_a_model_of_one_layer_is_one_unit() -> None:
    assert _costs(nn.Linear(3, 2), 1) == {"": 8.0}
    assert _names(nn.Linear(3, 2), 4) == [""]
    assert units_of(nn.ReLU(), 2) == []


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_blocks", [1, 2, 6, 8])
def test_every_automatic_plan_owns_every_parameter_once(num_stages: int, num_blocks: int) -> None:
    model = GPT(num_blocks)
    found = units_of(model, num_stages)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(unit.num_parameters for unit in found) == total
    assert sum(unit.parameter_bytes for unit in found) == 4 * total
    plan = auto_plan(found, num_stages=num_stages, devices=[f"rank:{rank}" for rank in range(num_stages)])
    parameters, aliases = tied(model)
    resolved = resolve(
        plan,
        parameters=parameters,
        aliases=aliases,
        modules=[name for name, _ in model.named_modules()],
        world_size=num_stages,
    )
    assert list(resolved.owner) == parameters
    assert sum(plan.estimates["num_parameters"]) == total


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(8, 2), (8, 4), (8, 8), (6, 3), (12, 4)])
def test_blocks_that_divide_evenly_are_leaves_of_one_stage(num_blocks: int, num_stages: int) -> None:
    model = GPT(num_blocks)
    devices = [f"rank:{i}" for i in range(num_stages)]
    plan = auto_plan(units_of(model, num_stages), num_stages=num_stages, devices=devices)
    per_stage = num_blocks // num_stages
    assert [plan.placement[f"blocks.{i}"] for i in range(num_blocks)] == [i // per_stage for i in range(num_blocks)]


def test_tied_parameters_cost_compute_where_they_are_used_and_bytes_once() -> None:
    found = {unit.name: unit for unit in units_of(GPT(8), 2)}
    assert (found["embed"].cost, found["embed"].num_parameters) == (0.0, 64 * WIDTH)
    assert (found["head"].cost, found["head"].num_parameters, found["head"].parameter_bytes) == (64.0 * WIDTH, 0, 0)


def test_tied_names_follow_the_order_of_the_model() -> None:
    parameters, aliases = tied(GPT(1))
    assert parameters == [name for name, _ in GPT(1).named_parameters()]
    assert aliases == {"head.weight": "embed.weight"}


def test_a_module_registered_twice_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model.append(model[0])
    assert _names(model, 3) == ["0", "1", "2"]
    assert tied(model)[1] == {"3.weight": "0.weight", "3.bias": "0.bias"}


def test_layers_of_a_convolutional_network_cost_alike_where_channels_double_and_resolution_halves() -> None:
    model = nn.Sequential(*(nn.Conv2d(width, width, 3, bias=False) for width in (64, 128, 256)))
    assert len(set(_costs(model, 1).values())) == 1
    assert _costs(model, 1)["2"] == 16 * 9 * 256 * 256


def test_a_convolution_of_patches_costs_what_its_weights_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4, bias=False), nn.Conv1d(8, 8, 3, bias=False))
    assert _costs(model, 1) == {"0": 3 * 8 * 16.0, "1": 8 * 8 * 3.0}


def test_unknown_modules_cost_their_parameters() -> None:
    class Mystery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(4, 3, 2))
            self.activation = nn.GELU()

    assert _costs(nn.Sequential(Mystery(), nn.Linear(2, 2)), 2) == {"0": 24.0, "1": 6.0}


def test_parametrized_layers_stay_whole() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert _names(model, 2) == ["0", "1"]


def test_parameters_without_a_shape_yet_are_a_plan_error() -> None:
    with pytest.raises(PlanError, match=r"'0\.weight' has no shape yet"):
        units_of(nn.Sequential(nn.LazyLinear(3)), 1)


def test_models_on_the_meta_device_are_estimated_too() -> None:
    with torch.device("meta"):
        model = GPT(8)
    assert _names(model, 2) == _names(GPT(8), 2)


class _Holder(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.layer = weight, nn.Linear(WIDTH, WIDTH)


def test_a_parameter_of_two_modules_that_are_opened_is_one_unit() -> None:
    weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert _names(nn.Sequential(_Holder(weight), _Holder(weight)), 16) == ["0.weight", "0.layer", "1.layer"]
