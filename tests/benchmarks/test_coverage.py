"""A fixed tenth of benchmarks/coverage: model families of transformers over two processes, against one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.ranks import run_processes

ROOT = Path(__file__).resolve().parents[2]
KINDS = [
    "bert",
    "deepseek_vl",
    "torch.in_place",
    "torch.wandering",
]
"""A family or two of each kind of the tenth: text, images with text, programs of torch alone."""


def _run(*words: str) -> None:
    (done,) = run_processes(1, ROOT / "benchmarks" / "coverage" / "run.py", words, timeout_s=880.0)
    assert done.code == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("families", [KINDS, []], ids=["each kind", "all"])
def test_a_tenth_of_the_model_families_trains_as_in_one_process(families: Sequence[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--tenth", "--stages", "2", "--no-torch", "--check", "--out", str(tmp_path)]
    words += [word for name in families for word in ("--only", name)]
    _run(*words)
    assert len(list(tmp_path.glob("*2*.json"))) >= len(families)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("families", [["flaubert"], []], ids=["one", "all"])
def test_a_tenth_of_the_model_families_trains_with_split_stages(families: Sequence[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--tenth", "--tensor", "2", "--stages", "1", "--check", "--out", str(tmp_path)]
    _run(*words, *[word for name in families for word in ("--only", name)])
    assert len(list(tmp_path.glob("*.1x2.json"))) >= len(families)
