"""A checkpoint holds the program under any plan: saved by some ranks, it is loaded by others, to the bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_threads
from torch import nn

import farspan
from farspan.errors import CheckpointError, DamageError
from farspan.state import format as files
from farspan.state.format import disk
from farspan.state.saving.saver import Saved


class Net(nn.Module):
    """With a tied weight, a buffer that calls write, and a parameter that its own forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Program:
    """A training program; `step` runs one of its steps."""

    def __init__(self, plan: Any = "auto", num_groups: int | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.model = Net()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.model = farspan.distribute(self.model, plan=plan, data_parallel=num_groups)
        named = list(self.model.named_parameters())
        matrices = [item for name, item in named if name.endswith("weight")]
        others = [item for name, item in named if not name.endswith("weight")]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.2}, {"params": []}, {"params": others, "betas": (0.8, 0.9)}],
            lr=0.02,
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=20)
        self.data = torch.randint(0, 11, (20, 6), generator=generator)
        self.num_steps = 0
        self.losses: list[float] = []

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            tokens = self.data[self.num_steps]
            loss = nn.functional.cross_entropy(self.model(tokens), tokens.flip(0))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.num_steps += 1
            self.losses.append(loss.item())

    def save(self, folder: Path, **more: Any) -> Saved:
        given = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.num_steps}
        return farspan.save(folder, **given, **more)

    def load(self, folder: Path | str, **more: Any) -> Any:
        loaded = farspan.load(folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **more)
        self.num_steps = loaded.step
        return loaded

    def state(self) -> list[Any]:
        kept = self.optimizer.state_dict()
        tensors = [
            *self.model.state_dict().values(),
            *[item for each in kept["state"].values() for item in each.values()],
        ]
        return [self.scheduler.state_dict()["last_epoch"], self.losses, *[item.tolist() for item in tensors]]


def until(num_steps: int) -> list[Any]:
    """The program in one process, never ended."""

    def run(rank: int) -> list[Any]:
        program = Program()
        program.step(num_steps)
        return program.state()

    return run_threads(1, run)[0]


def saved_and_loaded(folder: Path, first: int, second: int, plan: Any = "auto") -> list[Any]:
    def save(rank: int) -> list[float]:
        program = Program()
        program.step(2)
        saved = program.save(folder)
        program.step()  # while it is written
        saved.wait()
        return program.losses[:2]

    losses = run_threads(first, save)[0]

    def load(rank: int) -> list[Any]:
        program = Program(plan)
        program.losses = list(losses)
        program.load(folder)
        program.step(2)
        return program.state()

    states = run_threads(second, load)
    assert all(state == states[0] for state in states)
    return states[0]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3), (3, 1), (1, 2)])
def test_a_program_goes_on_as_if_it_had_never_ended(tmp_path: Path, first: int, second: int) -> None:
    assert saved_and_loaded(tmp_path / "a", first, second) == until(4)


def test_it_goes_on_under_a_plan_with_a_wide_stage(tmp_path: Path) -> None:
    plan = {"embed": "rank:0", "scale": "rank:0", "head": "rank:0", "blocks.*": "rank:1+rank:2"}
    assert saved_and_loaded(tmp_path / "a", 2, 3, plan) == until(4)


