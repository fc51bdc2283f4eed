"""`kill -USR1` of a rank: its standard error says where the program of every rank is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from farspan.control.channel import SideChannel
from farspan.errors import FarspanError
from farspan.launch.rank.interrupts import never_raises
from farspan.outputs import marked, write_line

__all__ = ["watch_signal"]


def watch_signal(side_of_all: Callable[[], SideChannel]) -> None:
    """Makes SIGUSR1 show where all ranks are, unless the program has a use for it."""
    number = getattr(signal, "SIGUSR1", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) is not signal.SIG_DFL:
        return
    process = os.getpid()

    @never_raises
    def show(*_: object) -> None:
        if os.getpid() == process:  # what it has forked is no rank
            threading.Thread(target=_show, args=(side_of_all(),), name="farspan-stacks", daemon=True).start()

    signal.signal(number, show)


def _show(side: SideChannel) -> None:
    try:
        for rank in range(side.world_size):
            write_line(marked(side.late.place_of(rank)))
    except FarspanError as error:  # a rank has failed meanwhile
        write_line(marked(str(error)))
