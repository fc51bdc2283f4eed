"""Split stages: one process within rounding, whatever the loop does, and the same to the last bit when run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from tests.wide.loops import Net, X, loop, loss_of, run, state_of
from tests.wide.test_loops import largest_difference, same

import farspan
from farspan.errors import PlanError, RecordError
from farspan.execute.process.world import current_engine


@loop
def inferred(model: Any) -> Any:
    """Evaluation in inference mode, also between a forward and its step, and training on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.inference_mode():
            found += [model(X).argmax(-1).tolist(), model.head.weight.norm().item()]
        loss_of(model, step + 1).backward()
        optimizer.step()
    return found, state_of(model)


CHOSEN = (
    "clipped_adamw",
    "reads_in_the_middle",
    "evaluated",
    "inferred",
    "written_by_hand",
    "averaged",
    "resumed",
    "frozen",
    "frozen_behind_the_forward",
    "gradients_held",
    "carried_on",
    "hooks_on_parameters",
    "closures",
)


@pytest.mark.parametrize("loop", CHOSEN)
def test_one_process_within_rounding(loop: str) -> None:
    wanted, found = run(loop, 2, tensor_parallel=2)
    assert all(same(item, found[0]) for item in found), "all ranks see the same"
    assert largest_difference(found[0], wanted) < 1e-5


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_in_every_run(num_ranks: int) -> None:
    wanted, found = run("uneven_numbers", num_ranks, tensor_parallel=2)
    assert same(run("uneven_numbers", num_ranks, tensor_parallel=2)[1], found), "to the last bit"
    assert largest_difference(found[0], wanted) < 1e-6


def test_what_is_split() -> None:
    """Each block has a pair of matrices; dropout comes behind the sum of the second, and draws for the whole."""

    def on_rank(rank: int) -> Any:
        model = farspan.distribute(Net(), tensor_parallel=2)
        for number in range(2):
            loss_of(model, number).backward()
        farspan.flush()
        engine = current_engine()
        assert engine is not None
        return {name: engine.recorder.splitting.matrices.form_of(name) for name, _ in model.named_parameters()}

    for forms in run_threads(2, on_rank):
        assert {name: form for name, (form, _) in forms.items() if form} == {
            **{f"blocks.{number}.a.weight": "column" for number in range(3)},
            **{f"blocks.{number}.b.weight": "row" for number in range(3)},
            "head.weight": "whole",
        }
        assert forms["head.weight"][1] == "5 columns for 2 ranks"


def test_gradients_of_slices_are_not_returned() -> None:
    with pytest.raises(RecordError, match=r"torch\.autograd\.grad"):
        run("gradients_asked_for", 2, tensor_parallel=2)


def test_no_hook_misses_gradients_of_slices() -> None:
    with pytest.raises(RecordError, match=r"slices of blocks\.0\.a\.weight, which has a hook"):
        run("a_hook_behind_the_forward", 2, tensor_parallel=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel": 3}, "does not divide 2 ranks"),
        ({"tensor_parallel": 0}, "is no number of ranks"),
        ({"tensor_parallel": "twice"}, "is no number of ranks"),
        ({"tensor_parallel": 2, "stages": 2}, "stages=2 with tensor_parallel=2"),
        ({"tensor_parallel": 2, "plan": {"": "rank:0"}}, "with plan="),
        ({"tensor_parallel": 2, "gradient_reduction": "exact"}, "gradient_reduction"),
        ({"plan": {"": "rank:0&rank:1+rank:2"}}, "both + and &"),
    ],
)
def test_bad_input_is_said_on_every_rank(arguments: dict[str, Any], said: str) -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(PlanError) as caught:
            farspan.distribute(Net(), **arguments)
        assert caught.value.hint
        return str(caught.value)

    assert all(said in text for text in run_threads(2, on_rank))
