"""Schedules with a fixed order: GPipe, 1F1B and interleaved 1F1B.

In the pictures a backward is twice as long as a forward, and the second stage of a rank is in small letters.
"""

from __future__ import annotations

from itertools import pairwise

from benchmarks.bubble_rates.schedules.chain import Chain

from farspan.errors import PlanError
from farspan.schedule.schedule import Schedule
from farspan.schedule.task import Kind

__all__ = ["gpipe", "interleaved", "one_f_one_b", "require_stages"]


def gpipe(chain: Chain) -> Schedule:
    """All forwards, then all backwards (Y. Huang et al., GPipe, 2018, arXiv 1811.06965). Every rank holds all.

        rank 0   F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        rank 1   .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --
        rank 2   .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 --

    Args:
        chain: One stage on each rank.

    Raises:
        PlanError: A rank has another number of stages.
    """
    return one_f_one_b(chain, warm_up=chain.num_micro_batches)


def one_f_one_b(chain: Chain, *, warm_up: int = 1) -> Schedule:
    """Forward and backward in turns (D. Narayanan et al., PipeDream, 2019; its synchronous form). Rank r of p holds
    p - r micro-batches.

        rank 0   F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        rank 1   .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
        rank 2   .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --

    Args:
        chain: One stage on each rank.
        warm_up: Forwards of the last rank before its first backward; each rank before it has one more.

    Raises:
        PlanError: A rank has another number of stages.
    """
    require_stages(chain, 1, "1F1B")
    orders: list[tuple[int, ...]] = []
    for rank in range(chain.num_ranks):
        num_early = chain.num_ranks - rank + warm_up - 1
        forwards = [chain.index(Kind.FORWARD, rank, number) for number in range(chain.num_micro_batches)]
        order = forwards[:num_early]
        for number in range(chain.num_micro_batches):
            order.append(chain.index(Kind.BACKWARD, rank, number))
            order += _weight(chain, rank, number)
            order += forwards[num_early + number : num_early + number + 1]
        orders.append(tuple(order))
    return Schedule(tasks=chain.tasks, orders=tuple(orders))


def interleaved(chain: Chain) -> Schedule:
    """1F1B with several stages on each rank, which take turns in rounds of micro-batches (D. Narayanan et al.,
    Efficient large-scale language model training, 2021, arXiv 2104.04473, section 2.2).

        rank 0   F0 F1 f0 f1 F2 .. b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .. b2 -- .. b3 -- B2 -- B3 --
        rank 1   .. F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 --

    Args:
        chain: Stages looped over the ranks, as many on each.

    Raises:
        PlanError: They are not.
    """
    num_ranks, num_chunks = chain.num_ranks, chain.num_stages // chain.num_ranks
    if chain.ranks != tuple(range(num_ranks)) * num_chunks:
        raise PlanError(
            "interleaved 1F1B does not fit this pipeline.",
            why=f"its stages must go round the ranks: 0 1 .. 0 1 ..; they lie on {_list(chain.ranks)}.",
            hint="looped(num_ranks, num_rounds, num_micro_batches), or farspan.schedule.orders_by_name",
        )
    rounds = _rounds(chain.num_micro_batches, num_ranks)
    orders: list[tuple[int, ...]] = []
    for rank in range(num_ranks):
        stages = chain.stages_of(rank)
        forwards = [(stage, number) for numbers in rounds for stage in stages for number in numbers]
        backwards = [(stage, number) for numbers in rounds for stage in reversed(stages) for number in numbers]
        num_early = (num_chunks - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank) + 1 if rounds else 0
        order = [chain.index(Kind.FORWARD, *item) for item in forwards[:num_early]]
        for place, (stage, number) in enumerate(backwards):
            order.append(chain.index(Kind.BACKWARD, stage, number))
            order += _weight(chain, stage, number)
            following = forwards[num_early + place : num_early + place + 1]
            order += [chain.index(Kind.FORWARD, *item) for item in following]
        orders.append(tuple(order))
    return Schedule(tasks=chain.tasks, orders=tuple(orders))


def require_stages(chain: Chain, num_stages: int, name: str) -> None:
    """Raise where a rank does not have so many stages, in the order of the ranks."""
    straight = tuple(range(chain.num_ranks))
    expected = straight if num_stages == 1 else straight + straight[::-1]
    if chain.ranks != expected:
        raise PlanError(
            f"{name} does not fit this pipeline.",
            why=f"its stages must lie on ranks {_list(expected)}; they lie on {_list(chain.ranks)}.",
            hint="farspan.schedule.orders_by_name('1f1b', chain.tasks, chain.num_ranks) takes any pipeline",
        )


def _rounds(num_micro_batches: int, num_ranks: int) -> list[range]:
    """Micro-batches in groups of `num_ranks` or, where they do not divide, somewhat more; the largest first.

    >>> _rounds(7, 3)
    [range(0, 4), range(4, 7)]
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    size, rest = divmod(num_micro_batches, num_rounds)
    starts = [number * size + min(number, rest) for number in range(num_rounds + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _weight(chain: Chain, stage: int, micro_batch: int) -> list[int]:
    """The weight gradients, right after the backward, where they are a task of their own."""
    return [chain.index(Kind.WEIGHT, stage, micro_batch)] if chain.is_split else []


def _list(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks[:16])) + (" .." if len(ranks) > 16 else "")
