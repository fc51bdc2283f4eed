"""The processes of a role that stand each for itself: one that fails or is killed does not end the others.

Once one of them has called farspan.distribute they are the ranks of one model, and stand and fall together as those of
a run without roles.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from farspan.launch.job import Ended, Job, Started
from farspan.launch.logs import find_exception, find_place
from farspan.launch.rank.notes import has_joined, note_end, waiting_ranks
from farspan.launch.rank_process import signal_name

__all__ = ["LooseJob"]


class LooseJob(Job):
    """Starts a process that has failed again, or lets the others go on without it.

    Args:
        *args: Of a `Job`.
        role: The name of the role.
        max_restarts: How often one process may be started again.
        says: Shows a text on the console.
        **kwargs: Of a `Job`.
    """

    trains_one_model = False

    def __init__(self, *args: Any, role: str, max_restarts: int, says: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._role = role
        self._max_restarts = max_restarts
        self._says = says
        self._num_restarts: dict[int, int] = {}
        self._places: dict[int, str] = {}
        """Where in the program the last error of a process was raised."""

    def goes_on_after(self, event: Ended) -> bool:
        """Returns whether the others go on; then a process that has failed was started again, or is left out."""
        if event.returncode == 0 or self.is_over or self.is_ending or self._is_one_model():
            return False
        rank = event.rank
        rank.send(signal.SIGKILL, group=True)  # what it has left running
        rank.close()
        how = _describe(rank)
        number, done = rank.number, self._num_restarts.get(rank.number, 0)
        place = find_place(rank.read_tail()) if event.returncode > 0 else ""
        is_repeated = bool(place) and place == self._places.get(number)
        self._places[number] = place
        self.ended.remove(rank)
        self.ranks.remove(rank)
        if done < self._max_restarts and not is_repeated and not rank.lost:
            self._num_restarts[number] = done + 1
            try:
                self._start_again(number, {"FARSPAN_RESTART": str(done + 1)})
            except OSError as error:
                how += f" and cannot be started again ({error.strerror or error})"
            else:
                self._says(
                    f"farspan run: {self._role} {number} {how}; restart {done + 1} of {self._max_restarts} of it"
                )
                return True
        self._says(f"farspan run: {self._role} {number} {how}; the run goes on without it; its log is {rank.log}")
        if self.run_folder is not None:
            note_end(self.run_folder, number)
            self.crew.note_end(number)
        return True

    def pass_on(self, number: signal.Signals) -> None:
        """Takes a signal to the launcher, of which the run's own role speaks."""
        if self.is_over:
            self.stop_running()
            return
        self.is_over = True
        for rank in self.ranks:
            rank.send(number, group=number == signal.SIGINT)

    def _is_one_model(self) -> bool:
        """Returns whether one of the processes has called farspan.distribute."""
        return self.run_folder is not None and (has_joined(self.run_folder) or bool(waiting_ranks(self.run_folder)))

    def _start_again(self, number: int, variables: Mapping[str, str]) -> None:
        logs = self.log_dir / f"restart-{self._num_restarts[number]}"
        logs.mkdir(exist_ok=True)
        started = self.crew.start(number, logs, variables)
        self.ranks.append(started)
        threading.Thread(target=self.watch, args=(started,), daemon=True).start()


def _describe(rank: Started) -> str:
    if rank.lost:
        return f"is lost ({rank.lost})"
    if rank.returncode < 0:
        return f"was killed by {signal_name(-rank.returncode)}"
    said = find_exception(rank.read_tail())
    return f"has failed with exit code {rank.returncode}" + (f" ({said[:300]})" if said else "")
