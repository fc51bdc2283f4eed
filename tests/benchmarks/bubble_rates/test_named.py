"""Each named schedule is the one its docstring draws, has the bubble that is known for it, and torch's order."""

from __future__ import annotations

from collections.abc import Callable
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
    zb_1p,
    zb_2p,
    zb_h1,
    zb_v,
)
from tests.schedule.picture import draw, picture_in

from farspan.errors import PlanError
from farspan.planner import simulate
from farspan.schedule import Kind, Schedule

WHOLE, SPLIT = Costs(backward=2), Costs(weight=1)


@pytest.mark.parametrize(
    ("generator", "chain"),
    [
        (gpipe, straight(3, 4, WHOLE)),
        (one_f_one_b, straight(3, 4, WHOLE)),
        (interleaved, looped(2, 2, 4, WHOLE)),
        (zb_h1, straight(3, 4, SPLIT)),
        (zb_1p, straight(3, 4, SPLIT)),
        (zb_2p, straight(3, 6, SPLIT)),
        (zb_v, vee(2, 4, SPLIT)),
    ],
)
def test_it_is_what_its_docstring_draws(generator: Callable[[Chain], Schedule], chain: Chain) -> None:
    assert [draw(generator(chain))] == picture_in(generator.__doc__)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (4, 8), (4, 13), (8, 24)])
def test_idle_time_and_memory_are_those_that_are_known(num_ranks: int, num_micro_batches: int) -> None:
    """With F = B = W = 1: of a rank's span; memory in micro-batches (arXiv 2401.10241, table 2)."""
    whole, split = straight(num_ranks, num_micro_batches, WHOLE), straight(num_ranks, num_micro_batches, SPLIT)
    half = Costs(forward=0.5, backward=0.5, weight=0.5, memory=0.5, weight_memory=0.5)
    for schedule, idle, memory in (
        (gpipe(whole), 3 * (num_ranks - 1), num_micro_batches),
        (one_f_one_b(whole), 3 * (num_ranks - 1), num_ranks),
        (zb_h1(split), num_ranks - 1, num_ranks),
        (zb_v(vee(num_ranks, num_micro_batches, half)), 0, num_ranks),
    ):
        simulated = simulate(schedule)
        assert simulated.longest_span == 3 * num_micro_batches + idle
        assert max(map(simulated.peak_memory, range(num_ranks))) == memory
    for schedule, idle, memory in ((zb_1p(split), num_ranks - 1, num_ranks), (zb_2p(split), 0, 2 * num_ranks)):
        simulated = simulate(schedule)
        assert simulated.longest_span <= 3 * num_micro_batches + idle
        assert max(map(simulated.peak_memory, range(num_ranks))) <= memory


@pytest.mark.parametrize("num_rounds", [2, 3])
def test_interleaving_divides_the_bubble(num_rounds: int) -> None:
    """By the number of stages on a rank (arXiv 2104.04473, section 2.2.2)."""
    costs = Costs(forward=1 / num_rounds, backward=2 / num_rounds)
    simulated = simulate(interleaved(looped(4, num_rounds, 8, costs)))
    assert simulated.longest_span == pytest.approx(3 * 8 + 3 * (4 - 1) / num_rounds)


@pytest.mark.parametrize(
    ("generator", "chain"),
    [
        (gpipe, vee(2, 4)),
        (one_f_one_b, looped(2, 2, 4)),
        (interleaved, vee(2, 4)),
        (zb_h1, straight(2, 4)),
        (zb_h1, looped(2, 2, 4, SPLIT)),
        (zb_1p, straight(2, 4)),
        (zb_2p, vee(2, 4, SPLIT)),
        (zb_v, straight(2, 4, SPLIT)),
        (zb_v, vee(2, 4)),
    ],
)
def test_what_does_not_fit_is_said(generator: Callable[[Chain], Schedule], chain: Chain) -> None:
    with pytest.raises(PlanError, match="does not fit this pipeline"):
        generator(chain)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 3), (2, 5), (4, 4), (4, 9)])
def test_the_order_is_that_of_torch(num_ranks: int, num_micro_batches: int) -> None:
    for name, generator in (("ScheduleGPipe", gpipe), ("Schedule1F1B", one_f_one_b)):
        theirs: Any = placeholder(name, _num_stages=num_ranks, _n_microbatches=num_micro_batches)
        if not hasattr(theirs, "_get_pipeline_order"):
            pytest.skip("this torch does not tell its order")
        order = theirs._get_pipeline_order()
        chain = straight(num_ranks, num_micro_batches, WHOLE)
        for rank, own in enumerate(generator(chain).orders):
            theirs_here = torch_names(order[rank])
            if generator is one_f_one_b and rank == num_ranks - 1:
                # torch 2.13 tells the forwards of the last rank one too high (it runs them as we do)
                theirs_here = [(kind, stage, number - (kind == "F")) for kind, stage, number in theirs_here]
            assert names(chain, own) == theirs_here


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 3), (2, 3), (2, 4), (4, 8), (4, 10), (4, 3)])
def test_interleaved_orders_are_those_of_torch(num_ranks: int, num_rounds: int, num_micro_batches: int) -> None:
    turns = max(1, num_micro_batches // num_ranks)
    theirs: Any = placeholder(
        "ScheduleInterleaved1F1B",
        n_local_stages=num_rounds,
        pp_group_size=num_ranks,
        microbatches_per_round=num_micro_batches // turns,
        _n_microbatches=num_micro_batches,
    )
    chain = looped(num_ranks, num_rounds, num_micro_batches, WHOLE)
    assert [names(chain, own) for own in interleaved(chain).orders] == [
        torch_names(theirs._calculate_single_rank_operations(rank)) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 2), (2, 2), (2, 4), (4, 4), (4, 12)])
def test_v_shaped_orders_are_those_of_torch(num_ranks: int, num_micro_batches: int) -> None:
    chain = vee(num_ranks, num_micro_batches, SPLIT)
    for rank, own in enumerate(zb_v(chain).orders):
        theirs: Any = placeholder(
            "ScheduleZBVZeroBubble",
            rank=rank,
            pp_group_size=num_ranks,
            num_stages=2 * num_ranks,
            _n_microbatches=num_micro_batches,
        )
        assert names(chain, own) == torch_names(theirs._calculate_single_rank_operations(rank))


def placeholder(name: str, **attributes: Any) -> Any:
    """One of torch's schedules without stages: enough for its order."""
    from torch.distributed.pipelining import schedules  # takes long to import

    kind = getattr(schedules, name)
    schedule = object.__new__(kind)
    for attribute, value in attributes.items():
        setattr(schedule, attribute, value)
    return schedule


def names(chain: Chain, order: tuple[int, ...]) -> list[tuple[str, int, int]]:
    tasks = [chain.tasks[index] for index in order]
    return [(task.kind.value, task.level, task.micro_batch) for task in tasks]


def torch_names(actions: list[Any]) -> list[tuple[str, int, int]]:
    letters = {
        "FORWARD": Kind.FORWARD,
        "FULL_BACKWARD": Kind.BACKWARD,
        "BACKWARD_INPUT": Kind.BACKWARD,
        "BACKWARD_WEIGHT": Kind.WEIGHT,
    }
    return [
        (letters[action.computation_type.name].value, action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type.name in letters
    ]
