"""Runs all processes of a job, from the start to the end of the last one.

    running --a rank fails--> waiting (the others end by themselves) --grace--> SIGTERM --3 s--> SIGKILL
       |
       +-----a rank ends before it has called farspan.distribute: SIGTERM to those who wait for it there
       |
       +-----a rank is lost and the others can go on (`membership`): those of its group are ended, if they do not end
       |
       +-----Ctrl-C, SIGTERM, SIGHUP: passed on to all ranks; again: the ranks are ended at once
       +-----SIGUSR1: rank 0 shows where all ranks are

Nothing polls: one thread per process waits for its end and puts an event on a queue; signals come by the
same queue; the deadlines are its timeouts.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farspan.errors import LaunchError
from farspan.launch.membership import MemberService
from farspan.launch.rank.notes import has_joined, note_end, waiting_ranks
from farspan.launch.rank_process import Started, signal_name
from farspan.launch.terminal import say

__all__ = ["Crew", "Cut", "Due", "Ended", "Events", "Job", "Noted", "Over", "signals_to"]

_KILL_AFTER_S = 3.0
_INTERRUPT_GRACE_S = 30.0
_SILENT_S = 1.0
"""How long nothing is said of ranks that still run after another one has failed."""


class Crew:
    """Where the ranks of one start run: on this machine, or on several; what is about others does nothing on one."""

    num_processes: int

    def start(self, number: int, log_dir: Path, more: Mapping[str, str] | None = None) -> Started:
        """Starts a rank, with more variables of its own."""
        raise NotImplementedError

    def note_end(self, number: int) -> None:
        """Lets the ranks on other hosts know that one has ended before all had found each other."""

    def take_members(self, members: MemberService) -> None:
        """Lets it hear the ranks on other hosts."""

    def finish(self, *, kills: bool) -> None:
        """Ends what the ranks on other hosts have left over, all of which have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank has ended."""

    rank: Started
    returncode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Another host has left notes in the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """What the ranks were started for is over: they are ended, which is no failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Something is to be done in the thread in which ranks are started: they end with the thread that started them."""

    action: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The ranks have saved, and a host waits to take part: they are ended, and started again with it."""

    is_due: Callable[[], bool]  # whether it still waits


Events = queue.SimpleQueue[Cut | Due | Ended | Noted | Over | signal.Signals]
"""Ends of ranks, and signals to the launcher."""


