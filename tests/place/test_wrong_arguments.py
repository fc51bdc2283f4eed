"""Arguments of `distribute` that cannot be: an error in three parts, on every rank, before anything is placed."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farspan
from farspan.errors import FarspanError, PlanError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"schedule": "1f1n"}, "\"schedule\" cannot be '1f1n'"),
        ({"gradient_reduction": "mean"}, "\"gradient_reduction\" cannot be 'mean'"),
        ({"remat": "0.*"}, "\"remat\" cannot be '0.*'"),
        ({"plan": ["rank:0", "rank:1"]}, "is no plan"),
        ({"plan": "automatic"}, "automatic cannot be read"),
        ({"plan": {"0": "rnak:0", "1": 1}}, "'rnak:0' is not a place"),
        ({"plan": {"0": 0, "1": 9}}, "stage 1 of the plan ('1') is on 'rank:9', a rank that does not exist"),
        ({"stages": "all"}, "stages='all' is not a number of stages"),
        ({"stages": 3, "plan": {"0": 0, "1": 1}}, "stages=3 was asked for, the plan has 2"),
        ({"micro_batches": "8"}, "micro_batches='8' is no number"),
        ({"max_memory": "1GX"}, "max_memory='1GX' is no size"),
        ({"seed": "a"}, "seed='a' is no seed"),
        ({"mesh": "dp"}, "mesh='dp' is no DeviceMesh"),
    ],
)
def test_every_rank_says_what_why_and_what_to_try(arguments: dict[str, Any], what: str) -> None:
    said: dict[int, FarspanError] = {}

    def program(rank: int) -> None:
        try:
            farspan.distribute(net(), **arguments)
        except FarspanError as error:
            said[rank] = error
            raise

    with pytest.raises(PlanError):
        run_threads(2, program)
    assert sorted(said) == [0, 1]
    for error in said.values():
        assert what in error.what and error.why and error.hint
        files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
        assert files.isdisjoint({"<string>", "dataclasses.py"})


def test_more_ranks_than_modules_names_the_modules_and_the_other_ways() -> None:
    with pytest.raises(PlanError) as caught:
        run_threads(2, lambda rank: farspan.distribute(nn.Linear(2, 2)))
    assert caught.value.why == "1 module with parameters can be placed on its own: the whole model."
    assert caught.value.hint == (
        "farspan.distribute(model, stages=1), whose stages have several ranks; or farspan run -n 1, or data_parallel=2"
    )


def test_a_model_around_a_distributed_one_is_refused() -> None:
    """It was an error about an operation on a parameter's data, and named no call of `distribute`."""

    def program(rank: int) -> None:
        farspan.distribute(nn.Sequential(farspan.distribute(net()), nn.Linear(2, 2)))

    with pytest.raises(PlanError, match=r"'0\.0\.weight' is of a model that has been distributed already"):
        run_threads(2, program)


def test_distributed_data_parallel_is_refused_around_the_model_before_and_after() -> None:
    wrapped = nn.Module.__new__(DistributedDataParallel)  # which would ask for a process group
    nn.Module.__init__(wrapped)
    wrapped.module = net()
    with pytest.raises(PlanError, match="the model is in DistributedDataParallel") as caught:
        run_threads(2, lambda rank: farspan.distribute(wrapped))
    assert "data_parallel=2" in caught.value.hint
    with pytest.raises(PlanError, match="a distributed model is given to DistributedDataParallel"):
        run_threads(2, lambda rank: DistributedDataParallel(farspan.distribute(net())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_a_rank_has_not_is_named() -> None:
    """It was torch's AssertionError, and said nothing of the plan."""
    plan = {"0": "rank:0", "1": "rank:1/cuda:0"}
    with pytest.raises(PlanError) as caught:
        run_threads(2, lambda rank: farspan.distribute(net(), plan=plan))
    assert caught.value.what == "stage 1 of the plan is on 'rank:1/cuda:0', which rank 1 has not."
    assert caught.value.why.startswith("torch says: ") and caught.value.hint.startswith('"rank:1"')
