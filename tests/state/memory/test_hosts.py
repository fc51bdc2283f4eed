"""Checkpoints in the memory of several hosts: each is whole as long as no two neighbours are lost."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.state.format.test_format import arrays, write

from farspan.errors import DamageError
from farspan.launch.memory.keeper import Keeper
from farspan.state import format as files
from farspan.state.format.manifest_text import manifest_to_text
from farspan.state.memory.hosts import Hosts

ROOT, SECRET = "c0ffee", "the secret of a run"


class Run:
    """The memory of three hosts, of which the first two have a rank each."""

    def __init__(self, folder: Path) -> None:
        self.tops = [folder / f"host{number}" for number in range(3)]
        for top in self.tops:
            (top / ROOT).mkdir(parents=True)
        self.keepers = [Keeper(str(top)) for top in self.tops]
        for keeper in self.keepers:
            keeper.secret = SECRET
        self.lost: set[int] = set()
        self.scratch = folder / "scratch"

    def host(self, own: int) -> Hosts:
        """The hosts that are left, as one of them sees them."""
        left = [number for number in range(3) if number not in self.lost]
        addresses = tuple([("127.0.0.1", self.keepers[number].port) for number in left])
        return Hosts(top=str(self.tops[own]), own=left.index(own), addresses=addresses, secret=SECRET)

    def save(self, step: int, serial: int, *, until: str = "") -> None:
        """Save as the ranks do, or until something ends them."""
        made = Path(write(self.scratch, step, arrays(step), rows=2))
        manifest = files.read_manifest(str(made))
        manifest = dataclasses.replace(manifest, serial=serial)
        name = f"{ROOT}/step-{step}"
        for number, stored in enumerate(manifest.files):
            draft = self.tops[number] / f"{name}.tmp-{manifest.save_id}"
            draft.mkdir(exist_ok=True)
            shutil.copy(made / stored.name, draft)
            if until == f"write {number}":
                return
            self.host(number).copy_away(f"{draft}/{stored.name}", lambda: None)
        own = self.tops[0] / f"{name}.tmp-{manifest.save_id}"
        text = manifest_to_text(manifest)
        self.host(0).publish(str(own), str(self.tops[0] / name), text)
        if until == "publish":
            return
        (own / "manifest.json").write_bytes(text)
        own.rename(self.tops[0] / name)
        (self.tops[0] / ROOT / "latest").touch()
        self.host(0).remove_all_but(str(self.tops[0] / name))

    def lose(self, number: int) -> None:
        self.lost.add(number)
        self.keepers[number].close()
        shutil.rmtree(self.tops[number])

    def newest(self, own: int) -> str | None:
        found = self.host(own).newest(f"{self.tops[own]}/{ROOT}")
        return None if found is None else os.path.basename(found)

    def read(self, own: int, step: int) -> bool:
        """Returns whether a host reads what was saved, to the bit."""
        folder = f"{self.tops[own]}/{ROOT}/step-{step}"
        manifest = files.read_manifest(folder)
        with files.Reader(folder, manifest, fetch=self.host(own).bring) as reader:
            for name, array in arrays(step).items():
                memory = bytearray(manifest.tensors[name].size_bytes)
                reader.read(name, memoryview(memory))
                if bytes(memory) != np.ascontiguousarray(array).tobytes():
                    return False
        return True


@pytest.fixture
def run(tmp_path: Path):
    made = Run(tmp_path)
    yield made
    for number, keeper in enumerate(made.keepers):
        if number not in made.lost:
            keeper.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_host_may_be_lost(run: Run, lost: int) -> None:
    run.save(4, 0)
    run.save(7, 1)
    run.lose(lost)
    for own in {0, 1, 2} - {lost}:
        assert run.newest(own) == "step-7" and run.read(own, 7)


def test_where_two_hosts_that_hold_the_same_are_lost_there_is_no_checkpoint_and_nobody_takes_half_of_one(
    run: Run,
) -> None:
    run.save(4, 0)
    run.lose(0)
    run.lose(1)  # both copies of the first rank's file
    assert run.newest(2) is None


@pytest.mark.parametrize(("until", "lost", "step"), [("write 1", 1, 4), ("publish", 0, 7), ("publish", 1, 7)])
def test_a_save_that_a_loss_has_ended_counts_on_all_hosts_that_are_left_or_on_none(
    run: Run, until: str, lost: int, step: int
) -> None:
    run.save(4, 0)
    run.save(7, 1, until=until)
    run.lose(lost)
    for own in {0, 1, 2} - {lost}:
        assert run.newest(own) == f"step-{step}" and run.read(own, step)


def test_a_host_that_comes_new_fetches_what_it_reads(run: Run) -> None:
    run.save(4, 0)
    shutil.rmtree(run.tops[0] / ROOT)
    assert run.newest(0) == "step-4" and run.read(0, 4)
    assert sorted(os.listdir(run.tops[0] / ROOT / "step-4")) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_a_copy_that_is_damaged_is_not_believed(run: Run) -> None:
    run.save(4, 0)
    run.lose(0)
    copy = run.tops[1] / ROOT / "step-4" / "rank-00000.safetensors"
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    run.newest(2)
    with pytest.raises(DamageError):
        run.read(2, 4)


def test_who_does_not_know_the_secret_gets_nothing(run: Run) -> None:
    run.save(4, 0)
    stranger = Hosts(top=str(run.tops[2]), own=2, addresses=run.host(2).addresses, secret="a guess")
    shutil.rmtree(run.tops[2] / ROOT)
    assert stranger.newest(f"{run.tops[2]}/{ROOT}") is None
    with pytest.raises(OSError, match="no host"):
        stranger.bring(f"{run.tops[2]}/{ROOT}/step-4/rank-00000.safetensors", "0004")