def test_each_rank_writes_what_it_owns_once(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        program = Program()
        program.step()
        program.save(tmp_path, wait=True)

    run_threads(3, save)
    manifest = files.read_manifest(str(tmp_path / "step-1"))
    assert len(manifest.files) == 3
    names = {name for name in manifest.tensors if name.startswith("model/")}
    assert names == {f"model/{name}" for name in Net().state_dict() if name != "head.weight"}
    assert manifest.state["objects"]["model"]["aliases"] == {"head.weight": "embed.weight"}
    sizes = [item.size_bytes - item.header_bytes for item in manifest.files]
    assert max(sizes) < 0.7 * sum(sizes)
    with pytest.raises(CheckpointError, match="is of another model"):
        farspan.load(tmp_path, model=nn.Linear(2, 2))


def test_extra_holds_data_and_objects_that_keep_their_own_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 2)
    average: Any = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    scaler, own = torch.amp.GradScaler("cpu", init_scale=8.0), torch.Generator().manual_seed(4)
    extra = {"average": average, "scaler": scaler, "own": own, "losses": [0.5], "mask": torch.eye(2)}
    farspan.save(tmp_path, model={"first": model, "second": nn.Linear(1, 1)}, extra=extra, wait=True)
    drawn, weight = torch.rand(3, generator=own), average.module.weight.detach().clone()
    average.module.weight.data.zero_()
    again = {"average": average, "scaler": torch.amp.GradScaler("cpu"), "own": own}
    loaded = farspan.load(tmp_path, model={"first": model}, extra=again)
    assert torch.equal(average.module.weight, weight) and torch.equal(torch.rand(3, generator=own), drawn)
    assert again["scaler"].get_scale() == 8.0
    assert loaded.extra.keys() == {"losses", "mask"} and torch.equal(loaded.extra["mask"], torch.eye(2))


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    model = nn.Linear(700, 700)
    before = model.weight.detach().clone()
    saved = farspan.save(tmp_path, model=model, step=1)
    model.weight.data.zero_()
    saved.wait()
    farspan.load(tmp_path, model=model)
    assert torch.equal(model.weight, before)


def test_a_model_without_data_yet_can_be_saved_and_loaded_before_it_is_distributed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(300, 300)
    torch.manual_seed(0)
    with farspan.deferred_init():
        deferred = nn.Linear(300, 300)
    farspan.save(tmp_path, model=deferred, wait=True)
    farspan.load(tmp_path, model=(found := nn.Linear(300, 300)))
    assert torch.equal(found.weight, plain.weight)
    with farspan.deferred_init():
        deferred = nn.Linear(300, 300)
    farspan.load(tmp_path, model=deferred)
    assert torch.equal(deferred.weight, plain.weight)
    assert torch.equal(farspan.distribute(deferred).weight, plain.weight)


def test_a_fork_has_the_state_at_the_call_too(tmp_path: Path) -> None:
    model = nn.Linear(700, 700)
    before = model.weight.detach().clone()
    saved = farspan.save(tmp_path, model=model, step=1, snapshot="fork")
    model.weight.data.zero_()
    saved.wait()
    farspan.load(tmp_path, model=model)
    assert torch.equal(model.weight, before)


def test_state_keeps_its_precision_where_torch_would_round_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    exact = {item: torch.rand(item.shape) for item in model.parameters()}
    for item in model.parameters():
        optimizer.state[item]["exp_avg"] = exact[item]
    farspan.save(tmp_path, model=model, optimizer=optimizer, wait=True)
    again = torch.optim.Adam(model.parameters())
    farspan.load(tmp_path, model=model, optimizer=again)
    assert all(torch.equal(again.state[item]["exp_avg"], exact[item]) for item in model.parameters())


