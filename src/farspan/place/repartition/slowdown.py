"""Decides when ranks have become slower or faster than others for so long that another plan may be better.

    window (a tenth of the time)   1    2    3   ...   10
    rank 0  taken / usual         1.0  1.1  1.0        1.0
    rank 1                        1.0  1.0  1.1        1.0
    rank 2                        2.3  2.4  2.3        2.2      at least twice the others' in each: found

All ranks are given the same numbers and decide alike: by comparisons, sums and quotients alone, which have the same
bits everywhere. Time is that of training steps, as the ranks have measured it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.execute.exchange import PaceNote

__all__ = ["Change", "Slowdowns"]

_FACTOR = 2.0
"""How much slower or faster than the others a rank must be."""
_NUM_WINDOWS = 10
"""Windows of the time for which it must be; shorter ones would be too easily disturbed."""
_LEAST_WINDOWS = 3
"""Where a step takes longer than a window: a single slow one is no reason."""
_LEAST_SHARE = 0.1
"""Of what the busiest rank computes: one that computes less holds nobody up, and its times say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of speeds that has lasted.

    Attributes:
        rank: Whose changed most.
        factor: How many times as long as usual it takes for the same.
        ratios: The same of each rank; 1.0 for one that has nothing to compare.
        step_s: By rank, seconds of computing in a step.
        duration_s: For how long, in seconds of training steps.
    """

    rank: int
    factor: float
    ratios: tuple[float, ...]
    step_s: tuple[float, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Window:
    taken_s: list[float]
    usual_s: list[float]
    duration_s: float
    num_steps: int


class Slowdowns:
    """Watches the ranks under one plan.

    Args:
        num_ranks: How many there are.
        hold_s: For how long a change must last.
        expected_s: By rank, seconds of computing in a step that the plan was made for; 0 where that is not known. If a
            rank usually takes twice as much or more, or half as much or less, compared with the others, speeds have
            changed before it could be seen what is usual. () where nothing is known.
    """

    def __init__(self, num_ranks: int, hold_s: float, expected_s: Sequence[float] = ()) -> None:
        self._num_ranks = num_ranks
        self.hold_s = hold_s
        self._expected_s = expected_s
        self._anchors: list[float] | None = None
        """By rank, how many times as much as expected is usual; all 1.0 where ranks differ little in that."""
        self._works = [False] * num_ranks
        """For each rank, whether it has ever had a task to compare with the same task before."""
        self._windows: deque[_Window] = deque()
        self._streaks: dict[tuple[int, bool], tuple[int, float]] = {}
        """By rank and whether it is slower: of how many windows until now, and how many seconds."""
        self._begin_window()
        self.elapsed_s = 0.0
        """Seconds of training steps that it has seen."""

    def begin_again(self, hold_s: float) -> None:
        """Look again from now on whether a change lasts, for other seconds."""
        self.hold_s = hold_s
        self._windows.clear()
        self._streaks = {}
        self._begin_window()

    def _begin_window(self) -> None:
        self._taken_s, self._usual_s = [0.0] * self._num_ranks, [0.0] * self._num_ranks
        self._duration_s, self._num_steps = 0.0, 0

    def add(self, notes: Sequence[PaceNote]) -> Change | None:
        """Returns a change that has lasted, if there is one now.

        Args:
            notes: Of all ranks, by rank, on a training step.
        """
        compared_s, usual_s, span_s = zip(*notes, strict=True)
        if min(usual_s) < 0.0 or max(usual_s) == 0.0:  # disturbed, or there is nothing to compare
            return None
        self._duration_s += max(span_s)
        self._num_steps += 1
        self.elapsed_s += max(span_s)
        for rank, seconds in enumerate(usual_s):
            if seconds > 0.0:
                self._works[rank] = True
                self._taken_s[rank] += compared_s[rank]
                self._usual_s[rank] += seconds
        if self._duration_s < self.hold_s / _NUM_WINDOWS or sum(self._works) < 2:
            return None
        silent = [rank for rank, works in enumerate(self._works) if works and self._usual_s[rank] == 0.0]
        if silent and self._duration_s < self.hold_s:
            return None  # they may have something to say soon
        for rank in silent:
            self._works[rank] = False
        window = _Window(self._taken_s, self._usual_s, self._duration_s, self._num_steps)
        self._begin_window()
        return self._end_window(window)

    def _end_window(self, window: _Window) -> Change | None:
        if self._anchors is None:
            self._anchors = self._anchored(window)
        self._windows.append(window)
        ratios = self._ratios([window])
        least_taken_s, least_usual_s = _LEAST_SHARE * max(window.taken_s), _LEAST_SHARE * max(window.usual_s)
        ranks = [
            rank
            for rank in range(self._num_ranks)
            if window.taken_s[rank] >= least_taken_s or window.usual_s[rank] >= least_usual_s
        ]
        known = sorted(ratios[rank] for rank in ranks)
        streaks: dict[tuple[int, bool], tuple[int, float]] = {}
        for rank in ranks if len(ranks) > 1 else ():
            others = _median_without(known, ratios[rank])
            for is_slower, changed in ((True, ratios[rank] / others), (False, others / ratios[rank])):
                if changed >= _FACTOR:
                    number, seconds = self._streaks.get((rank, is_slower), (0, 0.0))
                    streaks[rank, is_slower] = (number + 1, seconds + window.duration_s)
        self._streaks = streaks
        longest = max([number for number, _ in streaks.values()], default=0)
        while len(self._windows) > longest:
            self._windows.popleft()
        lasting = [
            number for number, seconds in streaks.values() if number >= _LEAST_WINDOWS and seconds >= self.hold_s
        ]
        return self._change_of(list(self._windows)[-max(lasting) :]) if lasting else None

    def _change_of(self, windows: Sequence[_Window]) -> Change:
        ratios = self._ratios(windows)
        changed = [max(ratio, 1.0 / ratio) for ratio in ratios]
        rank = changed.index(max(changed))
        num_steps = sum(window.num_steps for window in windows)
        return Change(
            rank=rank,
            factor=ratios[rank],
            ratios=tuple(ratios),
            step_s=tuple([sum(window.taken_s[rank] for window in windows) / num_steps for rank in range(len(ratios))]),
            duration_s=sum(window.duration_s for window in windows),
        )

    def _ratios(self, windows: Sequence[_Window]) -> list[float]:
        """Returns by rank how many times as long as usual it has taken for the same."""
        assert self._anchors is not None
        ratios: list[float] = []
        for rank in range(self._num_ranks):
            taken_s = sum(window.taken_s[rank] for window in windows)
            usual_s = sum(window.usual_s[rank] for window in windows)
            is_known = taken_s > 0.0 and usual_s > 0.0
            ratios.append(taken_s / usual_s * self._anchors[rank] if is_known else 1.0)
        return ratios

    def _anchored(self, window: _Window) -> list[float]:
        anchors = [1.0] * self._num_ranks
        for rank, expected_s in enumerate(self._expected_s):
            if expected_s > 0.0 and window.usual_s[rank] > 0.0:
                anchors[rank] = window.usual_s[rank] / window.num_steps / expected_s
        known = sorted(ratio for ratio in anchors)
        others = [_median_without(known, ratio) for ratio in anchors]
        differ = [
            ratio / other >= _FACTOR or other / ratio >= _FACTOR for ratio, other in zip(anchors, others, strict=True)
        ]
        return anchors if any(differ) else [1.0] * self._num_ranks


def _median_without(known: Sequence[float], left_out: float) -> float:
    """Returns the median of sorted numbers without one of them."""
    at = bisect_left(known, left_out)
    count = len(known) - 1

    def number(index: int) -> float:
        return known[index if index < at else index + 1]

    return number(count // 2) if count % 2 else (number(count // 2 - 1) + number(count // 2)) / 2
