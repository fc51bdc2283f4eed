"""The ranks of a job while a debugger is in one of them."""

from __future__ import annotations

import signal

from farspan.launch.job import Job

__all__ = ["DebuggedJob"]


class DebuggedJob(Job):
    """A job in which Ctrl-C is for the rank that has the console, whose debugger stops there or whose program ends."""

    def pass_on(self, number: signal.Signals) -> None:
        """Takes a signal to the launcher."""
        rank = next(rank for rank in self.ranks if rank.has_console)
        if number == signal.SIGINT and not rank.has_ended:
            rank.send(number, group=True)
        else:
            super().pass_on(number)