class Job:
    """The ranks of a job, and the reactions to the end of one of them and to signals.

    Args:
        events: What it waits on; signals come by it (`signals_to`), also while no job runs.
        crew: Where the ranks run.
        log_dir: Folder of their logs.
        run_folder: Where they and this process leave notes for each other (`notes.py`); None for one rank.
        grace_s: Seconds between the first failure and SIGTERM.
        comes_again: Whether all ranks may be started again, so that none gets time to end by itself before all have
            found each other, or after one was killed.
        keeps_going: Whether the others go on where a rank is lost, if they can.
    """

    trains_one_model = True
    """Whether ranks that train without having called farspan.distribute are a mistake."""

    def __init__(
        self,
        events: Events,
        crew: Crew,
        *,
        log_dir: Path,
        run_folder: str | None,
        grace_s: float,
        comes_again: bool = False,
        keeps_going: bool = False,
    ) -> None:
        self.comes_again = comes_again
        self.events = events
        self.crew = crew
        self.num_processes = crew.num_processes
        self.log_dir = log_dir
        self.run_folder = run_folder
        self.grace_s = grace_s
        self.given_s = grace_s
        """Seconds that ranks which still ran after a failure had before SIGTERM."""
        self.ranks: list[Started] = []
        self.ended: list[Started] = []  # in the order of their ends
        self.strays: list[Ended] = []
        """Ends of ranks of the next start, which is being prepared."""
        self.never_joined: list[Started] = []
        """Ranks that have ended well before all had found each other, in the order of their ends."""
        self.members: MemberService | None = None
        if keeps_going and run_folder is not None:
            self.members = MemberService(
                run_folder, self.num_processes, self._suspect, lambda number: self.ranks[number].give_console()
            )
            crew.take_members(self.members)
        self.interrupted_by: signal.Signals | None = None
        self.failed_before_interrupt = False
        self.is_over = self.is_cut = False
        """Whether the ranks were ended because what they were started for is over; or so that a host takes part."""
        self._deadline: float | None = None
        self._next_signal = signal.SIGTERM

    def start(self) -> None:
        for number in range(self.num_processes):
            try:
                rank = self.crew.start(number, self.log_dir)
            except OSError as error:
                raise LaunchError(
                    f"rank {number} of {self.num_processes} could not be started.",
                    why=f"{error.filename or ''}: {error.strerror or error}.".removeprefix(": "),
                    hint="fewer processes, or see ulimit -u and ulimit -n",
                ) from None
            self.ranks.append(rank)
            threading.Thread(target=self.watch, args=(rank,), daemon=True).start()

    def wait(self) -> None:
        """Returns when all ranks have ended, by themselves or by us."""
        while len(self.ended) < len(self.ranks) or self.waits_for_places:
            timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            try:
                event = self.events.get(timeout=timeout)
            except queue.Empty:
                self.stop_running()
                continue
            if isinstance(event, Ended) and event.rank not in self.ranks:
                self.strays.append(event)
            elif isinstance(event, Ended):
                self._note_end(event)
            elif isinstance(event, Due):
                event.action()
            elif isinstance(event, Noted):
                self._end_who_waits()
            elif isinstance(event, Cut):
                if not self.is_ending and event.is_due():
                    self.is_cut = True
                    self.stop_running()
            elif isinstance(event, Over):
                self.is_over = True
                self.stop_running()
            elif event is signal.SIGUSR1:
                self._show_stacks()
            else:
                self.pass_on(event)

    @property
    def waits_for_places(self) -> bool:
        """Returns whether a rank is to be started once there is a place for it."""
        return False

    @property
    def is_ending(self) -> bool:
        """Returns whether the ranks that still run are to end."""
        return self.interrupted_by is not None or self._deadline is not None or self._next_signal != signal.SIGTERM

    def close(self, *, kills: bool = False) -> None:
        """Ends what is left over: helpers of a job that failed, or everything after an error of ours.

        Args:
            kills: Whether helpers get no time to end by themselves.
        """
        failed = any(rank.returncode != 0 for rank in self.ended)
        # SIGTERM while nobody had to be ended, SIGKILL once that has been tried.
        leftover_signal = signal.SIGKILL if kills else self._next_signal
        for rank in self.ranks:
            if not rank.has_ended:
                rank.send(signal.SIGKILL, group=True)
            elif failed:
                rank.send(leftover_signal, group=True)
        for rank in self.ranks:
            rank.close()
        self.crew.finish(kills=kills)
        if self.members is not None:
            self.members.close()

    def watch(self, rank: Started) -> None:
        """Puts the end of a rank among the events; runs in a thread of its own."""
        try:
            returncode = rank.wait()
        except ChildProcessError:  # reaped by close()
            returncode = 1
        self.events.put(Ended(rank=rank, returncode=returncode))

    def _note_end(self, event: Ended) -> None:
        event.rank.returncode = event.returncode
        event.rank.has_ended = True
        self.ended.append(event.rank)
        if self.goes_on_after(event):
            return
        if event.returncode != 0 and self._deadline is None and self._next_signal == signal.SIGTERM:
            self.failed_before_interrupt = self.interrupted_by is None
            grace_s = self.grace_s if self.failed_before_interrupt else _INTERRUPT_GRACE_S
            is_early = self.run_folder is not None and not has_joined(self.run_folder)
            is_known = event.returncode == -signal.SIGKILL or bool(event.rank.lost)  # others can only say so too
            if self.comes_again and (is_early or is_known) and self.failed_before_interrupt:
                grace_s = 0.0
            self.given_s = grace_s
            self._deadline = time.monotonic() + grace_s
            for rank in self._running():
                rank.send(signal.SIGCONT, group=False)  # one that is stopped cannot hear that it is over
            if grace_s > _SILENT_S:
                timer = threading.Timer(_SILENT_S, self.events.put, (Due(action=self._say_who_is_given_time),))
                timer.daemon = True
                timer.start()
        if self.run_folder is not None and not has_joined(self.run_folder):
            if event.returncode == 0:
                self.never_joined.append(event.rank)
            note_end(self.run_folder, event.rank.number)
            self.crew.note_end(event.rank.number)
            self._end_who_waits()

    def _say_who_is_given_time(self) -> None:
        names = ", ".join(str(rank.number) for rank in self._running())
        if names:
            failed = next(rank.number for rank in self.ended if rank.returncode != 0)
            say(f"farspan run: rank {failed} has ended; still running, and given {self.given_s:g} s: rank {names}")

    def goes_on_after(self, event: Ended) -> bool:
        """Returns whether the run goes on without a rank that has ended; then those of its group are to end too."""
        members, rank = self.members, event.rank
        if members is None or self.interrupted_by is not None or self._next_signal != signal.SIGTERM:
            return False
        if event.returncode == 0:
            members.leave(rank.number)
            return False
        if rank.number in members.gone:
            return True
        if self._deadline is not None:
            return False
        if event.returncode > 0 and not rank.lost:
            members.end(f"rank {rank.number} has failed")
            return False
        how = f"is lost ({rank.lost})" if rank.lost else f"was killed by {signal_name(-event.returncode)}"
        if not members.goes_on_without(rank.number, how):
            say(f"farspan run: {members.over}: all ranks end")
            return False
        gone = sorted(members.gone)
        say(f"farspan run: rank {rank.number} {how}; the run goes on without rank {', '.join(map(str, gone))}")
        self.kill((rank.number,))
        timer = threading.Timer(self.grace_s, self.events.put, (Due(action=lambda: self.kill(gone)),))
        timer.daemon = True
        timer.start()
        return True

    def _suspect(self, number: int) -> None:
        """A rank has lost its connection to that one: what is cut off must not go on by itself. From any thread."""
        self.events.put(Due(action=lambda: self.kill((number,))))

    def kill(self, numbers: Sequence[int]) -> None:
        """Ends ranks at once, and what they have started."""
        for rank in self.ranks:
            if rank.number in numbers:
                rank.send(signal.SIGKILL, group=True)

    def _running(self) -> list[Started]:
        return [rank for rank in self.ranks if not rank.has_ended]

    def _end_who_waits(self) -> None:
        """Ends the ranks that wait for one that has ended in farspan.distribute, which would go on until their
        deadline; later ones see the note."""
        numbers = set[int]() if self.run_folder is None or not self.ended else waiting_ranks(self.run_folder)
        waiting = [rank for rank in self._running() if rank.number in numbers]
        for rank in waiting:
            rank.was_stopped = True
            rank.send(signal.SIGTERM, group=True)
        if waiting and self._deadline is None:
            self._deadline = time.monotonic() + self.grace_s

    def _show_stacks(self) -> None:
        """Rank 0 knows where every rank is, and has the console."""
        rank = next((rank for rank in self.ranks if not rank.has_ended), self.ranks[0])
        if not rank.has_ended and rank.handles(signal.SIGUSR1):
            rank.send(signal.SIGUSR1, group=False)
        else:
            say("farspan run: rank 0 has not called farspan.distribute yet, or has a use of its own for SIGUSR1")

    def pass_on(self, number: signal.Signals) -> None:
        """Takes a signal to the launcher."""
        if self.interrupted_by is not None:
            self.stop_running()
            return
        self.interrupted_by = number
        say(f"farspan run: {number.name} passed on to all ranks; once more ends them at once")
        for rank in self.ranks:
            # A terminal sends Ctrl-C to whole groups. SIGTERM goes to the script alone, which may
            # want its helpers (data loaders) for a last checkpoint.
            rank.send(number, group=number == signal.SIGINT)

    def stop_running(self) -> None:
        """Ends the ranks that run: by SIGTERM, and 3 s later by SIGKILL."""
        for rank in self._running():
            rank.was_stopped = True
            rank.send(self._next_signal, group=True)
        kill_comes = self._next_signal == signal.SIGTERM
        self._deadline = time.monotonic() + _KILL_AFTER_S if kill_comes else None
        self._next_signal = signal.SIGKILL


