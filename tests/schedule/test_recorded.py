"""Schedules by name on any graph: on plain pipelines they are the known ones, and on every graph they end."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bubble_rates.schedules import (
    Chain,
    Costs,
    gpipe,
    interleaved,
    looped,
    one_f_one_b,
    straight,
    vee,
    zb_h1,
    zb_v,
)
from hypothesis import given
from hypothesis import strategies as st
from tests.schedule.graphs import any_segments
from tests.schedule.test_properties import as_schedule, check

from farspan.planner import simulate
from farspan.schedule import SCHEDULES, Kind, Schedule, Task, orders_by_name, run_ahead_of
from farspan.schedule.named import recorded

WHOLE, SPLIT = Costs(backward=2), Costs(weight=1)


def named(name: str, chain: Chain, *, run_ahead: int = 0) -> Schedule:
    return as_schedule(chain.tasks, orders_by_name(name, chain.tasks, chain.num_ranks, run_ahead=run_ahead))


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 3), (2, 5), (4, 4), (4, 9), (8, 24)])
@pytest.mark.parametrize(("name", "generator"), [("gpipe", gpipe), ("1f1b", one_f_one_b)])
def test_on_a_plain_pipeline_the_order_is_the_known_one(
    name: str, generator: Callable[[Chain], Schedule], num_ranks: int, num_micro_batches: int
) -> None:
    chain = straight(num_ranks, num_micro_batches, WHOLE)
    assert named(name, chain, run_ahead=1) == generator(chain)


@pytest.mark.parametrize("num_rounds", [2, 3])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
def test_where_stages_go_round_the_ranks_it_is_interleaved(
    num_ranks: int, num_micro_batches: int, num_rounds: int
) -> None:
    """But for a forward here and there that takes a gap: as short, in the same memory."""
    chain = looped(num_ranks, num_rounds, num_micro_batches, WHOLE)
    known, found = simulate(interleaved(chain)), simulate(named("1f1b", chain))
    assert found.step_time == known.step_time
    assert [found.peak_memory(rank) for rank in range(num_ranks)] == [
        known.peak_memory(rank) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 8), (4, 8), (4, 32), (8, 32)])
@pytest.mark.parametrize(("generator", "shape"), [(zb_h1, straight), (zb_v, vee)])
def test_zero_bubble_is_as_short_as_the_known_ones(
    generator: Callable[[Chain], Schedule], shape: Callable[..., Chain], num_ranks: int, num_micro_batches: int
) -> None:
    chain = shape(num_ranks, num_micro_batches, SPLIT)
    known, found = simulate(generator(chain)), simulate(named("zero-bubble", chain))
    assert found.step_time <= known.step_time
    for rank in range(num_ranks):  # on a V one forward more
        assert found.peak_memory(rank) <= max(map(known.peak_memory, range(num_ranks))) + (shape is vee)


def test_running_ahead_costs_one_micro_batch_of_memory() -> None:
    chain = straight(4, 16, SPLIT)
    for name in ("zero-bubble", "auto"):
        peaks = [simulate(named(name, chain, run_ahead=count)).peak_memory(0) for count in (0, 1)]
        assert peaks == [4, 5]


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "auto"])
@pytest.mark.parametrize("num_pieces", [2, 8])
def test_stages_in_a_row_on_one_rank_hold_about_as_much_as_one(name: str, num_pieces: int) -> None:
    """As where each piece of a rank is a stage of its own, to be measured."""
    num_ranks = 4
    one = Chain(ranks=tuple(range(num_ranks)), costs=(WHOLE,) * num_ranks, num_micro_batches=32)
    ranks = tuple(rank for rank in range(num_ranks) for _ in range(num_pieces))
    piece = dataclasses.replace(WHOLE, memory=WHOLE.memory / num_pieces)
    pieces = dataclasses.replace(one, ranks=ranks, costs=(piece,) * len(ranks))
    wanted, found = simulate(named(name, one)), simulate(named(name, pieces))
    for rank in range(num_ranks):
        assert found.peak_memory(rank) <= wanted.peak_memory(rank) + WHOLE.memory


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "auto"])
@pytest.mark.parametrize("chain", [straight(4, 4), looped(4, 2, 4), vee(4, 4)])
def test_memory_does_not_grow_with_the_number_of_micro_batches(name: str, chain: Chain) -> None:
    costs = WHOLE if name == "1f1b" else SPLIT
    costs_of_all = (costs,) * chain.num_stages
    peaks = [
        [
            simulate(named(name, dataclasses.replace(chain, costs=costs_of_all, num_micro_batches=number))).peak_memory(
                rank
            )
            for rank in range(4)
        ]
        for number in (16, 64)
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("name", "lookahead", "run_ahead"),
    [("auto", 0, 0), ("auto", 1, 0), ("auto", 2, 1), ("zero-bubble", 8, 7), ("1f1b", 8, 0), ("gpipe", 8, 0)],
)
def test_what_a_plan_looks_ahead_is_for_one_receive_and_for_forwards(name: str, lookahead: int, run_ahead: int) -> None:
    assert run_ahead_of(name, lookahead) == run_ahead


@given(any_segments(), st.sampled_from(SCHEDULES), st.integers(0, 7), st.sampled_from([0.0, 0.3]))
def test_on_any_graph_all_run_and_nobody_waits_for_ever(
    case: tuple[list[Task], int], name: str, run_ahead: int, latency: float
) -> None:
    tasks, num_ranks = case
    orders = orders_by_name(name, tasks, num_ranks, run_ahead=run_ahead)
    check(as_schedule(tasks, orders), latency)
    if name == "gpipe":
        for order in orders:
            is_forward = [tasks[index].kind is Kind.FORWARD for index in order]
            assert is_forward == sorted(is_forward, reverse=True)


def test_the_worked_example_of_contributing_is_a_schedule() -> None:
    """A newcomer pastes it: it needs no name that the module does not have, and each rank but the last, which
    waits for no gradient, has two micro-batches more in flight."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pasted: dict[str, Any] = dict(vars(recorded))
    exec(example.replace("    ...\n", "    **_BY_NAME,\n"), pasted)
    [name] = pasted["_BY_NAME"].keys() - set(SCHEDULES)
    chain = straight(4, 12, WHOLE)
    order = as_schedule(chain.tasks, pasted["_BY_NAME"][name].orders(chain.tasks, 4, 0))
    check(order, 0.3)
    deep, known = simulate(order), simulate(named("1f1b", chain))
    assert [deep.peak_memory(rank) - known.peak_memory(rank) for rank in range(4)] == [2, 2, 2, 0]
