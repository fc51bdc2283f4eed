"""What farspan asks of NCCL, on stand-ins for NCCL and CUDA: ranks are threads of this process."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farspan.comm import nccl
from farspan.comm.channels import Channels
from farspan.comm.nccl import NcclTransport
from farspan.comm.router import Router
from farspan.errors import DeadlineError, FarspanError
from farspan.graph import Meta, Value
from farspan.plan import RankDevices, Team, Worker
from farspan.program import route
from farspan.program.program import Channel, Message

DEADLINE_S = 60.0
META = Meta((4,), (1,), torch.float32, "cpu", False)


class Cuda:
    """Two ranks of a group meet at their first transfer, as NCCL's do; each thread has a current device, by index."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.pairs: dict[str, threading.Barrier] = {}
        self.adding = threading.Lock()
        self.noted: dict[int, list[tuple[str, str, Any]]] = defaultdict(list)
        """By rank: what was done, in which group, and on which device."""

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.here.device = getattr(self.here, "device", None), str(device)
        yield
        self.here.device = before

    def group(self, store: str, rank: int, size: int, *, timeout: Any) -> Any:
        assert size == 2
        own = int(store.split()[rank])  # the sender is 0 of the two, the receiver 1
        met = [False]

        def transfer(kind: str) -> Any:
            if not met[0]:
                with self.adding:  # both ranks may come first
                    pair = self.pairs.setdefault(store, threading.Barrier(2))
                pair.wait(DEADLINE_S)
                met[0] = True
            self.noted[own].append((kind, store, self.here.device))
            return SimpleNamespace(wait=lambda: self.noted[own].append(("wait", store, self.here.device)))

        self.noted[own].append(("make", store, getattr(self.here, "device", None)))
        return SimpleNamespace(
            send=lambda flats, peer, tag: transfer("send"), recv=lambda flats, peer, tag: transfer("receive")
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(nccl, "nccl_group", found.group)
    monkeypatch.setattr(nccl.dist, "PrefixStore", lambda prefix, store: prefix)
    monkeypatch.setattr(torch.accelerator, "device_index", found.device)
    return found


class Side:
    """What channels ask of the side channel, which says who is late."""

    def __init__(self) -> None:
        self.waits = SimpleNamespace(until=lambda to_do, about: contextlib.nullcontext())
        self.late = SimpleNamespace(behind=lambda rank: ("", f"rank {rank} does not go on."))
        self.failed: list[BaseException] = []
        self.fail = self.failed.append
        self.has_ended = threading.Event()

    def on_failure(self, error: BaseException) -> None:
        self.failed.append(error)
        self.has_ended.set()


def channels_of(rank: int, deadline_s: float = DEADLINE_S, side: Any = None) -> Channels:
    """Of one rank."""
    router = Router(None, NcclTransport(None, rank))  # pyright: ignore[reportArgumentType]
    side = side or Side()
    return Channels(router, rank, deadline_s, side)


def all_channels(num_ranks: int, num_devices: int) -> set[Channel]:
    """Of workers that all send to each other, on a device on which tensors need no memory."""
    workers = [Worker(rank, f"meta:{device}") for rank in range(num_ranks) for device in range(num_devices)]
    told = [RankDevices(backend="nccl", ids=(f"{rank}/0", f"{rank}/1")) for rank in range(num_ranks)]
    between = route.Channels([Team((worker,)) for worker in workers], told).between
    found = {
        between(source, target, is_gradient=is_gradient)
        for source in workers
        for target in workers
        for is_gradient in (False, True)
        if source.rank != target.rank
    }
    return {channel for channel in found if channel is not None}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_channels_are_opened_in_one_order_each_on_its_own_device(cuda: Cuda, num_devices: int) -> None:
    wanted = all_channels(4, num_devices)

    def open_twice(rank: int) -> None:
        channels = channels_of(rank)
        channels.open(wanted)
        channels.open(wanted)  # the second step has nothing to open

    threads = [threading.Thread(target=open_twice, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "ranks wait for each other's next channel"
    ordered = sorted(wanted, key=lambda item: (item.source.rank, item.target.rank, item.number))
    for rank in range(4):
        noted: list[tuple[str, str, Any]] = []
        for source, target, number, _ in ordered:
            if rank in (source.rank, target.rank):
                kind, device = ("send", source.device) if rank == source.rank else ("receive", target.device)
                device = device.partition(":")[2]
                noted += [(done, f"{source.rank} {target.rank} {number}", device) for done in ("make", kind, "wait")]
        assert cuda.noted[rank] == noted


def test_a_rank_that_does_not_come_is_named(cuda: Cuda) -> None:
    words = "^rank 0, before the first task, waited 0.2 s for a channel of activations from rank 1"
    with pytest.raises(DeadlineError, match=words):
        channels_of(0, deadline_s=0.2).open(all_channels(2, 1))


def test_all_ranks_have_begun_the_step_before_a_channel_is_opened(cuda: Cuda) -> None:
    """One that records something else would never come, and nobody would say why."""
    channels = channels_of(0)

    def differ() -> None:
        raise FarspanError("ranks 0 and 1 differ")

    channels.agree = differ
    with pytest.raises(FarspanError, match="differ"):
        channels.open(all_channels(2, 1))
    assert not cuda.noted


def test_transfers_are_begun_and_awaited_on_the_device_of_their_tensor(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device == torch.device("cuda:1")

        def record(self) -> None:
            events.append(cuda.here.device)

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch, "Event", Event)
    transport = NcclTransport(None, 0)
    for key, end in (((0, 1, 0), 0), ((1, 0, 1), 1)):
        store = "{} {} {}".format(*key)
        cuda.pairs[store] = threading.Barrier(1)
        transport.groups[key] = cuda.group(store, end, 2, timeout=None)
    cuda.noted.clear()
    flat: Any = SimpleNamespace(device=torch.device("cuda:1"))
    transport.send(flat, 1, 0)
    receiving = transport.receive(flat, 1, 1)
    assert not receiving.has_begun()
    receiving.wait(DEADLINE_S)
    assert receiving.has_begun() and events == ["1"]
    noted = [(kind, device) for kind, _, device in cuda.noted[0]]
    assert noted == [("send", "1"), ("receive", "1"), ("wait", "1")]


class Standing:
    """A transfer for which a device waits from `begins` on; `ends` is when it ends."""

    def __init__(self) -> None:
        self.begins, self.ends, self.asked = threading.Event(), threading.Event(), threading.Event()

    def wait(self, deadline_s: float) -> None:
        pass

    def has_begun(self) -> bool:
        self.asked.set()
        return self.begins.is_set()

    def is_done(self) -> bool:
        return self.ends.is_set()


def test_a_device_that_waits_for_ever_is_an_error_on_all_ranks_that_says_for_what() -> None:
    side = Side()
    channels = channels_of(1, deadline_s=0.1, side=side)
    over, standing = Standing(), Standing()
    value = Value(META, 0, name="position")
    for work in (over, standing):
        message = Message(3, Channel(Worker(0, "cuda:0"), Worker(1, "cuda:0"), 0, True), [value])
        message.works, message.tensors = [work], [torch.empty(4)]
        channels.wait(message, [META], lambda: "rank 1, at task 2 (block 1),")  # the host goes on
    assert over.asked.wait(DEADLINE_S)
    over.ends.set()  # its device has not even come to the wait
    assert standing.asked.wait(DEADLINE_S) and not side.failed
    standing.begins.set()
    assert side.has_ended.wait(DEADLINE_S)
    told, ended = side.failed
    assert told is ended and isinstance(told, DeadlineError)
    assert f"rank 1, at task 2 (block 1), waited 0.1 s for {value.describe()} from rank 0" in str(told)