def damaged_in(path: str, tensor: str) -> None:
    manifest = files.read_manifest(path)
    piece = manifest.tensors[tensor].pieces[0]
    with open(f"{path}/{manifest.files[piece.file].name}", "r+b") as file:
        file.seek(piece.begin + 2)
        byte = file.read(1)[0]
        file.seek(piece.begin + 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_damage_is_named_and_nothing_changed_and_the_last_good_one_taken(tmp_path: Path, num_ranks: int) -> None:
    def save(rank: int) -> None:
        program = Program()
        for _ in range(3):
            program.step()
            program.save(tmp_path, wait=num_ranks == 1)  # threads that are alone have no end

    run_threads(num_ranks, save)
    damaged_in(str(tmp_path / "step-3"), "optimizer/blocks.1.0.weight/exp_avg")
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{}")

    def load(rank: int) -> tuple[str, bool, int]:
        program = Program()
        before = program.state()
        try:
            program.load(tmp_path)
        except DamageError as error:
            text = str(error)
        same = program.state() == before
        return text, same, program.load(tmp_path, strict=False).step

    for text, is_same, step in run_threads(num_ranks, load):
        assert "optimizer/blocks.1.0.weight/exp_avg in " in text and "step-3/rank-0000" in text
        assert f'farspan.load("{tmp_path}/step-1"' in text
        assert is_same and step == 1


def test_ranks_that_have_other_values_for_the_same_are_found(tmp_path: Path) -> None:
    def save(rank: int) -> list[str]:
        program = Program()
        found: list[str] = []
        for extra in ({"a": {"rank": rank}}, {"mask": torch.tensor([0, rank])}):
            try:
                program.save(tmp_path, extra=extra, wait=True)
            except CheckpointError as error:
                found.append(str(error).splitlines()[0])
        return found

    expected = [
        "ranks 0 and 1 save different values for extra/a.",
        "ranks 0 and 1 have different values for extra/mask.",
    ]
    assert run_threads(2, save) == [expected] * 2
    assert files.newest(str(tmp_path)) is None


def failing(number: int) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_is_raised_by_the_next_call_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(rank: int) -> list[str]:
        program = Program()
        program.step()
        program.save(tmp_path, wait=True)
        if rank == 0:
            monkeypatch.setattr(disk, "fsync", failing(errno.ENOSPC))
        program.step()
        program.save(tmp_path)
        program.step()
        try:
            program.save(tmp_path)
        except CheckpointError as error:
            if rank == 0:
                monkeypatch.undo()
            text = str(error)
        program.save(tmp_path)
        return [text, os.path.basename(program.load(tmp_path).path)]

    for text, latest in run_threads(2, save):
        assert "could not be written" in text and "No space left on device" in text
        assert latest == "step-3"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def test_a_folder_that_the_ranks_do_not_share_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = disk.opened
    monkeypatch.setattr(disk, "opened", lambda path, *more: real(path.replace("rank-00001", "elsewhere"), *more))

    def save(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            Program().save(tmp_path, wait=True)
        return str(caught.value)

    assert all("rank 0 does not see what rank 1 has written" in text for text in run_threads(2, save))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is nothing to save"):
        farspan.save(tmp_path, step=1)
    with pytest.raises(CheckpointError, match="extra/f cannot be saved"):
        farspan.save(tmp_path / "a", extra={"f": print})
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        farspan.load(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.LinearLR(torch.optim.SGD(model.parameters(), lr=0.1))
    for given, kind in ((model, "Linear"), ({"a": model}, "Linear"), (scheduler, "LinearLR"), (3, "int")):
        with pytest.raises(CheckpointError) as caught:
            farspan.save(tmp_path, model=model, optimizer=given, step=1)
        assert caught.value.what == f"optimizer= is a {kind}." and caught.value.why
        assert caught.value.hint == "an optimizer, or a dictionary of optimizers"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_checkpoints_may_be_called_step_something(tmp_path: Path) -> None:
    """By its name it was taken for one checkpoint, without a manifest."""
    farspan.save(tmp_path / "step-wise", model=nn.Linear(2, 2), step=3, wait=True)
    assert farspan.load(tmp_path / "step-wise").step == 3


class Pair(nn.Module):
    """Two layers that share a weight, or do not; and a buffer of which one element stands for many."""

    scale: torch.Tensor

    def __init__(self, *, is_tied: bool, value: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if is_tied:
            self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([value]).expand(4))


def test_a_weight_that_was_tied_is_loaded_into_both_that_are_not(tmp_path: Path) -> None:
    """Only the last one was loaded; the other kept its start, without a word."""
    tied = Pair(is_tied=True)
    farspan.save(tmp_path, model=tied, wait=True)
    farspan.load(tmp_path, model=(apart := Pair(is_tied=False)))
    assert torch.equal(apart.first.weight, tied.first.weight) and torch.equal(apart.second.weight, tied.first.weight)


def test_an_expanded_buffer_is_loaded(tmp_path: Path) -> None:
    """torch does not copy into it: the load raised when half of the model had been changed."""
    farspan.save(tmp_path, model=Pair(is_tied=True, value=3.0), wait=True)
    farspan.load(tmp_path, model=(found := Pair(is_tied=True)))
    assert found.scale.tolist() == [3.0] * 4
