"""Any graph of segments there could be, as tasks: branches, skips, V shapes, several segments on a rank, micro-batches
that differ, segments without a backward, backwards with and without weight gradients of their own.
"""

from __future__ import annotations

from hypothesis import strategies as st

from farspan.schedule import Kind, Task

__all__ = ["any_segments", "capacity"]

_DURATIONS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])


@st.composite
def any_segments(draw: st.DrawFn) -> tuple[list[Task], int]:
    """The tasks of a step, and the number of ranks."""
    num_ranks = draw(st.integers(1, 4))
    shapes = [draw(_segments(num_ranks)) for _ in range(draw(st.integers(1, 2)))]
    graphs = [draw(st.sampled_from(shapes)) for _ in range(draw(st.integers(1, 5)))]
    tasks: list[Task] = []
    forwards: list[list[int]] = []
    for micro_batch, segments in enumerate(graphs):
        forwards.append(list(range(len(tasks), len(tasks) + len(segments))))
        tasks += [
            segment.forward(micro_batch, tuple(forwards[-1][need] for need in segment.needs)) for segment in segments
        ]
    weights: dict[int, int] = {}
    for micro_batch, segments in enumerate(graphs):
        backwards: dict[int, int] = {}
        for number in reversed(range(len(segments))):
            segment = segments[number]
            if segment.is_trained:
                consumers = [later for later, other in enumerate(segments) if number in other.needs]
                gradients = [backwards[later] for later in consumers if later in backwards]
                backwards[number] = len(tasks)
                tasks.append(segment.backward(micro_batch, (forwards[micro_batch][number], *sorted(gradients))))
        for number, index in backwards.items():
            if segments[number].is_split:
                before = (weights[number],) if number in weights else ()
                tasks.append(segments[number].weight(micro_batch, (*before, index)))
                weights[number] = len(tasks) - 1
    return tasks, num_ranks


def capacity(tasks: list[Task], num_ranks: int) -> list[float]:
    """For each rank the least memory that does for one micro-batch after another."""
    needed: dict[tuple[int, int], float] = {}
    for task in tasks:
        if task.memory > 0:
            key = task.rank, task.micro_batch
            needed[key] = needed.get(key, 0.0) + task.memory
    return [max((size for key, size in needed.items() if key[0] == rank), default=0.0) for rank in range(num_ranks)]


class _Segment:
    def __init__(self, rank: int, level: int, needs: tuple[int, ...], durations: tuple[float, float, float]) -> None:
        self.rank, self.level, self.needs, self.durations = rank, level, needs, durations
        self.is_trained, self.is_split, self.memory, self.share = True, False, 0, 0.0

    def forward(self, micro_batch: int, needs: tuple[int, ...]) -> Task:
        return self._task(Kind.FORWARD, micro_batch, needs, self.memory if self.is_trained else 0)

    def backward(self, micro_batch: int, needs: tuple[int, ...]) -> Task:
        return self._task(Kind.BACKWARD, micro_batch, needs, -self.memory * (1 - self.share if self.is_split else 1))

    def weight(self, micro_batch: int, needs: tuple[int, ...]) -> Task:
        return self._task(Kind.WEIGHT, micro_batch, needs, -self.memory * self.share)

    def _task(self, kind: Kind, micro_batch: int, needs: tuple[int, ...], memory: float) -> Task:
        return Task(
            kind=kind,
            rank=self.rank,
            micro_batch=micro_batch,
            level=self.level,
            duration=self.durations[list(Kind).index(kind)],
            needs=needs,
            holds=self.is_trained,
            memory=memory,
            output_bytes=tuple((rank, 8.0) for rank in range(8)),
        )


@st.composite
def _segments(draw: st.DrawFn, num_ranks: int) -> list[_Segment]:
    segments: list[_Segment] = []
    for number in range(draw(st.integers(1, 5))):
        needs = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        segment = _Segment(
            draw(st.integers(0, num_ranks - 1)),
            1 + max((segments[need].level for need in needs), default=-1),
            needs,
            (draw(_DURATIONS), draw(_DURATIONS), draw(_DURATIONS)),
        )
        segment.is_trained = draw(st.booleans()) or draw(st.booleans())
        segment.is_split = draw(st.booleans())
        segment.memory = draw(st.integers(0, 3))
        segment.share = draw(st.sampled_from([0.0, 0.25, 1.0]))
        segments.append(segment)
    return segments
