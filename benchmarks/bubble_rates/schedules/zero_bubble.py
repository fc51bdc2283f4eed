"""Zero bubble schedules: weight gradients are tasks of their own and fill what would be bubbles.

P. Qi et al., Zero bubble pipeline parallelism, 2023, arXiv 2401.10241 (ZB-H1, ZB-1p, ZB-2p), and its section 6 with
Pipeline parallelism with controllable memory, 2024, arXiv 2405.15362 (ZB-V). In the pictures forward, backward and
weight gradients take as long as each other, and the second stage of a rank is in small letters.
"""

from __future__ import annotations

from benchmarks.bubble_rates.schedules.automatic import automatic
from benchmarks.bubble_rates.schedules.chain import Chain
from benchmarks.bubble_rates.schedules.classic import require_stages

from farspan.errors import PlanError
from farspan.schedule.schedule import Schedule
from farspan.schedule.task import Kind

__all__ = ["zb_1p", "zb_2p", "zb_h1", "zb_v"]


def zb_h1(chain: Chain) -> Schedule:
    """1F1B in which rank r is r micro-batches late with its weight gradients, so that all ranks hold as much as rank 0.

        rank 0   F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1   .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        rank 2   .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Args:
        chain: One stage on each rank, with weight gradients as tasks of their own.

    Raises:
        PlanError: It is not.
    """
    _require_split(chain, "ZB-H1")
    require_stages(chain, 1, "ZB-H1")
    orders: list[tuple[int, ...]] = []
    for rank in range(chain.num_ranks):
        num_early = chain.num_ranks - rank
        forwards = [chain.index(Kind.FORWARD, rank, number) for number in range(chain.num_micro_batches)]
        weights = [chain.index(Kind.WEIGHT, rank, number) for number in range(chain.num_micro_batches)]
        order = forwards[:num_early]
        for number in range(chain.num_micro_batches):
            order.append(chain.index(Kind.BACKWARD, rank, number))
            order += weights[number - rank : number - rank + 1] if number >= rank else []
            order += forwards[num_early + number : num_early + number + 1]
        orders.append((*order, *weights[max(0, chain.num_micro_batches - rank) :]))
    return Schedule(tasks=chain.tasks, orders=tuple(orders))


def zb_1p(chain: Chain, *, latency: float = 0.0) -> Schedule:
    """The shortest schedule that was found with p micro-batches of memory on each of p ranks: as much as 1F1B.

        rank 0   F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
        rank 1   .. F0 F1 F2 B0 .. B1 W0 F3 B2 W1 B3 W2 W3
        rank 2   .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Args:
        chain: One stage on each rank, with weight gradients as tasks of their own.
        latency: From the end of a task to when another rank has what it made.

    Raises:
        PlanError: It is not.
    """
    return _within(chain, 1, latency, "ZB-1p")


def zb_2p(chain: Chain, *, latency: float = 0.0) -> Schedule:
    """The same with twice the memory, which does for almost no bubble.

        rank 0   F0 F1 F2 F3 F4 B0 F5 B1 W0 B2 W1 B3 W2 B4 W3 B5 W4 W5
        rank 1   .. F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 W0 B4 W1 B5 W2 W3 W4 W5
        rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 W0 W1 W2 W3 W4 W5

    Args:
        chain: One stage on each rank, with weight gradients as tasks of their own.
        latency: From the end of a task to when another rank has what it made.

    Raises:
        PlanError: It is not.
    """
    return _within(chain, 2, latency, "ZB-2p")


def zb_v(chain: Chain) -> Schedule:
    """Two stages on each rank, down and back up: no bubble where all tasks take equally long, with 1F1B's memory.

        rank 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3
        rank 1   .. F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3

    Args:
        chain: Stages in a V, with weight gradients as tasks of their own.

    Raises:
        PlanError: They are not.
    """
    _require_split(chain, "ZB-V")
    require_stages(chain, 2, "ZB-V")
    return Schedule(tasks=chain.tasks, orders=tuple(_Vee(chain, rank).order() for rank in range(chain.num_ranks)))


class _Vee:
    """The order of one rank, as if there were at least 2p - 1 micro-batches; what is more is left out."""

    def __init__(self, chain: Chain, rank: int) -> None:
        self.chain, self.rank = chain, rank
        self.stages = chain.stages_of(rank)
        self.names: list[tuple[Kind, int, int]] = []
        self.counts = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}

    def order(self) -> tuple[int, ...]:
        num_ranks, rank = self.chain.num_ranks, self.rank
        total = max(2 * num_ranks - 1, self.chain.num_micro_batches)
        down, up = 0, 1
        self.run("F", down, times=2 * (num_ranks - rank) - 1)
        for _ in range(rank):
            self.run("F", up)
            self.run("F", down)
        for _ in range(num_ranks - rank):
            self.run("FBW", up)
        while self.counts[Kind.FORWARD, up] < total:
            self.run("F" if self.counts[Kind.FORWARD, down] < total else "", down)
            self.run("BW", down)
            self.run("FBW", up)
        for _ in range(rank):
            self.run("B", down)
            self.run("B", up)
        self.run("BW", down, times=num_ranks - rank)
        self.run("W", up, times=total - self.counts[Kind.WEIGHT, up])
        self.run("W", down, times=total - self.counts[Kind.WEIGHT, down])
        return tuple(
            self.chain.index(kind, self.stages[chunk], number)
            for kind, chunk, number in self.names
            if number < self.chain.num_micro_batches
        )

    def run(self, kinds: str, chunk: int, *, times: int = 1) -> None:
        """Append the next task of each kind."""
        for letter in kinds * times:
            kind = Kind(letter)
            self.names.append((kind, chunk, self.counts[kind, chunk]))
            self.counts[kind, chunk] += 1


def _within(chain: Chain, factor: int, latency: float, name: str) -> Schedule:
    _require_split(chain, name)
    require_stages(chain, 1, name)
    memory = [factor * chain.num_ranks * costs.memory for costs in chain.costs]
    return automatic(chain.tasks, memory=memory, latency=latency)


def _require_split(chain: Chain, name: str) -> None:
    if not chain.is_split:
        raise PlanError(
            f"{name} does not fit this pipeline.",
            why="its weight gradients are part of the backward, so there is nothing to fill bubbles with.",
            hint="Costs(weight=..), or one_f_one_b(chain)",
        )
