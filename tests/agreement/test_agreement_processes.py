"""What the ranks agree on, where they are processes: each with a hash seed and random generators of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.ranks import run_processes

PROGRAM = Path(__file__).with_name("agreeing.py")
DRAWS = {
    "torch": ["randn draws random numbers at", "agreeing.py:", "torch.Generator()"],
    "random": ["Python's `random` is in the state", "drawn from since: ", "agreeing.py:", "random.Random()"],
    "numpy": ["numpy's global generator is in the state", "drawn from since: ", "agreeing.py:"],
    "seed": ["torch's CPU generator is in the state", "drawn from since: ", "agreeing.py:"],
}


@pytest.mark.parametrize(("story", "num_ranks"), [("nothing", 3), ("own", 2)])
def test_sets_among_arguments_and_generators_of_ones_own_are_no_difference(story: str, num_ranks: int) -> None:
    alone = run_processes(1, PROGRAM, [story])
    finished = run_processes(num_ranks, PROGRAM, [story])
    assert [process.stderr for process in [*alone, *finished] if process.code] == []
    losses = [json.loads(process.stdout.splitlines()[-1]) for process in [*alone, *finished]]
    assert losses == [losses[0]] * (num_ranks + 1)


@pytest.mark.parametrize("story", DRAWS)
def test_a_draw_on_one_rank_alone_is_an_error_that_names_the_first_step(story: str) -> None:
    for process in run_processes(2, PROGRAM, [story]):
        assert process.code != 0
        for words in ["DivergenceError: the ranks' programs differ at step 2", *DRAWS[story]]:
            assert words in process.stderr


def test_what_one_rank_does_after_the_last_step_is_an_error_too() -> None:
    for process in run_processes(2, PROGRAM, ["end"]):
        assert process.code == 1
        assert "rank 1: first.linear.bias.grad = None, at" in process.stderr
        assert "the end of the program" in process.stderr
