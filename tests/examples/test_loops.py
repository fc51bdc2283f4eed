"""The programs of examples/loops: the same lines, numbers and weights with the one line added, over two processes."""

from __future__ import annotations

import ast

import pytest
from benchmarks.loops.programs import LOOPS, added_line, compare, names, run_program
from tests.support.launcher import TIMEOUT_S


def test_each_program_names_the_one_line_that_distributes_it() -> None:
    assert len(names()) >= 12
    for name in names():
        source = (LOOPS / f"{name}.py").read_text()
        assert [line for line in source.splitlines() if "farspan" in line] == [f"# farspan: {added_line(name)}"]
        ast.parse(added_line(name))


@pytest.mark.parametrize("name", ["word_lstm"])
def test_the_same_program_over_two_processes(name: str) -> None:
    plain = run_program(name, None, timeout_s=TIMEOUT_S)
    assert len(plain.results[0]["numbers"]) > 5, plain.error
    distributed = run_program(name, 2, timeout_s=TIMEOUT_S)
    assert len(distributed.results) == 2, distributed.error
    assert compare(plain, distributed, num_lines=len(plain.text.splitlines())) == ("bitwise", 0.0)
    next(iter(distributed.results[1]["weights"].values())).view(-1)[0] += 1e-3
    assert compare(plain, distributed, num_lines=0)[0].startswith("differs")
