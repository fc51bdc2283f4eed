"""Where the report of `farspan run --report` was written is said on the console, once."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.warm.commands import farspan_run

TRAIN = """
import torch
import farspan

model = farspan.distribute(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), measure=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(11):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def test_where_the_report_is_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run = farspan_run(["-n", "2", "--report", "step.json", "train.py"], folder=tmp_path)
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "wrote" in line]
    path = tmp_path / "step.json"
    again = "(it is written again after step 10 and 30)"
    assert said == [f"farspan: wrote {path}, the report on training step 3 {again}"]
    assert json.loads(path.read_text())
