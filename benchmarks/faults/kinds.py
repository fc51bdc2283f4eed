"""The kinds of faults, where and when one strikes, and what must come of it.

A case follows from its kind, its launcher and its seed alone: nothing else is drawn, and no clock is asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DEADLINE_S", "KINDS", "LAUNCHERS", "Case", "Expected", "Kind", "draw", "schedule"]

LAUNCHERS = ("run", "torchrun")
DEADLINE_S = 5.0
"""FARSPAN_DEADLINE of the cases that only a deadline can find."""
ENDS_WITHIN_S = 15.0
_NUM_MICRO_BATCHES = 4
_LATEST_STEP = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run with one fault.

    Attributes:
        kind: Of the fault.
        launcher: "run" (farspan run) or "torchrun".
        seed: All else follows from the three.
        num_ranks: Of the job.
        victim: The rank that the fault strikes.
        other: Another rank.
        step: Of the training, at which a fault of the program itself strikes.
        micro_batch: Of that step.
        place: Before what of that micro-batch: "forward", "backward", or "step" after the last one.
        since: From which moment of the victim a signal from outside is timed: "started" or "training".
        delay_s: How long after that moment.
        variant: Which of several forms of the fault.
        num_steps: How long the training would be.
    """

    kind: str
    launcher: str
    seed: int
    num_ranks: int
    victim: int
    other: int
    step: int
    micro_batch: int
    place: str
    since: str
    delay_s: float
    variant: int
    num_steps: int

    def described(self) -> dict[str, Any]:
        """What the training program is told."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What must come of a case.

    Attributes:
        fails: Whether the job must end with another exit code than 0; where not, nothing may be disturbed.
        code: The exit code of `farspan run`; None for any but 0.
        rank: The rank that the report must name as the one that failed; None for any.
        texts: Patterns that must be found in the head of the report.
        torch_texts: The same in the root cause that torchrun reports; None takes `texts`.
        reports: Whether the launcher lives to say anything.
        within_s: From the fault until everything has ended.
    """

    fails: bool = True
    code: int | None = None
    rank: int | None = None
    texts: tuple[str, ...] = ()
    torch_texts: tuple[str, ...] | None = None
    reports: bool = True
    within_s: float = ENDS_WITHIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        expected: What must come of a case of it.
        what: The fault, for people.
        launchers: Under which it makes sense.
        from_outside: The signal's name, if somebody else sends it, and whom it goes to ("victim" or "launcher").
        can_be_early: Whether a signal may come before the training has begun.
        has_deadline: Whether only a deadline can find it, so that a short one is set.
        victims: The first rank that it can strike.
        num_variants: How many forms it has.
        weight: How often it comes, next to the others.
    """

    expected: Callable[[Case], Expected]
    what: str
    launchers: tuple[str, ...] = LAUNCHERS
    from_outside: tuple[str, str] | None = None
    can_be_early: bool = False
    has_deadline: bool = False
    victims: int = 0
    num_variants: int = 1
    weight: int = 2


def _fails(code: int | None, *texts: str, torch: tuple[str, ...] | None = None) -> Callable[[Case], Expected]:
    def expected(case: Case) -> Expected:
        return Expected(code=code, rank=case.victim, texts=texts, torch_texts=torch)

    return expected


def _undisturbed(case: Case) -> Expected:
    return Expected(fails=False)


def _late(within_s: float = ENDS_WITHIN_S + DEADLINE_S) -> Callable[[Case], Expected]:
    def expected(case: Case) -> Expected:
        names = rf"waited {DEADLINE_S:g} s for (?:[^\n]*\b)?rank {case.victim}\b"
        return Expected(texts=("DeadlineError", names), within_s=within_s)

    return expected


def _diverges(case: Case) -> Expected:
    return Expected(code=1, texts=("DivergenceError",))


def _left(code: int) -> Callable[[Case], Expected]:
    """Who leaves by sys.exit is found by the others, and may be named by them; the exit code may be theirs."""

    def expected(case: Case) -> Expected:
        ended = rf"rank {case.victim} has ended its program"
        own, torch_own = rf"rank {case.victim} of {case.num_ranks} failed: exit code {code}\b", rf"exitcode  : {code} "
        texts = (f"{own}|{ended}", f"{torch_own}|{ended}") if code else (ended, ended)
        return Expected(texts=texts[:1], torch_texts=texts[1:])

    return expected


def _absent(case: Case) -> Expected:
    return Expected(code=1, texts=(rf"rank {case.victim}(?: of {case.num_ranks})? ended before it called",))


def _stopped_and_raised(case: Case) -> Expected:
    return Expected(code=1, rank=case.other, texts=("ValueError: the loader is empty",), within_s=10.0)


def _secret(case: Case) -> Expected:
    return Expected(texts=(rf"rank {case.victim}\b", "secret|refused"))


KINDS: dict[str, Kind] = {
    "none": Kind(what="no fault at all", expected=_undisturbed),
    "kill": Kind(
        what="SIGKILL of a rank",
        expected=_fails(137, "killed by SIGKILL", torch=("SIGKILL",)),
        from_outside=("SIGKILL", "victim"),
        can_be_early=True,
        weight=5,
    ),
    "segv": Kind(
        what="a rank reads address 0", expected=_fails(139, "killed by SIGSEGV", torch=("SIGSEGV",)), weight=3
    ),
    "exit_3": Kind(what="os._exit(3)", expected=_fails(3, "exit code 3", torch=("exitcode  : 3 ",)), weight=3),
    "sys_exit_5": Kind(what="sys.exit(5) in the middle", expected=_left(5), weight=3),
    "sys_exit_0": Kind(what="sys.exit(0) in the middle", expected=_left(0)),
    "forward": Kind(what="an exception in a module", expected=_fails(1, "ValueError: a bad activation"), weight=4),
    "loop": Kind(
        what="an exception in the loop, with its cause",
        expected=_fails(1, "RuntimeError: no batch left"),
        num_variants=2,
        weight=4,
    ),
    "early": Kind(what="an exception before distribute", expected=_fails(1, "ValueError: no data"), weight=3),
    "early_exit": Kind(what="sys.exit(0) before distribute", expected=_absent, victims=1, weight=3),
    "early_os_exit": Kind(what="os._exit(0) before distribute", expected=_absent, launchers=("run",)),
    "sleeps": Kind(what="a rank that never calls distribute", expected=_late(), has_deadline=True),
    "stop": Kind(
        what="SIGSTOP of a rank",
        expected=_late(),
        has_deadline=True,
        from_outside=("SIGSTOP", "victim"),
    ),
    "stop_and_raise": Kind(what="a rank is stopped and another one raises", expected=_stopped_and_raised, weight=3),
    "launcher_kill": Kind(
        what="SIGKILL of the launcher",
        expected=lambda case: Expected(reports=False),
        launchers=("run",),
        from_outside=("SIGKILL", "launcher"),
        can_be_early=True,
        weight=3,
    ),
    "ctrl_c": Kind(
        what="Ctrl-C",
        expected=lambda case: Expected(code=130, texts=("ended by SIGINT",), torch_texts=()),
        from_outside=("SIGINT", "launcher"),
        can_be_early=True,
        weight=3,
    ),
    "no_step": Kind(what="a rank leaves out optimizer.step()", expected=_diverges),
    "other_module": Kind(what="a rank calls another module", expected=_diverges),
    "full_disk": Kind(
        what="the disk of the logs is full when a rank raises",
        expected=lambda case: Expected(
            code=1,
            rank=case.victim,
            texts=(r"OSError: \[Errno 28\]" if case.variant == 0 else "ValueError: after the disk was full",),
        ),
        launchers=("run",),
        victims=1,
        num_variants=2,
        weight=4,
    ),
    "closed_stdout": Kind(
        what="nobody reads standard output any more",
        expected=lambda case: Expected(rank=0, texts=("BrokenPipeError",)),
    ),
    "forked_exit": Kind(what="a forked child leaves by sys.exit", expected=_undisturbed, num_variants=2, weight=3),
    "loader_kill": Kind(
        what="SIGKILL of a rank with loader workers",
        expected=_fails(137, "killed by SIGKILL", torch=("SIGKILL",)),
        from_outside=("SIGKILL", "victim"),
    ),
    "report": Kind(
        what="the report cannot be written",
        expected=_undisturbed,
        num_variants=4,
        weight=4,
    ),
    "control": Kind(
        what="control characters in an exception's text",
        expected=_fails(1, r"ValueError: red\\x1b\[31m", torch=("ValueError: red",)),
    ),
    "secret": Kind(
        what="one rank has another FARSPAN_SECRET",
        expected=_secret,
        launchers=("torchrun",),
        victims=1,
        num_variants=2,
        weight=3,
    ),
    "bar": Kind(what="800 updates of a progress bar, then an exception", expected=_fails(1, "ValueError: bad sample")),
}


def draw(name: str, launcher: str, seed: int) -> Case:
    """The case of a kind, a launcher and a seed."""
    kind, rng = KINDS[name], random.Random(f"{name} {launcher} {seed}")
    num_ranks = rng.choice((2, 2, 3, 3, 4))
    victim = rng.randrange(kind.victims, num_ranks)
    if name == "closed_stdout":
        victim = 0
    other = rng.choice([rank for rank in range(num_ranks) if rank != victim])
    is_early = kind.can_be_early and rng.random() < 0.3
    fails = name not in ("none", "forked_exit", "report")
    return Case(
        kind=name,
        launcher=launcher,
        seed=seed,
        num_ranks=num_ranks,
        victim=victim,
        other=other,
        step=rng.randrange(_LATEST_STEP),
        micro_batch=rng.randrange(_NUM_MICRO_BATCHES),
        place=rng.choice(("forward", "backward", "step")),
        since="started" if is_early else "training",
        delay_s=round(rng.uniform(0.0, 3.0 if is_early else 1.0), 3),
        variant=rng.randrange(kind.num_variants),
        num_steps=40 if not fails else 2000,
    )


def schedule(num_runs: int, seed: int, names: list[str], launchers: list[str]) -> list[Case]:
    """So many cases: the chosen kinds in turn, as often as they weigh, under each launcher in turn."""
    pool = [
        (name, launcher)
        for name in names
        for launcher in KINDS[name].launchers
        if launcher in launchers
        for _ in range(KINDS[name].weight)
    ]
    if not pool:
        return []
    random.Random(f"order {seed}").shuffle(pool)
    if len(names) == 1 and len(launchers) == 1:
        pool = pool[:1]
    return [draw(*pool[number % len(pool)], seed + number) for number in range(num_runs)]
