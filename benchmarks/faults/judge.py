"""Whether what came of a case is what must: four questions, each with its own answer.

found   the job fails exactly where a fault ends it; else it prints what the plain program prints
named   the head of the launcher's report has the right rank and the cause
ended   everything had ended soon after the fault
clean   no process, folder or shared memory is left, and no process was aborted by its own runtime
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.faults.job import Outcome
from benchmarks.faults.kinds import KINDS, Case, Expected

__all__ = ["QUESTIONS", "Verdict", "judge"]

QUESTIONS = ("found", "named", "ended", "clean")
_HEAD_LINES = 3
_ABORTS = ("terminate called", "core dumped", "Fatal Python error: Aborted", "double free", "free(): invalid")
_TORCHRUN_STOPPED_S = 30.0
"""How long torchrun waits for a rank to answer SIGTERM before it kills it; one that is stopped does not answer."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The answers, and for each that is no, why."""

    problems: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in QUESTIONS})

    def holds(self, question: str) -> bool:
        return not self.problems[question]

    @property
    def is_good(self) -> bool:
        return not any(self.problems.values())


def judge(case: Case, outcome: Outcome, plain: Sequence[str]) -> Verdict:
    """Judge a run.

    Args:
        case: What was to be done.
        outcome: What came of it.
        plain: What the program prints without farspan, over as many steps as a case has whose fault is to disturb
            nothing.
    """
    expected, verdict = KINDS[case.kind].expected(case), Verdict()
    problems = verdict.problems
    if expected.fails and not outcome.struck:
        problems["found"].append("the fault never came")
    if expected.fails:
        _judge_failure(case, expected, outcome, problems)
    else:
        _judge_success(case, outcome, plain, problems["found"])
    problems["clean"] += [f"process {words}" for words in outcome.processes]
    problems["clean"] += [f"left {name}" for name in outcome.files]
    everything = "\n".join([outcome.out, outcome.err, *outcome.logs.values()])
    problems["clean"] += [f"abort text {text!r}" for text in _ABORTS if text in everything]
    return verdict


def _judge_failure(case: Case, expected: Expected, outcome: Outcome, problems: dict[str, list[str]]) -> None:
    if outcome.code is None:
        problems["found"].append("the launcher had to be ended")
    elif outcome.code == 0:
        problems["found"].append("exit code 0")
    elif case.launcher == "run" and expected.code is not None and outcome.code != expected.code:
        problems["found"].append(f"exit code {outcome.code} instead of {expected.code}")
    most_s = expected.within_s
    if case.launcher == "torchrun" and case.kind in ("stop", "stop_and_raise"):
        most_s += _TORCHRUN_STOPPED_S
    if outcome.duration_s > most_s:
        problems["ended"].append(f"{outcome.duration_s:.1f} s after the fault, at most {most_s:g}")
    if expected.reports:
        problems["named"] += _judge_report(case, expected, outcome)


def _judge_report(case: Case, expected: Expected, outcome: Outcome) -> list[str]:
    if case.launcher == "run":
        head, texts = head_of_report(outcome.err), expected.texts
        if not head:
            return ["no report"]
        named = f"rank {expected.rank} of {case.num_ranks} failed"
        problems = [f"raw control character {character!r}" for character in ("\x1b", "\x9b") if character in head]
    else:
        texts = expected.texts if expected.torch_texts is None else expected.torch_texts
        if not texts:
            return []
        head = root_cause(outcome.err)
        if not head:
            return ["no root cause"]
        named = f"rank      : {expected.rank} "
        head = head.replace("\x1b", "\\x1b")
        problems = []
    if expected.rank is not None and named not in head:
        found = re.search(r"rank \d+ of \d+ failed|rank      : \d+", head)
        problems.append(f"not rank {expected.rank} but {found[0] if found else head.splitlines()[0]!r}")
    return problems + [f"no {text!r} in {_clip(head)!r}" for text in texts if not re.search(text, head)]


def _judge_success(case: Case, outcome: Outcome, plain: Sequence[str], problems: list[str]) -> None:
    if outcome.code != 0:
        problems.append(f"exit code {outcome.code}")
    lines = [line for line in outcome.out.splitlines() if line.startswith(("step ", "weights "))]
    if lines != list(plain):
        number = next((i for i, (a, b) in enumerate(zip(lines, plain, strict=False)) if a != b), len(lines))
        problems.append(f"line {number} of {len(lines)} differs from the plain program's {len(plain)} lines")
    if case.kind == "report":
        num_warnings = outcome.err.count("the report is not kept")
        if num_warnings != (0 if outcome.report_kept else 1):
            problems.append(f"{num_warnings} warnings, report {'kept' if outcome.report_kept else 'not kept'}")


def head_of_report(err: str) -> str:
    """The first lines of what the launcher says at last."""
    lines = err.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("farspan run: ") and "passed on" not in line]
    return "\n".join(lines[starts[-1] :][:_HEAD_LINES]) if starts else ""


def root_cause(err: str) -> str:
    """What torchrun reports as the root cause, with the end of its traceback."""
    _, found, text = err.rpartition("Root Cause (first observed failure):")
    return text.strip() if found else ""


def _clip(text: str) -> str:
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"
