"""benchmarks/mutants: a planted fault changes what the source computes where it is active, and only there."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutants.choose import LeftOut, choose, left_out_lines
from benchmarks.mutants.plant import SWITCH, candidates_in, rewrite
from benchmarks.mutants.reached import Map, MappedTest, bits, read_reached

WHERE = {"file": "src/farspan/a.py", "room": "a"}
CASES = [
    ("condition turned", "def f(x):\n    if x.flag and x.other:\n        return 1\n    return 0", None),
    ("condition turned", "def f():\n    return 'a' if not [] else 'b'", ("a", "b")),
    ("comparison changed", "def f():\n    return 2 < 2", (False, True)),
    ("comparison changed", "def f():\n    return 2 in [2]", (True, False)),
    ("and for or", "def f():\n    return [] or 'b'", ("b", [])),
    ("call left out", "def f():\n    found = [1]\n    found.clear()\n    return found", ([], [1])),
    ("assignment left out", "def f():\n    n = 'a'\n    n += 'b'\n    return n", ("ab", "a")),
    ("order reversed", "def f():\n    t = ''\n    for x in 'ab':\n        t = t + x\n    return t", ("ab", "ba")),
    ("order reversed", "def f():\n    return sorted('bca')", (["a", "b", "c"], ["a", "c", "b"])),
    ("arguments swapped", "def f():\n    a, b = 'a', 'b'\n    return ''.join(map(str, zip(a, b)))", None),
    ("copy left out", "def f():\n    x = []\n    return list(x) is x", (False, True)),
    ("copy left out", "def f():\n    x = []\n    return x.copy() is x", (False, True)),
    ("constant plus one", "def f():\n    return 7", (7, 8)),
    ("plus for minus", "def f(a='c', b=5):\n    return b - b", (0, 10)),
    ("min for max", "def f():\n    return min('a', 'b')", ("a", "b")),
    ("returned flag turned", "def f():\n    return True", (True, False)),
]
NOT_PLANTED = '''
"""A module."""
LIMIT = 3
def decorated(n=1): return lambda f: f
class Settings:
    limit = 4 + 1
    @decorated(2)
    def of(self, n: "1 + 1" = 5) -> "2": raise ValueError(f"{n + 1} of {max(n, 3)}", 4)
def told(n):
    """Of one."""
    _log.info("%d", n + 1)
    assert n.ok, str(n + 1)
    match n:
        case 3: return f"{n + 1}"
'''


def planted(source: str, rule: str) -> tuple[Any, int]:
    """The function `f` of a source with all faults of a rule; how many there are."""
    module = ast.parse(source)
    faults = list(enumerate(each for each in candidates_in(module) if each.rule == rule))
    points = rewrite(module, faults, lines=source.splitlines(), where=WHERE, blocks=iter(range(100, 200)))
    assert all(point.change and point.source for point in points if point.rule != "block")
    room: dict[str, Any] = {}
    exec(ast.unparse(ast.fix_missing_locations(module)), room)
    return room["f"], len(faults)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    switch = {"active": -1}
    monkeypatch.setattr(builtins, SWITCH, lambda number: number == switch["active"], raising=False)
    return switch


@pytest.mark.parametrize(("rule", "source", "results"), CASES)
def test_a_fault_changes_the_result_only_where_it_is_active(
    rule: str, source: str, results: tuple[Any, Any] | None, active: dict[str, int]
) -> None:
    function, num_faults = planted(source, rule)
    assert num_faults == 1
    if results is not None:
        assert function() == results[0]
        active["active"] = 0
        assert function() == results[1]


def test_faults_may_be_in_each_other(active: dict[str, int]) -> None:
    function, num_faults = planted("def f():\n    return (1 + 2) + (3 - 1)", "plus for minus")
    found = []
    for active["active"] in (-1, *range(num_faults)):
        found.append(function())
    assert sorted(found) == [1, 1, 5, 7] and found[0] == 5


def test_texts_of_errors_defaults_annotations_and_patterns_are_left_alone() -> None:
    rules = [candidate.rule for candidate in candidates_in(ast.parse(NOT_PLANTED))]
    assert rules == ["condition turned"]  # of the assertion


def test_each_block_has_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[int] = []
    monkeypatch.setattr(builtins, SWITCH, reached.append, raising=False)
    source = "def f(x=0):\n    '''Doc.'''\n    if x:\n        return 1\n    for _ in 'a':\n        pass\n    return 0"
    function, _ = planted(source, "and for or")
    assert function() == 0 and function.__doc__ == "Doc."
    assert len(reached) == 3  # the function, what follows the `if`, the loop
    assert function(1) == 1
    assert len(set(reached)) == 4


def test_what_processes_note_is_read(tmp_path: Path) -> None:
    (tmp_path / "reached").write_text("pid 12\n3\n70\ncpu 12 1.5\npid 13\n3\ncpu 13 0.25\n")
    found = read_reached(tmp_path / "reached", without_cpu_of=12)
    assert (bits(found.mask), found.pids, found.cpu_s) == ({3, 70}, {12, 13}, 0.25)
    assert read_reached(tmp_path / "none").mask == 0


def made(name: str, cpu_s: float, mask: int, *uses: str) -> MappedTest:
    return MappedTest(name=name, outcome="passed", wall_s=cpu_s, cpu_s=cpu_s, mask=mask, uses=uses)


def test_the_cheapest_tests_that_reach_all_are_chosen_and_what_they_share_is_paid_once() -> None:
    tests = [made("a.py::dear", 9, 0b1111), made("a.py::x", 1, 0b0001, "s"), made("a.py::y", 1, 0b0010, "s")]
    shared = made("s", 2, 0b1100)
    found = choose(
        Map(tests={test.name: test for test in tests}, shared={"s": shared}, collected=0), {}, 0b1111, limit_s=12
    )
    assert sorted(found.chosen) == ["a.py::x", "a.py::y"]
    assert (found.cost_s, found.num_blocks) == (4, 4)


def test_a_test_that_takes_next_to_nothing_is_chosen_though_others_reach_what_it_reaches() -> None:
    tests = {test.name: test for test in [made("a.py::x", 1, 1), made("a.py::y", 0.01, 0), made("a.py::z", 9, 1)]}
    found = choose(Map(tests=tests, shared={}, collected=0), {}, 1, limit_s=5)
    assert sorted(found.chosen) == ["a.py::x", "a.py::y"]


def test_a_test_that_alone_notices_a_fault_is_chosen_within_the_limit() -> None:
    tests = {test.name: test for test in [made("a.py::x", 1, 1), made("a.py::y", 2, 1)]}
    whole = Map(tests=tests, shared={}, collected=0)
    assert choose(whole, {5: ["a.py::y"]}, 1, limit_s=3).unnoticed == []
    assert choose(whole, {5: ["a.py::y"]}, 1, limit_s=1.5).unnoticed == [5]


def test_what_is_left_out_is_listed_in_few_lines(tmp_path: Path) -> None:
    names = ["a.py::x[1]", "a.py::x[2]", "a.py::y[1]", "a.py::y[2]", "b.py::z[c::d]"]
    lines = left_out_lines(names, {"a.py::x[1]"})
    assert lines == ["a.py::x[2]", "a.py::y", "b.py"]
    (tmp_path / "list").write_text("\n".join(lines))
    left_out = LeftOut.read(tmp_path / "list")
    assert [name for name in names if name not in left_out] == ["a.py::x[1]"]
