"""benchmarks/fuzz: programs that are equal stay so; a difference is made small, and written as a file that runs."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.fuzz import ranks
from benchmarks.fuzz.compare import Observed, Outcome, compare
from benchmarks.fuzz.models import kinds, kinds_of
from benchmarks.fuzz.program import draw, source, standalone
from benchmarks.fuzz.shrink import features_of, shrink, without

EQUAL = [
    (0, 1),
    (12, 1),
    (18, 1),
    (19, 1),
    (26, 1),
    (28, 1),
    (29, 1),
    (14, 1),
    (30, 1),
    (31, 1),
    (32, 1),
    (33, 1),
]
EQUAL += [(14, 0), (18, 0), (26, 0), (19, 0), (30, 0), (31, 0), (32, 0), (33, 0)]
"""Numbers of programs, and which of their ways."""
SEED = 1
WAY = {"ranks": 2, "options": {"measure": False}}


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name, value in (ranks.RECORDED | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    out = sys.stdout
    yield
    sys.stdout = out


@pytest.mark.parametrize(("number", "at"), EQUAL)
def test_drawn_programs_are_those_of_one_process(number: int, at: int) -> None:
    drawn, plain = ranks.drawn_with_plain(SEED, number)
    way = drawn["ways"][at]
    assert ranks.outcome(drawn, way, plain, f"diagonal_{number}_{at}") == Outcome(kind="equal")


def test_a_number_gives_the_same_text_each_time() -> None:
    texts = [source(draw(SEED, number)) for number in range(50)]
    assert texts == [source(draw(SEED, number)) for number in range(50)]
    assert len({*texts}) == 50
    for text in texts:
        ast.parse(text)


def test_each_kind_of_block_is_drawn() -> None:
    found: set[str] = set()
    for number in range(1500):
        found |= kinds_of(draw(SEED, number)["model"])
    assert found >= {name for name, (_, parts) in kinds().items() if parts >= 0}


def test_a_planted_difference_is_made_small_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs with a Residual and clipping are taken to differ: all else goes."""

    def differs(drawn: dict[str, Any], way: dict[str, Any]) -> bool:
        return "Residual" in kinds_of(drawn["model"]) and "clip norm" in drawn["loop"]["features"]

    number = next(number for number in range(3000) if differs(draw(SEED, number), WAY))
    drawn = draw(SEED, number)
    small, way = shrink(drawn, drawn["ways"][1], differs, most=500)
    assert features_of(small, way) == {"block Residual", "feature clip norm"}
    assert len(small["model"]["blocks"]) == 1
    assert {key: value for key, value in way.items() if value} == WAY
    assert not differs(without(small, {"block Residual"}) or small, way)

    file = tmp_path / "small.py"
    file.write_text(standalone(small, way, "A planted difference."))
    monkeypatch.setattr(sys, "argv", [str(file)])
    with torch.random.fork_rng():
        runpy.run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("norm ")
    assert "generator" in printed


def test_differences_are_named() -> None:
    def seen(number: float, printed: str = "") -> Observed:
        return Observed(
            recorded=[["loss", number]], state={}, attributes={"b.seen": 3}, generators="", printed=[printed]
        )

    assert compare(seen(1.0), [seen(1.0), seen(1.0)]).kind == "equal"
    assert compare(seen(1.0), [seen(1.0), seen(1.5)]).text == "rank 1, recorded: [0] [1] 1.0 plainly, 1.5"
    assert compare(seen(0.0), [seen(-0.0)]).kind == "wrong"
    assert compare(seen(1.0), [seen(1.0, "once\n")]).kind == "printed"
    assert compare(seen(1.0), [seen(1.0 + 1e-6)], seen(1.0)).kind == "equal"
    assert compare(seen(1.0), [seen(1.1)], seen(1.0 + 1e-6)).kind == "wrong"
