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
    if sys.argv[1:]:
        print("losses", train())
    random.seed(3)
    print([*found, random.random()])
"""

_TRAINING = """
def train():
    import farspan, numpy as np, torch
    from torch import nn

    order = list({f"sample {number}" for number in range(32)})  # by the hash seed
    random.shuffle(order)
    rows = np.random.permutation(32)[:16]
    names = torch.tensor([float(name.split()[1]) for name in order])[:16, None]
    data = torch.rand(32, 8)[torch.from_numpy(rows)] + names
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    model = farspan.distribute(model)
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
    return losses
"""


def run(folder: Path, n: int, *words: str) -> list[list[str]]:
    """What each rank prints, by lines."""
    path = folder / "script.py"
    path.write_text(_TRAINING + _SCRIPT)
    command = [sys.executable, "-m", "farspan", "run", "-n", str(n), "--log-dir", str(folder / "logs"), str(path)]
    command += words
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables | {"PYTHONPATH": str(SOURCE)}
    )
    assert done.returncode == 0, done.stderr
    texts = [done.stdout, *[(folder / "logs" / f"rank{rank}.log").read_text() for rank in range(1, n)]]
    return [text.strip().splitlines() for text in texts]


def test_all_ranks_draw_the_same_and_train_and_each_job_draws_something_else(tmp_path: Path) -> None:
    draws, trains = run(tmp_path, 2), run(tmp_path, 2, "trains")
    first, second = ([lines[-1] for lines in found] for found in (draws, trains))
    assert first[0] == first[1] and second[0] == second[1]
    assert first[0] != second[0]  # what is drawn before the script trains is in it
    assert first[0].endswith("False, False, 0.23796462709189137]"), "nothing of it is left for the script to see"
    losses = [[line for line in lines if line.startswith("losses")] for lines in trains]
    assert losses[0] == losses[1] and len(losses[0]) == 1
