"""Programs that train and save, load what they saved, and go on from it: the same files and output as one process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tests.files.scripts import run_script
from tests.support.ranks import run_processes

TRAINS = """
import csv, logging, os, sqlite3
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
import farspan

logging.basicConfig(level=logging.INFO, filename="train.log", format="%(message)s")
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), measure=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, first = torch.randn(4, 8), 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1
    print("going on from epoch", first)
best = float("inf")
for epoch in range(first, first + 3):
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, "last.pt")
    if loss.item() < best:
        best = loss.item()
        torch.save(model.state_dict(), "best.pt")
        if os.path.lexists("latest"):
            os.remove("latest")
        os.symlink("best.pt", "latest")
    with open("log.csv", "a", newline="") as file:
        csv.writer(file).writerow([epoch, f"{loss.item():.6f}"])
    logging.info("epoch %d", epoch)
    np.savez("metrics.npz", loss=loss.item(), epoch=epoch)
    mapped = np.memmap("mapped.bin", dtype=np.float32, mode="w+", shape=(3,))
    mapped[:] = epoch
    mapped.flush()
model.load_state_dict(torch.load("latest"))
print(f"{model(x).square().mean().item():.6f}", np.load("metrics.npz")["epoch"], np.memmap("mapped.bin", np.float32)[0])
print(len(torch.load("last.pt", mmap=True)["model"]), open("log.csv").read())
state = {name: value.clone() for name, value in model.state_dict().items()}
save_file(state, "model.safetensors")
torch.save(state, "Größe.pt")
print(all(torch.equal(load_file("model.safetensors")[name], value) for name, value in torch.load("Größe.pt").items()))
torch.jit.script(nn.ReLU()).save("relu.pt")
print(torch.jit.load("relu.pt")(torch.tensor([-1.0])).item())
"""


def test_save_best_load_best_and_going_on(tmp_path: Path) -> None:
    alone = run_script(tmp_path, TRAINS, 1)
    together = run_script(tmp_path, TRAINS, 3)
    assert together.printed == alone.printed * 3
    assert together.files == alone.files
    assert (tmp_path / "work" / "train.log").read_text() == "epoch 0\nepoch 1\nepoch 2\n"  # no line of ours
    for name in ("best.pt", "last.pt"):  # the next run finds what the first has left
        (tmp_path / "start" / name).write_bytes((tmp_path / "work" / name).read_bytes())
    alone, together = run_script(tmp_path, TRAINS, 1), run_script(tmp_path, TRAINS, 2)
    assert alone.printed[0].startswith("going on from epoch 3")
    assert together.printed == alone.printed * 2
    # pickle writes a text twice that came twice from a file: the state of another rank's optimizer came in one piece
    assert {**together.files, "last.pt": ""} == {**alone.files, "last.pt": ""}


def test_ranks_of_another_launcher_keep_their_files_apart_from_distribute_on(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{TRAINS}")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"FARSPAN_FILES": "first", "TMPDIR": str(temporary)}
    finished = run_processes(2, script, environment=environment)
    assert [process.stderr for process in finished if process.code] == []
    assert finished[0].stdout == finished[1].stdout
    assert torch.load(tmp_path / "last.pt")["epoch"] == 2
    assert (tmp_path / "log.csv").read_text().count("\n") == 3
    assert os.listdir(temporary) == []


FORGETS = """
import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_never_calls_distribute_is_told_so_once(tmp_path: Path) -> None:
    said = "farspan run: nothing called farspan.distribute(model): 2 copies of the model were trained"
    assert run_script(tmp_path, FORGETS, 2).error.count(said) == 1
    assert run_script(tmp_path, FORGETS, 1).error == ""
    assert run_script(tmp_path, "print('no training')", 2).error == ""
