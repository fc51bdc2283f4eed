"""Scripts without any seed: under `farspan run` all ranks draw the same, and each job something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.launcher import SOURCE, TIMEOUT_S

_SCRIPT = """
import os, random, sys

def drawn():
    import numpy as np, torch
    names = list({"left", "right", "upper", "lower"})
    seen = [random.random(), np.random.rand(), np.random.default_rng().random(), np.random.default_rng().random()]
    return [*seen, torch.rand(1).item(), names]

if __name__ == "__main__":
    found = [drawn(), "FARSPAN_ENTROPY" in os.environ, any(path.endswith("files/site") for path in sys.path)]
    random.seed(3)
    print([*found, random.random()])
"""

_TRAINING = """
import random
import farspan, numpy as np, torch
from torch import nn

order = list({f"sample {number}" for number in range(32)})  # by the hash seed
random.shuffle(order)
rows = np.random.permutation(32)[:16]
data = torch.rand(32, 8)[torch.from_numpy(rows)] + torch.tensor([float(name.split()[1]) for name in order])[:16, None]
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
model = farspan.distribute(model, measure=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True)
losses = []
for epoch in range(2):
    for (x,) in loader:
        loss = model(x + torch.randn(8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print("losses", losses)
"""


def run(folder: Path, script: str, n: int) -> list[str]:
    """The last line that each rank prints."""
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "farspan", "run", "-n", str(n), "--log-dir", str(folder / "logs"), str(path)]
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables | {"PYTHONPATH": str(SOURCE)}
    )
    assert done.returncode == 0, done.stderr
    texts = [done.stdout, *[(folder / "logs" / f"rank{rank}.log").read_text() for rank in range(1, n)]]
    return [text.strip().splitlines()[-1] for text in texts]


def test_all_ranks_draw_the_same_and_each_job_something_else(tmp_path: Path) -> None:
    first, second = run(tmp_path, _SCRIPT, 2), run(tmp_path, _SCRIPT, 2)
    assert first[0] == first[1] and second[0] == second[1]
    assert first[0] != second[0]
    assert first[0].endswith("False, False, 0.23796462709189137]"), "nothing of it is left for the script to see"


def test_a_script_without_any_seed_trains(tmp_path: Path) -> None:
    lines = run(tmp_path, _TRAINING, 2)
    assert lines[0] == lines[1] and lines[0].startswith("losses")
