"""Decides whether a run that has failed is started again.

killed, or an error about another rank            again, `max_restarts` times
an error of the program's own                     again: it may have come by chance
the same in the same place, nothing saved since   not again: it would come for ever
ended so that a further host takes part           again, and that is no failure
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from farspan.launch.attempts.outcome import Outcome
from farspan.launch.rank.notes import EACH_SAVE_VARIABLE, PROGRESS_VARIABLE, saved_step

__all__ = ["Restarts"]


class Restarts:
    """How often a run has been started again, and what the ranks have saved.

    Args:
        most: How often it may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_done = 0
        self.num_starts = 0
        """How often the ranks have been started again for any reason; it names the next start."""
        self._place = ""
        self._step: int | None = None
        self._file = Path(tempfile.gettempdir()) / f"farspan-saved-{os.getpid()}-{secrets.token_hex(8)}"
        self.pipe = f"{self._file}.pipe"
        """Opened by rank 0 at each save, if somebody listens there."""
        if most:
            os.mkfifo(self.pipe, 0o600)

    def variables(self, number: int) -> dict[str, str]:
        """Returns the variables by which a rank knows where to note what it has saved, and how often it was started.

        Args:
            number: How often it was, from 0.
        """
        names = {PROGRESS_VARIABLE: str(self._file), EACH_SAVE_VARIABLE: self.pipe, "FARSPAN_RESTART": str(number)}
        return names if self.most else {}

    def starts_again(self, outcome: Outcome) -> tuple[bool, str]:
        """Returns whether the run is to be started again, and what is to be said about it.

        Args:
            outcome: Of the start before.
        """
        if outcome.code == 0 or outcome.was_interrupted or not self.most:
            return False, ""
        step = saved_step(self._file)
        is_further = step is not None and (self._step is None or step > self._step)
        self._step = step if is_further else self._step
        saved = "no checkpoint was saved yet" if self._step is None else f"step {self._step} is saved"
        if outcome.was_cut:
            self.num_starts += 1
            return True, f"farspan run: all ranks are started again with the hosts that have come; {saved}"
        is_repeated = bool(outcome.place) and outcome.place == self._place and not is_further
        self._place = outcome.place
        if is_repeated:
            return False, _REPEATED.format(where=outcome.place.splitlines()[-2:][0])
        if not self.count_one():
            return False, f"farspan run: not started again: this was restart {self.num_done} of {self.most}"
        return True, f"farspan run: restart {self.num_done} of {self.most}; {saved}"

    def count_one(self) -> bool:
        """Returns whether there may be one more start, which is counted."""
        if self.num_done == self.most:
            return False
        self.num_done += 1
        self.num_starts += 1
        return True

    def close(self) -> None:
        """Removes what the ranks have noted."""
        for path in (self._file, Path(self.pipe)):
            path.unlink(missing_ok=True)


_REPEATED = """\
farspan run: not started again: the same error came twice in the same place, and nothing was saved in between.
  why   {where}
  try   mend the program; an error that comes by chance is started again"""
