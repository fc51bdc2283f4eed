"""What a rank has written for itself takes its place on the disk when it becomes the first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.launch.files.layers import Layer, mkdirs
from farspan.launch.files.succession import bring


@pytest.fixture(params=["same disk", "another disk"])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Layer]:
    if request.param == "another disk" and not os.path.isdir("/dev/shm"):
        pytest.skip("no second file system")
    other = "/dev/shm" if request.param == "another disk" else str(tmp_path)
    with tempfile.TemporaryDirectory(dir=other) as folder:
        if request.param == "another disk" and os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("no second file system")
        mkdirs(f"{folder}/rank1")
        yield Layer(f"{folder}/rank1")


def test_files_folders_links_and_removals_are_brought_and_open_files_stay_open(layer: Layer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "log").write_text("of rank 0\n")
    (out / "old").write_text("removed by the script")
    own = Path(layer.path(str(out)))
    (own / "new" / "deep").mkdir(parents=True)
    (own / "new" / "deep" / "model").write_bytes(b"weights")
    os.symlink("new/deep/model", own / "latest")
    layer.mark_gone(str(out / "old"))
    with (own / "log").open("a") as log, (own / "table").open("w+") as table:
        log.write("step 0\n")
        log.flush()
        table.write("abc")
        table.flush()
        table.seek(1)
        bring(layer)
        log.write("step 1\n")
        table.write("x")
        table.flush()
    assert (out / "log").read_text() == "step 0\nstep 1\n"
    assert (out / "table").read_text() == "axc"
    assert (out / "latest").read_bytes() == b"weights" and (out / "latest").is_symlink()
    assert sorted(os.listdir(out)) == ["latest", "log", "new", "table"]


def test_a_folder_takes_the_place_of_a_file_and_a_file_that_of_a_folder(layer: Layer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("file")
    (tmp_path / "b").mkdir()
    own = Path(layer.path(str(tmp_path)))
    (own / "a").mkdir(parents=True)
    (own / "a" / "inside").write_text("1")
    (own / "b").write_text("2")
    bring(layer)
    assert (tmp_path / "a" / "inside").read_text() == "1" and (tmp_path / "b").read_text() == "2"
