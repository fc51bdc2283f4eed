"""What an editor and a type checker see of the library: its names, and that a model keeps its class."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan


def test_dir_shows_the_public_names_before_and_after_their_first_use() -> None:
    program = "import farspan; print(set(farspan.__all__) - set(dir(farspan)), 'torch' in __import__('sys').modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set() False"


def test_the_version_can_be_typed_into_a_bug_report_and_costs_nothing_until_then() -> None:
    program = "import farspan, sys; print('importlib.metadata' in sys.modules, farspan.__version__, *dir(farspan))"
    loaded, version, *names = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == "False" and version[0].isdigit() and "__version__" in names
    assert version == farspan.__version__


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("microbatches", "distribute() has no keyword microbatches: did you mean micro_batches?"),
        ("tensor_paralel", "did you mean tensor_parallel?"),
        ("xyzzy", "distribute() has no keyword xyzzy: it has model, plan, stages, remat"),
    ],
)
def test_a_keyword_that_does_not_exist_is_answered_with_the_nearest(given: str, words: str) -> None:
    keywords: Any = {given: 4}
    with pytest.raises(TypeError) as caught:
        farspan.distribute(nn.Linear(2, 2), **keywords)
    assert words in str(caught.value)


def test_a_keyword_of_another_function_is_answered_so_too() -> None:
    wrong: Any = {"mdoel": None}
    for function in (farspan.save, farspan.load):
        with pytest.raises(TypeError, match=r"has no keyword mdoel: did you mean model\?"):
            function("checkpoints", **wrong)
    wrong = {"process": 2}
    with pytest.raises(TypeError, match=r"needs processes=, the number of ranks: did you mean it by process=\?"):
        farspan.launch(print, 5, **wrong)


class WithAMethod(nn.Linear):
    def sizes(self) -> tuple[int, int]:
        return self.in_features, self.out_features


def test_distribute_gives_back_the_callers_class() -> None:
    def sizes(rank: int) -> tuple[int, int]:
        return farspan.distribute(WithAMethod(3, 2)).sizes()  # pyright checks this file, and knows the method

    assert run_threads(1, sizes) == [(3, 2)]


def test_a_plan_of_numbers_as_in_a_device_map() -> None:
    def program(rank: int) -> tuple[tuple[str, ...], bool, int]:
        model = farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan={"0": 0, "1": 1})
        return farspan.plan_of(model).stages, bool(torch.isfinite(model(torch.zeros(1, 2))).all()), farspan.rank()

    assert run_threads(2, program) == [(("rank:0", "rank:1"), True, rank) for rank in range(2)]
