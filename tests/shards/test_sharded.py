"""Sharded over groups: the numbers of one process, a share of the memory, and names for what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shards.read_sharded import CASES as READS
from tests.shards.train_sharded import CASES
from tests.support.ranks import run_processes

import farspan
from farspan.errors import PlanError

READ = Path(__file__).parent / "read_sharded.py"
TRAIN = Path(__file__).parent / "train_sharded.py"
IN_GROUPS = Path(__file__).parents[1] / "data_axis" / "train_in_groups.py"
FAIL = Path(__file__).parent / "fail_sharded.py"
SEEN_BY_OTHER_RANKS = [
    "AdamW",
    "looked at",
    "asked once",
    "exchanged",
    "held",
    "put in a dictionary",
    "hooks",
    "LBFGS",
    "checkpointed",
]


def train(num_ranks: int, spec: str, names: list[str], folder: Path) -> list[dict[str, Any]]:
    finished = run_processes(num_ranks, TRAIN, [spec, str(folder / "checkpoint"), *names])
    assert [process.stderr for process in finished if process.code] == []
    return [json.loads(process.stdout.splitlines()[-1]) for process in finished]


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [(2, "optimizer"), (2, "parameters"), (4, "optimizer"), (4, "parameters")],
)
def test_same_numbers_as_one_process_that_averages(num_ranks: int, kind: str, tmp_path: Path) -> None:
    """To the last bit: two groups, of one rank and of two, and what the program sees of its optimizers."""
    names = list(CASES) if num_ranks == 2 else SEEN_BY_OTHER_RANKS
    found = train(num_ranks, f"2 {kind}", names, tmp_path)
    assert {name: off for each in found for name, off in each["differences"].items() if off} == {}
    for name in ("AdamW", "asked once", "put in a dictionary"):
        parts = [each["parts"].get(name, 0.0) for each in found]
        assert abs(sum(parts) - 1) < 1e-9, (name, parts)  # each rank has others, and nothing is there twice
        assert max(parts) < 0.6, (name, parts)
    assert abs(sum(each["parts"].get("exchanged", 0.0) for each in found) - 1) < 1e-9  # divided, once given back
    assert num_ranks > 2 or [each["parts"]["Together"] for each in found] == [1, 1]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [(2, list(READS)), (4, ["attending", "written", "averaged", "put in place", "drawn", "asked"])],
)
def test_parameters_that_are_away_are_what_they_were(num_ranks: int, names: list[str]) -> None:
    """Whoever uses them: modules in their own ways, a checkpoint that computes again, the program, one group alone."""
    finished = run_processes(num_ranks, READ, ["2 parameters", "", *names])
    assert [process.stderr for process in finished if process.code] == []
    for process in finished:
        differences = json.loads(process.stdout.splitlines()[-1])["differences"]
        assert {name: off for name, off in differences.items() if off} == {}


@pytest.mark.parametrize("kind", ["optimizer", "parameters"])
def test_same_bits_as_groups_that_are_not_sharded(kind: str) -> None:
    """Of three groups, where sums depend on their order, too."""
    for num_groups in (2, 3):
        names = ["clipped", "unequal", "two optimizers", "scaled", "mixed"] if num_groups == 2 else ["plain", "tied"]
        runs = [
            run_processes(num_groups, IN_GROUPS, [spec, *names]) for spec in (f"{num_groups}", f"{num_groups} {kind}")
        ]
        assert [process.stderr for run in runs for process in run if process.code] == []
        plain, sharded = ([json.loads(process.stdout.splitlines()[-1]) for process in run] for run in runs)
        assert sharded == plain


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("other shard", "shard argument"),
        ("steps alone", "a step of AdamW (sharded), after 2 steps"),
        ("loads alone", "AdamW.load_state_dict()"),
        ("a hook alone", "its steps have hooks"),
        ("other rate", "(AdamW, lr 0.05, "),
        ("another gradient", "the groups have different gradients: 2.weight."),
    ],
)
def test_groups_that_do_not_do_the_same_have_an_error_with_a_name(what: str, words: str) -> None:
    finished = run_processes(2, FAIL, [what], environment={"FARSPAN_DEADLINE": "60"})
    for process in finished:
        assert process.code == 1, process.stdout
        assert "DivergenceError" in process.stderr and words in process.stderr, process.stderr


@pytest.mark.parametrize(
    ("shard", "groups", "words"),
    [("everything", 2, "everything.* was given"), ("optimizer", None, "data_parallel= says how many")],
)
def test_what_cannot_be_sharded(shard: Any, groups: int | None, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        farspan.distribute(torch.nn.Linear(2, 2), data_parallel=groups, shard=shard)
