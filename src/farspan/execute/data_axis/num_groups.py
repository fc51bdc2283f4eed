"""Into how many groups the ranks of a program can be divided."""

from __future__ import annotations

from farspan.errors import PlanError, quoted
from farspan.execute.engine import Engine
from farspan.units import count_of

__all__ = ["check_num_groups", "check_same_groups"]


def check_num_groups(num_groups: object, num_ranks: int) -> None:
    """Raise if `num_ranks` cannot be divided into so many groups; None is for the program to say nothing.

    Raises:
        PlanError: It says which numbers can be.
    """
    if num_groups is None:
        return
    hint = f"data_parallel={_choices(num_ranks)}"
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise PlanError(
            'data_parallel is the number of groups into which the ranks are divided, from 1, or "auto".',
            why=f"{quoted(repr(num_groups))} was given.",
            hint=hint,
        )
    if num_ranks % num_groups:
        raise PlanError(
            f"{count_of(num_ranks, 'process')} cannot be divided into {count_of(num_groups, 'group')} of equal size.",
            why=f"data_parallel={num_groups} gives each group {num_ranks / num_groups:.3g} ranks.",
            hint=f"{hint}, or start it with: farspan run -n {-(-num_ranks // num_groups) * num_groups} train.py",
        )


def check_same_groups(num_groups: object, engine: Engine) -> None:
    """Raise if the ranks, which are divided already, would have to be divided otherwise.

    Raises:
        PlanError: It says how they are divided, and by what.
    """
    known = engine.groups.first_num_groups
    check_num_groups(num_groups, known * engine.num_ranks)
    if num_groups != known:
        raise PlanError(
            f"data_parallel={num_groups} comes too late: the ranks are {known} group{'s' * (known > 1)}.",
            why="the first farspan.distribute or farspan.from_rank of a program divides them.",
            hint=f"the same data_parallel={num_groups} in the first farspan.distribute, before any farspan.from_rank",
        )


def _choices(num_ranks: int) -> str:
    """Returns the divisors of a number, as a sentence has them."""
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    if len(divisors) > 6:
        divisors = [*divisors[:5], divisors[-1]]
    words = [str(number) for number in divisors]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