@contextlib.contextmanager
def signals_to(*jobs: Events) -> Generator[None, None, None]:
    """Turns SIGINT, SIGTERM and SIGHUP (a closed terminal) into events of all jobs; an ignored one (nohup, `&`) stays
    so. SIGUSR1 is for the first job alone, which has the console.

    A handler written in Python runs when the main thread comes to its next line: not before a wait has ended that began
    just after the signal. So the number of the signal goes to a thread, through a socket, at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
    before = {s: signal.getsignal(s) or signal.SIG_DFL for s in signals}
    before = {s: handler for s, handler in before.items() if handler is not signal.SIG_IGN}
    source, sink = socket.socketpair()
    sink.setblocking(False)

    def pass_on() -> None:
        while number := source.recv(1):
            if number[0] in signals:
                for events in jobs if number[0] != signal.SIGUSR1 else jobs[:1]:
                    events.put(signal.Signals(number[0]))

    passing = threading.Thread(target=pass_on, daemon=True)
    passing.start()
    sink_before = signal.set_wakeup_fd(sink.fileno())
    try:
        for number in before:
            signal.signal(number, lambda number, frame: None)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # or nobody could learn an exit code
            before[signal.SIGCHLD] = signal.SIG_IGN
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(sink_before)
        sink.close()
        passing.join()
        source.close()
