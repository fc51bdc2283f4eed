"""A thousand cases: what is read or called, and whether it is right."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bad_input.documents import CLUSTER_TEXT, GRAPH, PLAN, STEP, break_document, break_toml, text_of

__all__ = ["RIGHT_FILES", "Case", "all_cases", "right_cases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to try.

    Attributes:
        what: For people.
        call: "cli" (with `words`), or a reader: "plan" (plan.json), "launcher" (variables of a launcher).
        words: The command line.
        files: By name what is not as in `RIGHT_FILES`: contents, or "folder", "pipe", "zeros" (a link to a file without
            end), "loop" (a link to itself), "gone".
        variables: More of them.
        is_right: Whether it must be taken; None where nobody knows.
    """

    what: str
    call: str = "cli"
    words: tuple[str, ...] = ()
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    is_right: bool | None = False


_SCRIPT = b"import sys\nprint('ran', sys.argv[1:])\n"
RIGHT_FILES: dict[str, bytes] = {
    **{each.name: text_of(each.value).encode() for each in (PLAN, GRAPH, STEP)},
    "cluster.toml": CLUSTER_TEXT.encode(),
    "train.py": _SCRIPT,
}
_PLAN_WORDS = ("plan", "--graph", "graph.json", "--cluster", "cluster.toml")
_REPORT_WORDS = ("report", "step.json")
_NO_COUNTS = ("0", "-1", "1.5", "x", "", " ", "1e9", "1_0", "\u0664", "nan", "9" * 30, "9" * 5000, "1000000000", "0x8")
_NO_SECONDS = ("0", "-1", "x", "", "nan", "inf", "1e999", "1_0", "\u0664", "1,5", "9" * 5000, "1e12", "-0.0", "5 s")
_NO_OUTPUTS = ("", "folder", "no/such/folder/file", "pipe", "loop", "zeros", "x" * 300, "/proc/version", "train.py/x")
_NO_INPUTS = ("", "folder", "pipe", "loop", "zeros", "none", "x" * 300, "/dev/zero", "/proc/self/mem")
_NO_MEMORY = ("", "much", "-1GiB", "nan", "inf", "1e999GiB", "0", "14 GX", "14GiB/s", "rank:0=", "rank:x=1GiB")
_NO_PINS = ("", "a", "=", "a=", "=rank:0", "a=1", "a=rank:-1", "a=rank:" + "9" * 30, "a=cuda:0")
_SPECIAL = {"folder": "folder", "pipe": "pipe", "loop": "loop", "zeros": "zeros"}
_SCRIPT_WORDS = ("plan", "--cluster", "cluster.toml")
_WRONG_WORDS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((*_PLAN_WORDS, "--micro-batches", "{}"), _NO_COUNTS),
    (
        (*_PLAN_WORDS, "{}"),
        ("--contiguous", "--roofline", "--fresh", "--jsn", "--micro-batches", "--js"),
    ),
    ((*_PLAN_WORDS, "{}", "2"), ("--stages", "--max-memory", "--explain", "--output", "--html", "--pin", "--together")),
    (
        ("plan", "--cluster", "cluster.toml", "--graph", "{}"),
        ("", "folder", "pipe", "loop", "zeros", "none", "x" * 300),
    ),
    (
        ("plan", "--graph", "graph.json", "--cluster", "{}"),
        ("", "folder", "pipe", "loop", "zeros", "none", "graph.json"),
    ),
    (("report", "{}"), ("", "folder", "pipe", "loop", "zeros", "none", "graph.json", "cluster.toml", "/dev/zero")),
    ((*_REPORT_WORDS, "--html", "{}"), (*_NO_OUTPUTS, "step.json", "./step.json")),
    ((*_REPORT_WORDS, "--perfetto", "{}"), (*_NO_OUTPUTS, "step.json")),
    ((*_REPORT_WORDS, "--html", "page", "--perfetto", "{}"), ("page", "./page")),
    ((*_REPORT_WORDS, "{}"), ("more", "--htm", "--html", "--json")),
    ((*_SCRIPT_WORDS, "--micro-batches", "{}", "train.py"), _NO_COUNTS),
    ((*_SCRIPT_WORDS, "--stages", "{}", "train.py"), _NO_COUNTS),
    ((*_SCRIPT_WORDS, "--max-memory", "{}", "train.py"), (*_NO_MEMORY, "=1GiB", "1\u0664GiB")),
    ((*_SCRIPT_WORDS, "--pin", "{}", "train.py"), _NO_PINS),
    ((*_SCRIPT_WORDS, "--pin", "a=rank:0", "--pin", "{}", "train.py"), ("a=rank:1", "a=rank:0")),
    ((*_SCRIPT_WORDS, "--together", "{}", "train.py"), ("", ",", "a,", ",a", "a,,b", " ,a")),
    ((*_SCRIPT_WORDS, "--explain", "{}", "train.py"), ("", "  ")),
    ((*_SCRIPT_WORDS, "--output", "{}", "train.py"), (*_NO_OUTPUTS, "train.py", "cluster.toml", "./train.py")),
    ((*_SCRIPT_WORDS, "--html", "{}", "train.py"), (*_NO_OUTPUTS, "train.py", "plan.json")),
    ((*_SCRIPT_WORDS, "--recalibrate", "{}", "train.py"), ("none", "folder", "pipe", "graph.json", "plan.json", "")),
    ((*_SCRIPT_WORDS, "{}"), ("none.py", "folder", "", "graph.json", "step.json", "cluster.toml", "-m", "--", "zeros")),
    ((*_SCRIPT_WORDS, "-m", "{}"), ("", "no_such_module", "no.such.module", "..", "a b", "/")),
    (("profile", "--output", "{}", "train.py"), (*_NO_OUTPUTS, "train.py")),
    (("profile", "{}"), ("none.py", "--cluster", "-m", "--micro-batches", "graph.json", "")),
    (("profile", "--cluster", "{}", "train.py"), ("none", "folder", "pipe", "graph.json")),
    (("run", "-n", "{}", "train.py"), _NO_COUNTS),
    (("run", "-n", "1", "--report", "{}", "train.py"), (*_NO_OUTPUTS, "report.txt", "report", "folder/r.htm")),
    (("run", "-n", "1", "--files", "{}", "train.py"), ("", "some", "ALL", "first,all")),
    (("run", "-n", "1", "--log-dir", "{}", "train.py"), ("train.py", "train.py/logs", "x" * 300, "/proc/none")),
    (("run", "-n", "1", "{}"), ("none.py", "folder", "", "graph.json", "-m", "--", "--what")),
    (("run", "{}"), ("train.py", "-n", "--num-processes", "--help-me")),
    (("{}",), ("train.py", "plann", "", "--verbose", "help", "run\n", "x" * 5000)),
]
"""Command lines with one hole, and what must not stand in it."""

