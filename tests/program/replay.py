"""What every rank's host and GPU do in a step over NCCL, simulated from real programs without a GPU.

The calls of a host are those that the executor makes: it runs the program, on channels that only write them down. They
are simulated by NCCL's rules:

    host      goes from call to call; the first call on a communicator blocks it until the other end's host is at its
              own first call there, unless that communicator has been opened before
    device    runs what the host has queued, in order; a wait stands until its transfer has ended, a task until what
              it needs of another device of its rank has run
    channel   its transfers run one by one: the first send with the first receive, each after what its device had queued
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from tests.program.described import build_program
from tests.program.test_patterns import add, leaf

from farspan.execute.step import executor
from farspan.execute.step.executor import Executor
from farspan.graph import Backward, Graph
from farspan.plan import RankDevices, Team, Worker
from farspan.program.options import Settings
from farspan.program.program import Action, Channel, Message, Program

__all__ = ["HostCall", "chain", "host_calls", "stands_still"]


class HostCall(NamedTuple):
    """One call of a host: it posts a receive, lets its device wait for one, queues a task, or sends."""

    kind: Literal["post", "wait", "run", "send"]
    worker: Worker
    """Whose device."""
    current: torch.device | None
    """What torch takes for the current device meanwhile; None for its default."""
    channel: Channel | None = None
    task: int = 0
    """The sending task of a message, by which both ends know it; of a task that runs, what names it."""
    after: tuple[int, ...] = ()
    """What another device of the rank must have run before."""


class _Written:
    """Channels that write down what they are asked for."""

    def __init__(self, calls: list[HostCall]) -> None:
        self.calls = calls
        self.current: torch.device | None = None
        self.rank = 0
        self.opened: list[Channel] = []

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self.current = device
        yield
        self.current = None

    def note(self, kind: Any, worker: Worker, message: Message | None = None) -> None:
        channel, task = (message.channel, message.task) if message else (None, 0)
        self.calls.append(HostCall(kind, worker, self.current, channel, task))

    def open(self, channels: Iterable[Channel]) -> None:
        assert not self.calls
        self.opened += channels

    def post(self, message: Message, metas: Any, device: Any) -> None:
        self.note("post", message.channel.target, message)

    def wait(self, message: Message, metas: Any, waiting: Any) -> None:
        self.note("wait", message.channel.target, message)
        message.tensors = [_Nothing()] * len(metas)

    def send(self, message: Message, tensors: Any, metas: Any) -> None:
        self.note("send", message.channel.source, message)

    def has_arrived(self, message: Message) -> bool:
        return True  # a host does not wait for what comes to a GPU

    def wait_any(self, groups: Any, waiting: Any) -> None:
        raise AssertionError("no action of this rank is ready")

    def reap(self) -> None:
        pass

    def drain(self) -> None:
        pass


class _Nothing:
    requires_grad = True

    def to(self, device: Any) -> _Nothing:
        return self


class _Computing(Executor):
    """Computes nothing."""

    def __init__(self, written: _Written, workers: Sequence[Worker]) -> None:
        super().__init__(
            written,  # pyright: ignore[reportArgumentType]
            parameters={},
            device_of=lambda work: torch.device(workers[work.stage].device),
            check=lambda: None,
        )
        self.written, self.workers = written, workers
        self.copies = mock.Mock()  # there is nothing to copy, nor a device

    def _run_action(self, action: Action) -> None:
        call = HostCall("run", self.workers[action.work.stage], self.written.current, None, id(action))
        self.written.calls.append(call._replace(after=tuple(map(id, action.after))))

    def _to_send(self, item: Any, message: Message) -> Any:
        return None


def told(num_ranks: int, backend: str = "nccl") -> tuple[RankDevices, ...]:
    """What ranks tell that have two devices each."""
    return tuple(
        RankDevices(own="cuda:0", backend=backend, ids=(f"{rank}/0", f"{rank}/1")) for rank in range(num_ranks)
    )


def chain(workers: Sequence[Worker], num_micro_batches: int, schedule: str, *, has_skip: bool = False) -> list[Program]:
    """The programs of all ranks for a pipeline of one block on each worker.

    Args:
        workers: Of each stage.
        num_micro_batches: Of the step.
        schedule: Its name.
        has_skip: Whether what the first block gives goes to the last one too.
    """
    num_ranks = 1 + max(worker.rank for worker in workers)
    blocks = [leaf(f"block {stage}", stage, stage) for stage in range(len(workers))]
    teams = tuple(Team((worker,)) for worker in workers)
    programs: list[Program] = []
    for rank in range(num_ranks):
        graphs: list[Graph] = []
        for number in range(num_micro_batches):
            graph = Graph(number)
            x = first = add(graph, blocks[0], 0, None, flops=10**15)
            for stage, block in list(enumerate(blocks))[1:]:
                inputs = (x, first) if has_skip and stage == len(blocks) - 1 else (x,)
                x = add(graph, block, stage, *inputs, flops=10**15)
            graph.backwards.append(Backward(graph, [x], [None], retain_graph=False, requested=None, where=None))
            graphs.append(graph)
        settings = Settings(
            teams=teams, rank=rank, num_ranks=num_ranks, lookahead=2, schedule=schedule, devices=told(num_ranks)
        )
        programs.append(build_program(graphs, settings))
    return programs


def host_calls(program: Program, workers: Sequence[Worker]) -> list[HostCall]:
    """What the executor of a rank asks for when it runs its program."""
    written = _Written([])
    with mock.patch.object(executor, "on_device", written.on_device):
        _Computing(written, workers)._run(program)
    assert set(written.opened) == program.gpu_channels
    return written.calls


def stands_still(hosts: Sequence[Sequence[HostCall]], *, are_open: bool) -> list[HostCall]:
    """The calls at which hosts stand when nothing goes on any more, and the waits of devices; [] if all have ended.

    Args:
        hosts: The calls of each rank.
        are_open: Whether all communicators have been opened before the first call.
    """
    play = _Play(hosts, are_open)
    while play.goes_on():
        pass
    return play.left()


class _Play:
    def __init__(self, hosts: Sequence[Sequence[HostCall]], are_open: bool) -> None:
        self.hosts, self.are_open = [list(calls) for calls in hosts], are_open
        self.come: dict[Channel, set[int]] = defaultdict(set)
        """By communicator the ranks whose hosts have come to their first call there."""
        self.queued: dict[Worker, list[HostCall]] = defaultdict(list)
        self.num_done: Counter[Worker] = Counter()
        self.ends: dict[tuple[Channel, str], list[tuple[int, int]]] = defaultdict(list)
        """By channel and end its transfers: the message's task, and how much its device had queued by then."""
        self.num_over: Counter[Channel] = Counter()
        self.has_run: set[int] = set()

    def goes_on(self) -> bool:
        moved = [self.host_goes_on(rank) for rank in range(len(self.hosts))]
        moved += [self.channel_goes_on(channel) for channel, kind in list(self.ends) if kind == "post"]
        moved += [self.device_goes_on(worker) for worker in list(self.queued)]
        return any(moved)

    def host_goes_on(self, rank: int) -> bool:
        if not self.hosts[rank]:
            return False
        call = self.hosts[rank][0]
        if call.channel is not None and call.kind != "wait":
            if not self.are_open:
                came = self.come[call.channel]
                is_new = rank not in came
                came.add(rank)
                if len(came) < 2:
                    return is_new
            self.ends[call.channel, call.kind].append((call.task, len(self.queued[call.worker])))
        else:
            self.queued[call.worker].append(call)
        del self.hosts[rank][0]
        return True

    def channel_goes_on(self, channel: Channel) -> bool:
        number, sends, posts = self.num_over[channel], self.ends[channel, "send"], self.ends[channel, "post"]
        if number >= min(len(sends), len(posts)):
            return False
        (sent, after), (posted, after_too) = sends[number], posts[number]
        assert sent == posted, "NCCL has no tags: the receiver would take one message for another"
        if self.num_done[channel.source] < after or self.num_done[channel.target] < after_too:
            return False
        self.num_over[channel] += 1
        return True

    def device_goes_on(self, worker: Worker) -> bool:
        if self.num_done[worker] == len(self.queued[worker]):
            return False
        call = self.queued[worker][self.num_done[worker]]
        if call.channel is not None:
            number = [task for task, _ in self.ends[call.channel, "post"]].index(call.task)
            if self.num_over[call.channel] <= number:
                return False
        if not self.has_run.issuperset(call.after):
            return False
        if call.kind == "run":
            self.has_run.add(call.task)
        self.num_done[worker] += 1
        return True

    def left(self) -> list[HostCall]:
        waits = [calls[self.num_done[worker] :] for worker, calls in self.queued.items()]
        return [calls[0] for calls in [*self.hosts, *waits] if calls]
