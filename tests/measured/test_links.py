"""Links between hosts are timed before the plan is made, and it minds them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from tests.support.places import engine
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import DeadlineError
from farspan.profile import HostLink, RankDevice, cluster_of_ranks
from farspan.runtime.media.local import LocalMedium
from farspan.runtime.replan import exchange, links_of_hosts

CPU = torch.device("cpu")


def medium_of(bytes_per_s: dict[frozenset[int], float]) -> type[LocalMedium]:
    """A road on which messages between some pairs of ranks take their time."""

    class Road(LocalMedium):
        def send(self, flat: Tensor, dst: int, channel: int) -> Any:
            time.sleep(flat.nbytes / bytes_per_s.get(frozenset((self.rank, dst)), float("inf")))
            return super().send(flat, dst, channel)

    return Road


def links(hosts: list[str], bytes_per_s: dict[frozenset[int], float]) -> list[dict[str, HostLink]]:
    return run_threads(len(hosts), lambda rank: links_of_hosts(engine(), hosts, CPU), medium=medium_of(bytes_per_s))


def test_a_host_has_the_slower_one_of_its_two_links() -> None:
    """Ranks 0 and 1 on one host, 2 on the next, 3 and 4 on the third: timed are 0 > 2 and 2 > 3."""
    found = links(["a", "a", "b", "c", "c"], {frozenset((0, 2)): 40e6, frozenset((2, 3)): 80e6})
    assert found == [found[0]] * 5
    rates = {host: link.bytes_per_s for host, link in found[0].items()}
    # A sleep is never too short, and that of a busy machine is too long.
    assert 20e6 < rates["a"] == rates["b"] < 41e6
    assert 1.2 * rates["a"] < rates["c"] < 82e6


def test_latency_is_that_of_a_small_message() -> None:
    class Late(LocalMedium):
        def send(self, flat: Tensor, dst: int, channel: int) -> Any:
            time.sleep(30e-3)
            return super().send(flat, dst, channel)

    found = run_threads(2, lambda rank: links_of_hosts(engine(), ["a", "b"], CPU), medium=Late)
    assert 30e-3 <= found[0]["a"].latency_s < 60e-3


def test_one_host_has_no_links() -> None:
    assert links(["a", "a"], {}) == [{}, {}]


def test_who_does_not_answer_is_named() -> None:
    class Deaf(LocalMedium):
        def send(self, flat: Tensor, dst: int, channel: int) -> Any:
            return super().send(flat, dst, channel + 1)

    with pytest.raises(DeadlineError, match=r"rank \d, timing links between hosts, waited 1 s") as caught:
        run_threads(2, lambda rank: links_of_hosts(engine(), ["a", "b"], CPU), medium=Deaf, deadline_s=1.0)
    assert "is stopped, very slow, or cannot be reached" in caught.value.why


def test_hosts_that_are_alike_have_the_slowest_link_of_theirs() -> None:
    devices = [RankDevice(host=host, kind="cpu", memory_bytes=8e9, speed=1.0) for host in "abc"]
    known = {"a": HostLink(bytes_per_s=2e9, latency_s=1e-3), "b": HostLink(bytes_per_s=3e9, latency_s=2e-3)}
    (only,) = cluster_of_ranks(devices, known)[0].classes
    assert (only.between_bytes_per_s, only.latency_s) == (2e9, 2e-3)


class Layer(nn.Module):
    """Takes its time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(20e-3)
        return self.layer(x)  # type: ignore[no-any-return]


def cut(rank: int, widths: list[int]) -> list[int]:
    """The rank of each layer after the first step."""
    torch.manual_seed(0)
    model = farspan.distribute(nn.Sequential(*(Layer(*pair) for pair in itertools.pairwise(widths))), measure=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(torch.ones(64, widths[0])).sum().backward()
    optimizer.step()
    plan = farspan.plan_of(model)
    return [plan.rank_of(plan.placement[str(number)]) for number in range(len(widths) - 1)]


def test_a_slow_link_between_hosts_is_minded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the third and the fourth layer goes a MiB, which takes as long as three layers."""
    widths, road = [8, 8, 8, 4096, 8, 8, 8], medium_of({frozenset((0, 1)): 20e6})
    assert run_threads(2, lambda rank: cut(rank, widths), medium=road) == [[0, 0, 0, 1, 1, 1]] * 2
    monkeypatch.setattr(exchange, "_host", lambda: f"host {engine().rank}")
    for found in run_threads(2, lambda rank: cut(rank, widths), medium=road):
        assert found in ([0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1])