_FOUR = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
_NONE = {**_FOUR, "RANK": "", "WORLD_SIZE": ""}
_NO_SIZES = ("0", "-1", "4.0", "x", "1e3", "1_0", "\u0664", "9" * 30, "9" * 5000, "1000000000", "nan", "0x4", "4;")
_NO_RANKS = ("4", "-1", "1.0", "x", "1_0", "\u0661", "9" * 5000, "nan", "+-1", "1 2")
_NO_PORTS = ("0", "-1", "65536", "http", "29500.0", "\u0662", "9" * 5000)
_NO_HOSTS = ("a b", "\x1b[2J", "x" * 300, "h\u00f6st\n1", "http://host/", "a,b")
_LAUNCHERS: list[tuple[dict[str, str], str, tuple[str, ...]]] = [
    *((_FOUR, name, values) for name, values in (("RANK", _NO_RANKS), ("WORLD_SIZE", _NO_SIZES))),
    *((_FOUR, name, values) for name, values in (("MASTER_PORT", _NO_PORTS), ("MASTER_ADDR", _NO_HOSTS))),
    *((_FOUR, name, ("2", "-1", "x", "9" * 5000)) for name in ("LOCAL_RANK",)),
    *((_FOUR, name, ("0", "5", "-1", "x", "9" * 5000)) for name in ("LOCAL_WORLD_SIZE",)),
    *((_FOUR, name, ("",)) for name in _FOUR),
    *(
        ({"FARSPAN_RANK": "0", "FARSPAN_WORLD_SIZE": "2", "FARSPAN_STORE": "/tmp/store"}, name, values)
        for name, values in (
            ("FARSPAN_RANK", _NO_RANKS),
            ("FARSPAN_WORLD_SIZE", _NO_SIZES),
            ("FARSPAN_STORE", ("", "  ")),
        )
    ),
    *(
        ({**_NONE, "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, name, values)
        for name, values in (("SLURM_PROCID", _NO_RANKS), ("SLURM_NTASKS", _NO_SIZES))
    ),
    *(
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", **_FOUR, "RANK": "", "WORLD_SIZE": ""},
            name,
            values,
        )
        for name, values in (("OMPI_COMM_WORLD_RANK", _NO_RANKS), ("OMPI_COMM_WORLD_SIZE", _NO_SIZES))
    ),
]
_SETTINGS: list[tuple[str, tuple[str, ...]]] = [
    ("FARSPAN_DEADLINE", tuple(text for text in _NO_SECONDS if text)),
    *((f"FARSPAN_{name}", ("maybe", "2", "-1", "\u0661", "y" * 5000, "yes no")) for name in ("MEASURE", "VERBOSE")),
    ("FARSPAN_SAME_HOST", ("maybe", "nan", "truefalse")),
    ("FARSPAN_FILES", ("some", "ALL", "first all", "x" * 5000)),
]
_HARMLESS = [
    {"SLURM_TASKS_PER_NODE": "4(x999999999)", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    {"SLURM_TASKS_PER_NODE": "4(x999999)," * 5000 + "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    {"SLURM_NODEID": "9" * 5000, "SLURM_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    {"SLURM_TASKS_PER_NODE": "\u0664(x2),1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
]
"""Variables that say nothing about this process, however wrong they are."""


def right_cases() -> list[Case]:
    """What must be taken: each kind of file as it is, each command once, and names that control a terminal."""
    escaped = {each.name: text_of(each.value).replace("n0", "n0\\u001b[2J\\u009b") for each in (GRAPH, STEP)}
    escaped["step.json"] = escaped["step.json"].replace('"stage 0"', '"\\u001b]0;title\\u0007"')
    marked = {name: b"\xef\xbb\xbf" + data for name, data in RIGHT_FILES.items() if name != "train.py"}
    return [
        Case(what="plan.json", call="plan", is_right=True),
        Case(what="plan", words=_PLAN_WORDS, is_right=True),
        Case(what="plan as JSON", words=(*_PLAN_WORDS, "--json", "--micro-batches", "4"), is_right=True),
        Case(what="report", words=(*_REPORT_WORDS, "--html", "a.html", "--perfetto", "b.json"), is_right=True),
        Case(what="run", words=("run", "-n", "1", "train.py", "-n", "x"), is_right=True),
        Case(what="settings", words=("run", "-n", "1", "train.py"), variables={"FARSPAN_DEADLINE": "3"}, is_right=True),
        Case(what="version", words=("--version",), is_right=True),
        Case(what="four processes", call="launcher", variables=_FOUR, is_right=True),
        *(Case(what="SLURM's list", call="launcher", variables=variables, is_right=True) for variables in _HARMLESS),
        *(
            Case(what=what, words=words, files=files, is_right=True)
            for words in (_PLAN_WORDS, (*_PLAN_WORDS, "--json"), _REPORT_WORDS)
            for what, files in (
                ("names that control a terminal", {name: text.encode() for name, text in escaped.items()}),
                ("byte order marks", marked),
            )
        ),
        Case(what="byte order marks", call="plan", files=marked, is_right=True),
    ]


def all_cases(count: int, seed: int) -> list[Case]:
    """So many cases, the same for the same seed: a fifth of them command lines and variables, the rest files."""
    rng = random.Random(seed)
    cases = right_cases()
    words = [
        Case(what=f"words: {' '.join(line)}", words=line, files=_SPECIAL)
        for template, values in _WRONG_WORDS
        for line in (tuple(value if word == "{}" else word for word in template) for value in values)
    ]
    variables = [
        Case(what=f"{name}={value[:30]!r}", call="launcher", variables=given | {name: value})
        for given, name, values in _LAUNCHERS
        for value in values
    ]
    variables += [
        Case(what=f"{name}={value[:30]!r}", words=("run", "-n", "1", "train.py"), variables={name: value})
        for name, values in _SETTINGS
        for value in values
    ]
    cases += rng.sample(words, min(len(words), count * 22 // 100))
    cases += rng.sample(variables, min(len(variables), count * 8 // 100))
    readers: list[dict[str, Any]] = [
        {"call": "plan"},
        {"words": _PLAN_WORDS},
        {"words": (*_PLAN_WORDS, "--json")},
        {"words": (*_REPORT_WORDS, "--html", "page.html", "--perfetto", "trace.json")},
        {"words": _PLAN_WORDS},
    ]
    documents = [PLAN, GRAPH, GRAPH, STEP]
    for number in range(count - len(cases)):
        reader = readers[number % len(readers)]
        if number % len(readers) < len(documents):
            document = documents[number % len(readers)]
            broken, name = break_document(document, rng), document.name
        else:
            broken, name = break_toml(rng), "cluster.toml"
        cases.append(Case(what=broken.what, files={name: broken.data}, is_right=broken.is_right, **reader))
    return cases
