"""Which device "rank:1" stands for is what that rank says, not what this process would compute on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan import devices
from farspan.errors import PlanError
from farspan.execute.process.world import current_engine
from farspan.execute.slices.parts import joined
from farspan.execute.step.executor import Executor
from farspan.execute.teams import on_device, team_at, worker_at
from farspan.execute.weights.reductions import as_absent
from farspan.graph import Edge, Meta
from farspan.place import places
from farspan.plan import Place, RankDevices, Team, Worker, are_direct


def test_a_rank_alone_stands_for_the_device_that_it_has_told() -> None:
    told = [RankDevices(), RankDevices(own="cuda:1")]
    assert worker_at(Place(rank=1), told) == Worker(1, "cuda:1")
    assert worker_at(Place(rank=1, device="cpu"), told) == Worker(1, "cpu")
    assert team_at((Place(rank=0), Place(rank=1)), told) == Team((Worker(0, "cpu"), Worker(1, "cuda:1")))


def test_a_device_named_twice_is_an_error() -> None:
    with pytest.raises(PlanError, match="names a device twice"):
        team_at((Place(rank=1), Place(rank=1, device="cuda:1")), [RankDevices(), RankDevices(own="cuda:1")])


def test_ranks_tell_their_devices_when_a_model_is_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 computes on another device than rank 0: the same stages on both."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    monkeypatch.setattr(places, "current_device", lambda: torch.device("cpu", current_rank()))

    def program(rank: int) -> list[str]:
        farspan.distribute(models[rank], measure=False)
        engine = current_engine()
        assert engine is not None
        assert [each.own for each in engine.devices] == ["cpu:0", "cpu:1"]
        return [team.leader.device for team in engine.teams]

    assert run_threads(2, program) == [["cpu:0", "cpu:1"]] * 2


@pytest.mark.parametrize(
    ("current", "local", "wanted"),
    [
        ("0 0 0 0", "0 1 2 3", "0 1 0 1"),  # nobody has said where it computes
        ("0 1 0 1", "0 1 2 3", "0 1 0 1"),
        ("1 0", "0 1", "1 0"),  # on one machine, where one has
        ("1 1", "0 1", "1 1"),
        ("0 0|0 0", "0 1|0 1", "0 1|0 1"),  # two machines
        ("0 1|0 0", "0 1|0 1", "0 1|0 1"),
    ],
)
def test_ranks_that_have_set_no_device_get_one_each(current: str, local: str, wanted: str) -> None:
    told: list[tuple[str, str, int, list[str]]] = []
    for machine, (devices_here, numbers) in enumerate(zip(current.split("|"), local.split("|"), strict=True)):
        for device, number in zip(devices_here.split(), numbers.split(), strict=True):
            told.append((f"cuda:{device}", "nccl", int(number), [f"{machine}/0", f"{machine}/1"]))
    found = [each.own.removeprefix("cuda:") for each in places.devices_of_ranks(told)]
    assert found == wanted.replace("|", " ").split()


def test_what_two_ranks_share_goes_by_the_host() -> None:
    def told(*ids: str, backend: str = "nccl") -> RankDevices:
        return RankDevices(own="cuda:0", backend=backend, ids=ids)

    workers = Worker(0, "cuda:0"), Worker(1, "cuda:0")
    assert are_direct(*workers, [told("a"), told("b")])
    assert not are_direct(*workers, [told("a"), told("a")])
    assert not are_direct(*workers, [told("a"), told("b", backend="")])
    assert not are_direct(*workers, [told("a", backend=""), told("b", backend="")])
    assert not are_direct(workers[0], Worker(1, "cpu"), [told("a"), told("b")])
    assert not are_direct(*workers, [])


def current_rank() -> int:
    return farspan.rank()


def test_a_process_without_an_accelerator_computes_on_its_cpu() -> None:
    if devices.has_accelerator():
        pytest.skip("this machine has an accelerator")
    assert devices.current_device() == devices.CPU
    assert devices.device_types() == ("cpu",) and devices.accelerators() == []
    assert devices.name_of_device(devices.CPU) == "cpu" and devices.memory_bytes(devices.CPU) > 0
    assert not devices.is_in_use() and devices.default_generators() == ()
    with on_device(devices.CPU):
        devices.wait_for_current_stream()


def test_an_absent_gradient_is_seen_before_it_goes_to_its_device() -> None:
    """On a device that is not the CPU nobody looks at it: "meta" stands for an accelerator."""
    edge = Edge("weight", Meta((2,), (1,), torch.float32, torch.device("cpu"), False), *[None, None])  # type: ignore[arg-type]
    channel = SimpleNamespace(target=Worker(0, "meta"), is_of_parameters=False)
    for is_there in (False, True):
        message: Any = SimpleNamespace(channel=channel, is_between_gpus=False, items=[edge], metas=[edge.meta])
        message.tensors = [torch.full((2,), torch.nan) if is_there else as_absent(edge, message)]
        channels = SimpleNamespace(wait=lambda *_: None, rank=0)
        executor: Any = SimpleNamespace(
            _be_at_leisure=lambda: None, channels=channels, gradients={}, takes_cpu=lambda: True
        )
        Executor._wait(executor, message, "")
        gradient = executor.gradients[edge]
        assert gradient.device.type == "meta" if is_there else gradient is None


def test_parts_of_different_devices_are_joined_where_the_whole_is() -> None:
    meta = Meta((2, 4), (4, 1), torch.float32, torch.device("meta"), False)
    layout: Any = SimpleNamespace(dim=1, sections=1)
    whole = joined(layout, SimpleNamespace(meta=meta), [torch.ones(2, 2), torch.ones(2, 2, device="meta")])  # type: ignore[arg-type]
    assert whole.device.type == "meta" and whole.shape == (2, 4)
    count = joined(layout, SimpleNamespace(meta=meta), [torch.ones(())] * 2)  # type: ignore[arg-type]
    assert count.device.type == "meta" and count.shape == ()
