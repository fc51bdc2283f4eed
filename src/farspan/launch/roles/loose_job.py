"""The processes of a role that stand each for itself: one that fails or is killed does not end the others.

Once one of them has called farspan.distribute they are the ranks of one model, and stand and fall together as those of
a run without roles.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from farspan.launch.job import Crew, Due, Ended, Events, Job
from farspan.launch.logs import find_exception, find_place
from farspan.launch.rank.notes import has_joined, note_end, waiting_ranks
from farspan.launch.rank_process import Started, signal_name

__all__ = ["LooseCrew", "LooseJob"]


class LooseCrew(Crew):
    """Where the processes of a role run, and may run instead; by itself, nowhere else."""

    def move(self, number: int) -> str:
        """Gives a rank that was lost with its host a place on another one; returns its name, "" where there is none."""
        return ""

    def give_up(self, number: int) -> None:
        """Gives the place of a rank that does not come again to others."""

    def when_free(self, action: Callable[[], None]) -> None:
        """Does something, from any thread, whenever places may have become free."""


class LooseJob(Job):
    """Starts a process that has failed again, or lets the others go on without it. One that was lost with its host is
    started on another one, where a slot is free, or once there is one.

    Args:
        events: As in a `Job`.
        crew: Where they run.
        role: The name of the role.
        max_restarts: How often one process may be started again.
        says: Shows a text on the console.
        **kwargs: Of a `Job`.
    """

    trains_one_model = False

    def __init__(
        self,
        events: Events,
        crew: LooseCrew,
        *,
        role: str,
        max_restarts: int,
        says: Callable[[str], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(events, crew, **kwargs)
        self._slots = crew
        self._role = role
        self._max_restarts = max_restarts
        self._says = says
        self._num_restarts: dict[int, int] = {}
        self._places: dict[int, str] = {}
        """Where in the program the last error of a process was raised."""
        self._waiting: list[int] = []
        """The processes that were lost with their host, and for which no slot is free."""
        self._slots.when_free(lambda: self.events.put(Due(action=self._start_waiting)))

    @property
    def waits_for_places(self) -> bool:
        """Returns whether a process is to be started once there is a place for it."""
        return bool(self._waiting) and not self.is_over and not self.is_ending

    def goes_on_after(self, event: Ended) -> bool:
        """Returns whether the others go on; then a process that has failed was started again, or is left out."""
        rank = event.rank
        if self.is_over or self.is_ending or self._is_one_model():
            return False
        if event.returncode == 0:
            self._slots.give_up(rank.number)
            return False
        rank.send(signal.SIGKILL, group=True)  # what it has left running
        rank.close()
        how = _describe(rank)
        number, done = rank.number, self._num_restarts.get(rank.number, 0)
        place = find_place(rank.read_tail()) if event.returncode > 0 else ""
        is_repeated = bool(place) and place == self._places.get(number)
        self._places[number] = place
        self.ended.remove(rank)
        self.ranks.remove(rank)
        if done < self._max_restarts and not is_repeated:
            host = self._slots.move(number) if rank.lost else ""
            if rank.lost and not host:
                self._waiting.append(number)
                self._says(f"farspan run: {self._role} {number} {how}; it waits for a free slot")
                return True
            try:
                self._start_again(number, host)
            except OSError as error:
                how += f" and cannot be started again ({error.strerror or error})"
            else:
                self._says(f"farspan run: {self._role} {number} {how}; {self._restart(number, host)}")
                return True
        self._says(f"farspan run: {self._role} {number} {how}; the run goes on without it; its log is {rank.log}")
        self._note_end_of(number)
        self._slots.give_up(number)
        return True

    def _note_end_of(self, number: int) -> None:
        """Lets who looks for this process in farspan.distribute know that it is not where it was."""
        if self.run_folder is not None:
            note_end(self.run_folder, number)
            self.crew.note_end(number)

    def _start_waiting(self) -> None:
        """Starts processes that wait for a slot, as long as there is one."""
        while self.waits_for_places and (host := self._slots.move(self._waiting[0])):
            number = self._waiting.pop(0)
            self._start_again(number, host)
            self._says(f"farspan run: {self._role} {number} has a slot: {self._restart(number, host)}")

    def _restart(self, number: int, host: str) -> str:
        at = f", on {host}" if host else ""
        return f"restart {self._num_restarts[number]} of {self._max_restarts} of it{at}"

    def close(self, *, kills: bool = False) -> None:
        """Ends what is left over; nothing is started any more."""
        self._waiting.clear()
        super().close(kills=kills)

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

    def _start_again(self, number: int, host: str) -> None:
        """Starts a process again, on another host where one is named."""
        done = self._num_restarts[number] = self._num_restarts.get(number, 0) + 1
        if host and number == 0:  # by whose address the others would find each other
            self._note_end_of(number)
        logs = self.log_dir / f"restart-{done}"
        logs.mkdir(exist_ok=True)
        started = self.crew.start(number, logs, {"FARSPAN_RESTART": str(done)})
        self.ranks.append(started)
        threading.Thread(target=self.watch, args=(started,), daemon=True).start()


def _describe(rank: Started) -> str:
    if rank.lost:
        return f"is lost ({rank.lost})"
    if rank.returncode < 0:
        return f"was killed by {signal_name(-rank.returncode)}"
    said = find_exception(rank.read_tail())
    return f"has failed with exit code {rank.returncode}" + (f" ({said[:300]})" if said else "")
