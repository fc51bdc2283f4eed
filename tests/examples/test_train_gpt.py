"""The promise of the README: the same program, with two lines more."""

from __future__ import annotations

import difflib
import json
import math
import subprocess
import sys
from pathlib import Path

from tests.support.ranks import run_processes

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_two_scripts_differ_by_two_added_lines() -> None:
    plain = (EXAMPLES / "train_gpt_plain.py").read_text().splitlines()
    ours = (EXAMPLES / "train_gpt.py").read_text().splitlines()
    changes = [line for line in difflib.ndiff(plain, ours) if line[:2] in ("- ", "+ ")]
    assert changes == ["+ import farspan", "+     model = farspan.distribute(model)"]


def test_the_plain_script_trains_evaluates_and_samples(tmp_path: Path) -> None:
    losses = run_plain(tmp_path / "losses.json", "--sample-bytes", "4", "--evaluate-every", "2")
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)


def test_stopping_early_keeps_the_schedule_and_the_losses(tmp_path: Path) -> None:
    whole = run_plain(tmp_path / "whole.json", "--sample-bytes", "0", "--evaluate-every", "1")
    start = run_plain(tmp_path / "start.json", "--sample-bytes", "0", "--evaluate-every", "0", "--stop-after", "1")
    assert start == whole[:1]


def test_compare_losses_fails_on_one_bit(tmp_path: Path) -> None:
    for name, losses in (("a", [1.0, 2.0]), ("b", [1.0]), ("c", [1.0, math.nextafter(2.0, 3.0)]), ("d", [])):
        (tmp_path / name).write_text(json.dumps([loss.hex() for loss in losses]))

    def compare(first: str, second: str) -> int:
        command = [sys.executable, str(EXAMPLES / "compare_losses.py"), str(tmp_path / first), str(tmp_path / second)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert compare("a", "b") == 0
    assert compare("a", "c") == 1
    assert compare("a", "d") == 1


def run_plain(file: Path, *options: str) -> list[float]:
    sizes = "--steps 2 --width 16 --heads 2 --blocks 2 --context 8 --micro-batches 2 --batch 2 --corpus-bytes 100000"
    words = [*sizes.split(), *options, "--losses", str(file)]
    (done,) = run_processes(1, EXAMPLES / "train_gpt_plain.py", words)
    assert done.code == 0, done.stderr
    return [float.fromhex(loss) for loss in json.loads(file.read_text())]
