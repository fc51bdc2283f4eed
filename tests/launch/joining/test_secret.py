"""The secret of a run: from the environment nobody says it, and who has none there is told so."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_processes

TRAINS = """
import os
import torch
import farspan
from farspan.comm.rendezvous.group import find_peers
from torch import nn

if os.environ["RANK"] in os.environ.get("WITHOUT", ""):
    del os.environ["FARSPAN_SECRET"]
model = farspan.distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
said = find_peers(30.0).store.get("hub").decode()
print(model(torch.ones(1, 2)).shape, "mine" in said, len(said) > 64)
"""


def test_ranks_that_know_the_secret_do_not_say_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    for environment, last in (({"FARSPAN_SECRET": "mine"}, "False"), ({}, "True")):
        for finished in run_processes(2, script, environment=environment):
            assert finished.code == 0, finished.stderr
            assert finished.stdout.split()[-2:] == ["False", last]


def test_a_rank_without_the_secret_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    first, second = run_processes(2, script, environment={"FARSPAN_SECRET": "mine", "WITHOUT": "1"})
    assert first.code != 0 and second.code != 0
    assert "FARSPAN_SECRET is set on rank 0 and not on rank 1" in second.stderr
    assert "rank 1 failed: LaunchError: the ranks do not agree on the secret" in first.stderr
