"""This rank's word that it begins a step, with what the ranks compare: given while it would wait for others anyway.

    rank 0    | forward | sends | compares |  ..waits..  | backward |
    rank 1    | compares |   ..waits..   | forward, backward | sends |

What is compared (`history`) takes as long to find as a small layer takes to run. No result of a step is used before all
ranks have agreed; so it need not keep the first rank's first task, for which all others wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farspan.control.channel import SideChannel
    from farspan.execute.agreement.checksum import Checksum
    from farspan.execute.agreement.history import History
    from farspan.execute.reading.gradients import SharedGradients

__all__ = ["StepStart"]


class StepStart:
    """Of one step, on one rank.

    Args:
        side: Where the ranks agree.
        history: What this rank does in the step.
        step: Its number.
        deadline_s: How long this rank waits for the others.
        gradients: Of this rank. When all have begun the step, none asks any more for those that the program had
            released before.
    """

    def __init__(
        self, side: SideChannel, history: History, step: int, deadline_s: float, gradients: SharedGradients
    ) -> None:
        self._side = side
        self._history = history
        self._step = step
        self._deadline_s = deadline_s
        self._data: Checksum | None = None
        self._gradients = gradients
        self._have_begun = False

    def announce(self) -> None:
        """Give this rank's word, if it has not given it. Does not wait."""
        if self._data is None:
            digest, self._data = self._history.digests()
            self._side.start(self._step, digest, self._data)

    def data(self) -> Checksum:
        """The checksums of the data that the step is given."""
        self.announce()
        assert self._data is not None
        return self._data

    def wait(self) -> None:
        """Return when all ranks have begun the step with one program.

        Raises:
            DivergenceError: Their programs differ.
        """
        if self._have_begun:
            return
        self.announce()
        self._side.wait_agreed(self._step, self._deadline_s)
        self._have_begun = True
        self._gradients.release()

    def before_gradients(self) -> None:
        """New gradients are about to be made: those that the program had released before have gone."""
        if self._gradients.keeps_released():
            self.wait()
