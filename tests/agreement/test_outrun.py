"""Data that arrive before the ranks' programs have been compared: what is said is that the programs differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import run_processes

TRAINS = """
import os, time
import torch
from torch import nn
import farspan
from farspan.control.hub.hub_state import Hub

on_start = Hub._on_start

def late(*arguments):
    time.sleep(1.0)
    return on_start(*arguments)

Hub._on_start = late
model = farspan.distribute(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)))
rows = 300 if os.environ["RANK"] == "0" else 301
model(torch.ones(rows, 8)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


@pytest.mark.parametrize("same_host", ["1", "0"], ids=["from memory to memory", "gloo"])
def test_data_of_another_size_than_agreed_show_the_divergence(tmp_path: Path, same_host: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    for finished in run_processes(2, script, environment={"FARSPAN_SAME_HOST": same_host}):
        assert finished.code != 0
        assert "DivergenceError" in finished.stderr and "bytes where" not in finished.stderr
