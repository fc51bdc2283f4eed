"""Pulls between real processes: one of them alone reads what the others have, and one may be killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import run_processes

SCRIPT = Path(__file__).with_name("pulling.py")


def test_one_rank_alone_reads_all_as_its_last_line_and_nothing_of_it_passes_rank_0() -> None:
    finished = run_processes(3, SCRIPT, ["last"])
    assert [(process.code, process.stderr) for process in finished[1:]] == [(0, "")] * 2
    assert finished[2].stdout == "same: True\n"
    hub_bytes = int(finished[0].stdout.rpartition(":")[2])
    assert hub_bytes < 64 << 10  # what is agreed on; the reader got 32 MiB


@pytest.mark.parametrize(("case", "dead"), [("owner", 1), ("reader", 2)])
def test_a_rank_that_is_killed_in_the_middle_of_a_read_is_named_by_all_others_in_time(case: str, dead: int) -> None:
    finished = run_processes(3, SCRIPT, [case])
    assert finished[dead].code == -9
    for rank in {0, 1, 2} - {dead}:
        assert finished[rank].code == 1
        what = f"rank {dead} died (its connection closed without a goodbye)"
        assert finished[rank].stdout.splitlines()[0] == f"{what} True"
