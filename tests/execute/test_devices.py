"""Which device "rank:1" stands for is what that rank says, not what this process would compute on."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan import devices
from farspan.errors import PlanError
from farspan.execute.process.world import current_engine
from farspan.execute.teams import team_at, worker_at
from farspan.place import places
from farspan.plan import Place, Team, Worker


def test_a_rank_alone_stands_for_the_device_that_it_has_told() -> None:
    told = ["cpu", "cuda:1"]
    assert worker_at(Place(rank=1), told) == Worker(1, "cuda:1")
    assert worker_at(Place(rank=1, device="cpu"), told) == Worker(1, "cpu")
    assert team_at((Place(rank=0), Place(rank=1)), told) == Team((Worker(0, "cpu"), Worker(1, "cuda:1")))


def test_a_device_named_twice_is_an_error() -> None:
    with pytest.raises(PlanError, match="names a device twice"):
        team_at((Place(rank=1), Place(rank=1, device="cuda:1")), ["cpu", "cuda:1"])


def test_ranks_tell_their_devices_when_a_model_is_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 computes on another device than rank 0: the same stages on both."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    monkeypatch.setattr(places, "current_device", lambda: torch.device("cpu", current_rank()))

    def program(rank: int) -> list[str]:
        farspan.distribute(models[rank], measure=False)
        engine = current_engine()
        assert engine is not None
        assert engine.devices == ["cpu:0", "cpu:1"]
        return [team.leader.device for team in engine.teams]

    assert run_threads(2, program) == [["cpu:0", "cpu:1"]] * 2


def current_rank() -> int:
    return farspan.rank()


def test_a_process_without_an_accelerator_computes_on_its_cpu() -> None:
    if devices.has_accelerator():
        pytest.skip("this machine has an accelerator")
    assert devices.current_device() == devices.CPU
    assert devices.device_types() == ("cpu",) and devices.accelerators() == []
    assert devices.name_of_device(devices.CPU) == "cpu" and devices.memory_bytes(devices.CPU) > 0
    assert not devices.is_in_use() and devices.default_generators() == ()
    with devices.on_device(devices.CPU):
        devices.wait_for_current_stream()
