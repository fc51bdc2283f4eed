"""Finds the micro-batch that a recorded graph belongs to: a program that reads a value within one records it in several
graphs.

    graph         0       1    2 (backward)    3       4    5 (backward)
    micro-batch   0       0    0               1       1    1
    level         -2 n    -n   0 and more      -2 n    -n   0 and more

A graph that was only evaluated belongs to none, if it comes before all that the next backward goes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from farspan.graph import BackwardSegment, MicroBatch, Segment

__all__ = ["Key", "MicroBatches", "Place", "place_of"]

Key = tuple[int, int]
"""Level and stage of a segment."""
Place = tuple[int, int, int]
"""Index of its graph, level (-1 for where a gradient arrives) and stage."""
_NUM_LEVELS = 1 << 20


def place_of(work: Segment | BackwardSegment) -> Place:
    """Returns where a segment, or the one whose backward it is, was recorded."""
    if isinstance(work, BackwardSegment):
        if work.segment is None:
            return (work.backward.graph.index, -1, work.stage)
        work = work.segment
    return (work.graph.index, work.level, work.stage)


class MicroBatches:
    """Numbers micro-batches in the order of their backwards."""

    def __init__(self) -> None:
        self.num_trained = 0
        """Micro-batches of which a backward was seen."""
        self._number: dict[int, int] = {}
        self._last: dict[int, int] = {}
        """For each graph of a micro-batch the number of the graph whose backward is its end."""
        self._first: list[int] = []
        """For each micro-batch that was trained, the first graph that its backward goes through."""
        self._open: list[int] = []

    def see(self, graphs: Iterable[MicroBatch], reached: Mapping[int, int]) -> None:
        """Notes graphs that are about to run.

        Args:
            graphs: Of the forwards, those of this rank at least.
            reached: For each graph that ends with a backward, the first graph that this goes through.
        """
        new = {graph.index for graph in graphs if any(call.entry.requires_grad for call in graph.calls)}
        self._open += sorted(new - self._number.keys() - reached.keys() - set(self._open))
        for last in sorted(reached.keys() - self._number.keys()):
            own = [index for index in self._open if reached[last] <= index < last]
            for index in [*own, last]:
                self._number[index], self._last[index] = self.num_trained, last
            self._open = [index for index in self._open if index > last]
            self._first.append(reached[last])
            self.num_trained += 1

    def number_of(self, graph: MicroBatch) -> int:
        """Returns the number of the micro-batch, from 0; -1 for none."""
        return self.number_at(graph.index)

    def number_at(self, index: int) -> int:
        """Returns the same by the graph's index."""
        return self.num_trained if index in self._open else self._number.get(index, -1)

    def key_of(self, work: Segment | BackwardSegment) -> Key:
        """Equal for segments that have the same place in their micro-batches.

        Until the end of the micro-batch has been seen the place is not known: `settled` makes one of what this gave.
        """
        return self.key_at(place_of(work))

    def key_at(self, place: Place) -> Key:
        """Returns the same of the work's place."""
        index, level, stage = place
        return ((index - self._last.get(index, 0)) * _NUM_LEVELS + level, stage)

    def settled(self, key: Key, number: int) -> Key | None:
        """Returns the key of what belongs to a micro-batch, from the one it had before its end was seen; None if it
        does not.

        Args:
            key: What `key_of` gave then.
            number: Of the micro-batch.
        """
        last = next(self._last[index] for index, its in self._number.items() if its == number)
        is_of_it = self._first[number] <= key[0] // _NUM_LEVELS <= last
        return (key[0] - last * _NUM_LEVELS, key[1]) if is_of_it else None
