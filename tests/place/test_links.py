"""Links between hosts are timed before the plan is made, and it minds them."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comm.local import LocalTransport
from tests.support.places import engine
from tests.support.ranks import run_threads
from torch import Tensor, nn

import farspan
from farspan.errors import DeadlineError
from farspan.place.repartition import gathered_profile as exchange
from farspan.place.repartition import link_speeds as timed
from farspan.place.repartition.link_speeds import links_of_hosts
from farspan.profile import HostLink, RankDevice, cluster_of_ranks


def transport_of(bytes_per_s: dict[frozenset[int], float]) -> type[LocalTransport]:
    """A transport on which messages between some pairs of ranks take their time."""

    class Paced(LocalTransport):
        def send(self, flat: Tensor, dst: int, channel: int) -> Any:
            time.sleep(flat.nbytes / bytes_per_s.get(frozenset((self.rank, dst)), float("inf")))
            return super().send(flat, dst, channel)

    return Paced


class Clocks:
    """A clock for each pair of ranks, which only what goes between them moves on."""

    def __init__(self, seconds_of: Callable[[frozenset[int], int], float]) -> None:
        self.seconds_of = seconds_of
        self._now: dict[frozenset[int], float] = defaultdict(float)
        self._here = threading.local()

    def perf_counter(self) -> float:
        """The time of the pair that this thread has just had to do with."""
        return self._now[self._here.pair]

    def transport(self) -> type[LocalTransport]:
        clocks = self

        class Paced(LocalTransport):
            def send(self, flat: Tensor, dst: int, channel: int) -> Any:
                pair = clocks._here.pair = frozenset((self.rank, dst))
                clocks._now[pair] += clocks.seconds_of(pair, flat.nbytes)
                return super().send(flat, dst, channel)

            def receive(self, flat: Tensor, src: int, channel: int) -> Any:
                clocks._here.pair = frozenset((self.rank, src))
                return super().receive(flat, src, channel)

        return Paced


def links(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], seconds_of: Callable[[frozenset[int], int], float]
) -> list[dict[str, HostLink]]:
    clocks = Clocks(seconds_of)
    monkeypatch.setattr(timed, "time", clocks)
    return run_threads(len(hosts), lambda rank: links_of_hosts(engine(), hosts), transport=clocks.transport())


def test_a_host_has_the_slower_one_of_its_two_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 on one host, 2 on the next, 3 and 4 on the third: timed are 0 > 2 and 2 > 3."""
    bytes_per_s = {frozenset((0, 2)): 40e6, frozenset((2, 3)): 80e6}
    found = links(monkeypatch, ["a", "a", "b", "c", "c"], lambda pair, size: size / bytes_per_s[pair])
    assert found == [found[0]] * 5
    rates = {host: link.bytes_per_s for host, link in found[0].items()}
    assert rates == {"a": pytest.approx(40e6, rel=1e-3), "b": rates["a"], "c": pytest.approx(80e6, rel=1e-3)}


def test_latency_is_that_of_a_small_message(monkeypatch: pytest.MonkeyPatch) -> None:
    found = links(monkeypatch, ["a", "b"], lambda pair, size: 30e-3 + size / 1e9)
    assert found[0]["a"].latency_s == pytest.approx(30e-3, rel=1e-3)


def test_one_host_has_no_links() -> None:
    assert run_threads(2, lambda rank: links_of_hosts(engine(), ["a", "a"])) == [{}, {}]


def test_who_does_not_answer_is_named() -> None:
    class Deaf(LocalTransport):
        def send(self, flat: Tensor, dst: int, channel: int) -> Any:
            return super().send(flat, dst, channel + 1)

    with pytest.raises(DeadlineError, match=r"rank \d, timing links between hosts, waited 1 s") as caught:
        run_threads(2, lambda rank: links_of_hosts(engine(), ["a", "b"]), transport=Deaf, deadline_s=1.0)
    assert "is stopped, very slow, or cannot be reached" in caught.value.why


def test_hosts_that_are_alike_have_the_slowest_link_of_theirs() -> None:
    devices = [RankDevice(host=host, kind="cpu", memory_bytes=8e9, speed=1.0) for host in "abc"]
    known = {"a": HostLink(bytes_per_s=2e9, latency_s=1e-3), "b": HostLink(bytes_per_s=3e9, latency_s=2e-3)}
    (only,) = cluster_of_ranks(devices, known)[0].classes
    assert (only.between_bytes_per_s, only.latency_s) == (2e9, 2e-3)


class Layer(nn.Module):
    """Takes its time, much more than a loaded machine adds to it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(40e-3)
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
    """Between the third and the fourth layer goes a MiB, which takes as long as nine layers."""
    widths, paced = [8, 8, 8, 4096, 8, 8, 8], transport_of({frozenset((0, 1)): 3e6})
    assert run_threads(2, lambda rank: cut(rank, widths), transport=paced) == [[0, 0, 0, 1, 1, 1]] * 2
    monkeypatch.setattr(exchange, "_host", lambda: f"host {engine().rank}")
    for found in run_threads(2, lambda rank: cut(rank, widths), transport=paced):
        assert found in ([0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1])


def test_a_transfer_that_a_device_waits_for_is_watched_and_no_other_is() -> None:
    watched: list[Any] = []
    waits = SimpleNamespace(add=lambda work, late: watched.append((work, type(late()))))
    here: Any = SimpleNamespace(rank=0, deadline_s=1.0, channels=SimpleNamespace(device_waits=waits))
    plain: Any = SimpleNamespace(wait=lambda limit_s: None)
    of_device: Any = SimpleNamespace(wait=lambda limit_s: None, has_begun=lambda: True, is_done=lambda: False)
    timed._wait(plain, "a message", 1, here)
    assert watched == []
    timed._wait(of_device, "a message", 1, here)
    assert watched == [(of_device, DeadlineError)]
