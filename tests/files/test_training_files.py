"""Programs that train and save, load what they saved, and go on from it: the same files and output as one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.files.scripts import run_plainly, run_script, run_warm

TRAINS = """
import csv, logging, os, sqlite3
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
import farspan

logging.basicConfig(level=logging.INFO, filename="train.log", format="%(message)s")
torch.manual_seed(0)
model = farspan.distribute(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
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
    """From the start: `test_ranks_of_another_launcher_keep_their_files_apart_from_distribute_on`."""
    run_plainly(tmp_path, TRAINS)
    for name in ("best.pt", "last.pt"):  # the next run finds what the first has left
        (tmp_path / "start" / name).write_bytes((tmp_path / "work" / name).read_bytes())
    alone, together = run_plainly(tmp_path, TRAINS), run_script(tmp_path, TRAINS, 2, is_warm=True)
    assert alone.printed[0].startswith("going on from epoch 3")
    assert together.printed == alone.printed * 2
    # pickle writes a text twice that came twice from a file: the state of another rank's optimizer came in one piece
    assert {**together.files, "last.pt": ""} == {**alone.files, "last.pt": ""}
    assert (tmp_path / "work" / "train.log").read_text() == "epoch 3\nepoch 4\nepoch 5\n"  # no line of ours


WRITES_BY_ITSELF = """
import os
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from torch.profiler import profile
from transformers import PreTrainedTokenizerFast

rank = int(os.environ["FARSPAN_RANK"])
torch.manual_seed(0)
os.mkdir("saved")
scripted = torch.jit.script(nn.Linear(rank + 1, 1))
scripted.save("saved/method.pt")
torch.jit.save(scripted, "saved/function.pt")
torch.jit.script(nn.ReLU())._save_for_lite_interpreter("saved/mobile.pt")
torch.jit.trace(lambda x: x + rank, torch.zeros(1)).save("saved/traced.pt")
save_file({"rank": torch.tensor(rank)}, "saved/rank.safetensors")
tokenizer = Tokenizer(models.WordLevel({"unknown": 0, f"rank{rank}": 1}, unk_token="unknown"))
tokenizer.save("saved/tokenizer.json")
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("saved/words")
with profile() as seen:
    torch.zeros(rank + 1).sum()
seen.export_chrome_trace("saved/trace.json")
print(torch.jit.load("saved/method.pt").weight.numel(), torch.jit.load("saved/function.pt").weight.numel())
print(torch.jit.load("saved/traced.pt")(torch.zeros(1)).item(), load_file("saved/rank.safetensors")["rank"].item())
print(Tokenizer.from_file("saved/tokenizer.json").get_vocab_size(), os.path.getsize("saved/mobile.pt") > 0)
print(Tokenizer.from_file("saved/tokenizer.json").id_to_token(1), len(open("saved/trace.json").read()) > 0)
print(min(PreTrainedTokenizerFast.from_pretrained("saved/words").get_vocab()))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_library_that_opens_files_by_itself_writes_those_of_the_first_rank(tmp_path: Path) -> None:
    alone = run_plainly(tmp_path, WRITES_BY_ITSELF.replace('["FARSPAN_RANK"]', '["RANK"]'))
    together = run_script(tmp_path, WRITES_BY_ITSELF, 2, late=1, is_warm=True)  # which would write last
    first, second = together.printed
    assert first == alone.printed[0]
    assert "2 2\n1.0 1\n" in second and "rank1" in second and "rank0" not in second
    saved = tmp_path / "work" / "saved"
    assert torch.jit.load(saved / "method.pt").weight.numel() == 1
    assert torch.jit.load(saved / "function.pt").weight.numel() == 1
    assert torch.jit.load(saved / "traced.pt")(torch.zeros(1)).item() == 0.0
    for files in (alone.files, together.files):
        for name in ("trace.json", "method.pt", "function.pt", "traced.pt"):
            del files[f"saved/{name}"]  # has times, or the lines that called the script, in it
    assert together.files == alone.files


def test_ranks_of_another_launcher_keep_their_files_apart_from_distribute_on(tmp_path: Path) -> None:
    alone = run_plainly(tmp_path, TRAINS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    together = run_warm(tmp_path, TRAINS, 3, {"FARSPAN_FILES": "first", "TMPDIR": str(temporary)})
    assert together.printed == alone.printed * 3
    assert together.files.keys() == alone.files.keys()
    assert {**together.files, "train.log": ""} == {**alone.files, "train.log": ""}  # which all had opened before
    assert torch.load(tmp_path / "work" / "last.pt")["epoch"] == 2
    assert (tmp_path / "work" / "log.csv").read_text().count("\n") == 3
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


LEAVES_OPEN = """
import csv
import torch
from torch import nn
import farspan

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.second(self.first(x))

torch.manual_seed(0)
rows = csv.writer(open("log.csv", "w"))
data = open("log.bin", "wb")
net = Net()
net.log = open("log.txt", "w")
model = farspan.distribute(net)
for step in range(3):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    rows.writerow([step, loss.item()])
    net.log.write(f"{step}\\n")
    data.write(bytes([step]))
"""


def test_files_that_the_program_leaves_open_are_whole(tmp_path: Path) -> None:
    """Python closes them when it clears the program's globals, which the model's own class holds."""
    alone, together = run_plainly(tmp_path, LEAVES_OPEN), run_script(tmp_path, LEAVES_OPEN, 2)
    assert together.files == alone.files
    assert {name: (tmp_path / "work" / name).stat().st_size > 2 for name in alone.files} == dict.fromkeys(
        ("log.csv", "log.bin", "log.txt"), True
    )
