"""benchmarks/programs: what its comparison sees, and a few of its programs over two processes."""

from __future__ import annotations

import ast
import io
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.programs.compare import differing_files, differing_lines, differing_objects, load_without_farspan
from benchmarks.programs.programs import SCRIPTS, added_line, differences, names, run_program
from tests.support.launcher import TIMEOUT_S


def test_each_program_says_what_it_is_and_names_the_one_line_that_distributes_it() -> None:
    assert len(names()) >= 45
    for name in names():
        source = (SCRIPTS / f"{name}.py").read_text()
        assert ast.get_docstring(ast.parse(source))
        lines = [line.strip() for line in source.splitlines() if "farspan" in line]
        assert lines == [f"# farspan: {added_line(name)}"]
        ast.parse(added_line(name))


def test_the_first_line_that_differs_is_shown() -> None:
    assert differing_lines("a\nb\n", "a\nb\n") == ""
    assert differing_lines("a\nb\n", "a\nc\n") == "line 2: c instead of b"
    assert differing_lines("a\n", "a\nb\n") == "2 lines instead of 1"


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, 2.0 + 2e-7]), "n": 1},
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64), "n": 1},
        {"w": torch.tensor([1.0, 2.0], requires_grad=True), "n": 1},
        {"w": torch.nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False), "n": 1},
        {"w": torch.tensor([1.0, 2.0]), "n": True},
        {"n": 1, "w": torch.tensor([1.0, 2.0])},
        {"w": torch.tensor([1.0, 2.0])},
    ],
)
def test_objects_differ_in_a_bit_a_dtype_a_kind_an_order_or_a_length(other: object) -> None:
    wanted = {"w": torch.tensor([1.0, 2.0]), "n": 1}
    assert not differing_objects(wanted, {"w": torch.tensor([1.0, 2.0]), "n": 1})
    assert differing_objects(wanted, other)


def test_objects_differ_in_what_shares_memory() -> None:
    tied = torch.zeros(2)
    assert differing_objects([tied, tied], [torch.zeros(2), torch.zeros(2)])
    assert not differing_objects([tied, tied], [x := torch.zeros(2), x])


def test_files_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    for side, value in (("one", 1.0), ("two", 1.0), ("three", 2.0)):
        folder = tmp_path / side
        (folder / "sub").mkdir(parents=True)
        torch.save({"w": torch.tensor(value)}, folder / "sub" / f"{'w'}.pt")
        np.save(folder / "a.npy", np.array(value))
        (folder / "log.csv").write_text(f"loss,{value}\n")
        with sqlite3.connect(folder / "runs.db") as connection:
            connection.execute("CREATE TABLE t (v REAL)")
            connection.execute("INSERT INTO t VALUES (?)", (value,))
        connection.close()
    assert differing_files(tmp_path / "one", tmp_path / "two") == []
    (tmp_path / "three" / "more.txt").write_text("")
    found = differing_files(tmp_path / "one", tmp_path / "three")
    assert [difference.split(":")[0] for difference in found] == [
        "file more.txt is one too many",
        "file a.npy",
        "file log.csv",
        "file runs.db",
        "file sub/w.pt",
    ]


def test_a_file_that_needs_farspan_cannot_be_loaded() -> None:
    from farspan.errors import FarspanError

    buffer = io.BytesIO()
    torch.save({"kind": FarspanError}, buffer)
    with pytest.raises(Exception, match="needs farspan"):
        load_without_farspan(buffer.getvalue())


@pytest.mark.parametrize("name", ["save_whole_model", "wgan_clip"])
def test_the_same_program_over_two_processes(name: str, tmp_path: Path) -> None:
    plain = run_program(name, None, tmp_path / "plain", timeout_s=TIMEOUT_S)
    assert not plain.error and plain.text.count("\n") >= 4
    assert differences(plain, run_program(name, 2, tmp_path / "two", timeout_s=TIMEOUT_S)) == []
