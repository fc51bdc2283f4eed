"""Weights that others have saved: each rank reads its part, and what does not fit is said on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import CheckpointError
from farspan.place.deferred.construction import CONSTRUCTION

WIDTH = 96


class Net(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.body[2].weight  # type: ignore[assignment]


def saved(folder: Path, *, num_files: int = 1, changes: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """A folder with a saved net, and its state: a tied weight has one name there."""
    torch.manual_seed(7)
    state = {name: item.clone() for name, item in Net().state_dict().items() if name != "head.weight"}
    stored = {name: item for name, item in {**state, **(changes or {})}.items() if item is not None}
    names = list(stored)
    if num_files == 1:
        save_file(stored, folder / "model.safetensors")
        return state
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        part = names[number::num_files]
        file = f"model-{number}.safetensors"
        save_file({name: stored[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


def deferred(dtype: torch.dtype = torch.float32) -> Net:
    with farspan.deferred_init():
        return Net().to(dtype)


def is_loaded(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return all(torch.equal(found[name], item.to(found[name].dtype)) for name, item in state.items())


@pytest.mark.parametrize("num_files", [1, 3])
def test_into_a_model_without_data_and_one_with(num_files: int, tmp_path: Path) -> None:
    state = saved(tmp_path, num_files=num_files)
    model, plain = deferred(torch.bfloat16), Net()
    for each in (model, plain):
        report = farspan.load_pretrained(each, tmp_path)
        assert report.missing == report.unexpected == ()
    assert CONSTRUCTION.memory_of(model.head.weight) is not None, "it was not read"
    assert is_loaded(farspan.distribute(model), state) and model.head.weight is model.body[2].weight
    assert is_loaded(plain, state)


def test_after_distribute_each_rank_reads_its_own(tmp_path: Path) -> None:
    state = saved(tmp_path, num_files=2)

    def on_rank(rank: int) -> bool:
        torch.manual_seed(rank)
        model = farspan.distribute(Net(), plan={"body": "rank:0", "body.2": "rank:1", "head": "rank:1"})
        farspan.load_pretrained(model, tmp_path)
        return is_loaded(model, state)

    assert run_threads(2, on_rank) == [True, True]


def test_what_is_missing_and_unexpected_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = saved(tmp_path, changes={"body.0.bias": None, "other.weight": torch.ones(3)})
    model = deferred()
    report = farspan.load_pretrained(model, tmp_path)
    assert report.missing == ("body.0.bias",) and report.unexpected == ("other.weight",)
    said = capfd.readouterr().err
    assert "does not have body.0.bias of Net" in said and "has other.weight, which Net does not have" in said
    state.pop("body.0.bias")
    assert is_loaded(model, state)


def test_the_prefix_of_a_base_model_may_be_left_out(tmp_path: Path) -> None:
    state = saved(tmp_path)
    short = {name.removeprefix("body."): item for name, item in state.items()}
    save_file(short, tmp_path / "model.safetensors")
    model = deferred()
    assert farspan.load_pretrained(model, tmp_path).missing == ()
    assert is_loaded(model, state)


def test_another_shape_loads_nothing(tmp_path: Path) -> None:
    saved(tmp_path, changes={"body.0.bias": torch.ones(5)})
    model = Net()
    before = {name: item.clone() for name, item in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"body.0.bias of the model is \[96\], and .* is \[5\]"):
        farspan.load_pretrained(model, tmp_path)
    assert is_loaded(model, before)


def test_files_that_are_missing_damaged_or_outside(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(CheckpointError, match="no saved model"):
        farspan.load_pretrained(model, tmp_path)
    saved(tmp_path, num_files=2)
    whole = (tmp_path / "model-1.safetensors").read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:4]):
        (tmp_path / "model-1.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model-1\.safetensors cannot be read"):
            farspan.load_pretrained(model, tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors cannot be read"):
        farspan.load_pretrained(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"body.0.bias": "../model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names '\.\./model\.safetensors'"):
        farspan.load_pretrained(model, tmp_path)


def test_a_file_that_changes_before_it_is_read_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    model = deferred()
    farspan.load_pretrained(model, tmp_path)
    save_file({"other": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(farspan.FarspanError, match=r"cannot be read from .* where it was found"):
        farspan.distribute(model)


def test_a_rank_that_has_no_files_is_named_on_all(tmp_path: Path) -> None:
    saved(tmp_path)

    def on_rank(rank: int) -> str:
        model = farspan.distribute(Net(), stages=2)
        with pytest.raises(CheckpointError) as caught:
            farspan.load_pretrained(model, tmp_path if rank == 0 else tmp_path / "nothing")
        return str(caught.value)

    first, second = run_threads(2, on_rank)
    assert "rank 1: there is no saved model in" in first and "there is no saved model in" in second


def test_from_pretrained_reads_nothing_before_distribute(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    saved_model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=128))
    saved_model.save_pretrained(tmp_path, max_shard_size="200KB")
    plain = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with farspan.deferred_init():
        model = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert CONSTRUCTION.memory_of(model.lm_head.weight) is not None
    model = farspan.distribute(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert is_loaded(model, plain.state_dict())
