"""A fixed tenth of benchmarks/coverage: model families of transformers over two processes, against one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_a_tenth_of_the_model_families_trains_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--tenth", "--stages", "2", "--no-torch", "--check", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "benchmarks/coverage/run.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
