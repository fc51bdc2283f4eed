"""Real processes that find each other as a chain: the same numbers, and everybody hears of whatever goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.ranks import run_processes

PROGRAM = Path(__file__).with_name("chained.py")
NUM_RANKS = 3


def test_a_chain_of_ranks_computes_what_one_process_does() -> None:
    alone, *finished = [*run_processes(1, PROGRAM, ["nothing"]), *run_processes(NUM_RANKS, PROGRAM, ["nothing"])]
    assert [process.stderr for process in finished if process.code] == []
    losses, weights = json.loads(alone.stdout.splitlines()[-1])
    found = [json.loads(process.stdout.splitlines()[-1]) for process in finished]
    assert [each[0] for each in found] == [losses] * NUM_RANKS
    assert [found[0][1], found[2][1]] == [weights] * 2


@pytest.mark.parametrize(
    ("story", "words"),
    [
        ("raises", "rank 1 failed: ValueError: the loader is empty"),
        ("killed", "rank 1 died (its connection closed without a goodbye)"),
    ],
)
def test_everybody_hears_of_what_happens_to_a_rank_in_between(story: str, words: str) -> None:
    for rank, process in enumerate(run_processes(NUM_RANKS, PROGRAM, [story], environment={"FARSPAN_DEADLINE": "60"})):
        assert process.code != 0
        assert rank == 1 or words in process.stderr, (rank, process.stderr)
        assert process.duration_s < 50.0
