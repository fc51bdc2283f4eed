"""One rank's saves: one at a time is on its way, while the program goes on.

    every rank   farspan.save -> what is saved is equal on all ranks? -> fork -> the program goes on
                                                                           |
    its thread                                 file written and synced <---+ -> vote -> (rank 0) -> verdict
    rank 0's     all votes in -> are all files here? same bytes? -> manifest -> rename -> latest -> verdict

A save has failed on all ranks or on none. Its failure is raised where the program next saves, loads or waits, or when
it ends. Only votes and verdicts go from rank to rank, tensors do not.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farspan.control.channel import SideChannel
from farspan.errors import CheckpointError, DeadlineError, FarspanError, RemoteError
from farspan.execute.engine import Engine
from farspan.execute.process.program_end import fail_at_end
from farspan.launch.rank.notes import note_saving
from farspan.launch.rank.process_end import at_process_end
from farspan.state.format import Draft, Lock, discard, is_checkpoint
from farspan.state.memory.hosts import Hosts
from farspan.state.saving.commit import Vote, commit_votes
from farspan.state.saving.snapshot import Arena
from farspan.state.saving.writer import Write

__all__ = ["Saved", "Saver", "Task", "saver_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A save that has begun.

    Attributes:
        key: Of what is exchanged about it.
        draft: What is written.
        write: Waits for this rank's file.
        states: What this rank's optimizers keep, as JSON.
        group: What is its group's own: generators, counts of calls, places in the data.
        keep: How many checkpoints stay.
        patience_s: How long the slowest rank may take for its file.
        head: What every rank has alike, for the manifest; used on rank 0.
        hosts: Those in whose memory it is saved; None for one folder that all ranks see.
    """

    key: str
    draft: Draft
    write: Write
    states: dict[str, dict[str, Any]]
    group: dict[str, Any]
    keep: int | None
    patience_s: float
    head: dict[str, Any]
    hosts: Hosts | None


class Saved:
    """A save that `farspan.save` has begun.

    Attributes:
        path: The folder that the checkpoint has when it is on the disk.
        failure: Why it has failed, once it has.
        is_of_lost: Whether that is the loss of a rank, after which the others go on.
    """

    def __init__(self, path: str, saver: Saver) -> None:
        self.path = path
        self.failure: FarspanError | None = None
        self.is_of_lost = False
        self._saver = saver

    def wait(self) -> str:
        """Wait until the checkpoint is on the disk; its folder.

        Raises:
            CheckpointError: It could not be written; the same on every rank, and each time.
        """
        if self._saver.current is self:
            self._saver.finish()
        if self.failure is not None and not (self.is_of_lost and is_checkpoint(self.path)):
            raise self.failure
        return self.path


class Saver:
    """Of one rank.

    Args:
        engine: This rank's.

    Attributes:
        num_begun: How many saves it has begun.
        arena: Memory for copies of what is saved.
        lock: That of the folder into which it saves, on rank 0 while a save goes on.
        current: The save of whose end the program has not heard yet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.deadline_s = engine.deadline_s
        self.num_begun = 0
        self.arena = Arena()
        self.lock: Lock | None = None
        self.current: Saved | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._progress = threading.Condition()
        self._limit_s: float | None = None
        """How long the next sign of life of the thread may take; None where no save is on its way."""
        engine.before_end.append(self.finish)
        engine.pace.disturbances.append(lambda: self._limit_s is not None)
        if self.side.world_size == 1:
            at_process_end(self._end)  # nobody ends an engine that is alone

    @property
    def side(self) -> SideChannel:
        """Returns the channel of all ranks, of those that are left where some are lost."""
        return self._engine.agreement_of_all.side

    def begin(self, task: Task, *, is_asynchronous: bool) -> Saved:
        """Let `task` go on; without `is_asynchronous` return when it is over."""
        self.num_begun += 1
        saved = self.current = Saved(task.draft.target, self)
        if not is_asynchronous:
            self._run(task, saved)
            return saved

        def run() -> None:
            try:
                self._run(task, saved)
            finally:
                self._note_life(None)

        self._note_life(2 * self.deadline_s)
        thread = threading.Thread(target=run, name=f"farspan-save-{self.side.rank}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # the system has no more threads; the other ranks wait for this one's vote
            run()
        else:
            self._thread = thread
        return saved

    def finish(self) -> None:
        """Wait for the save that is on its way, if there is one.

        Raises:
            CheckpointError: It has failed; raised here once.
        """
        if self._thread is not None:
            self._wait_for(self._thread)
            self._thread = None
        saved, self.current = self.current, None
        if saved is None or saved.failure is None:
            return
        if not saved.is_of_lost:
            raise saved.failure
        if not is_checkpoint(saved.path):
            self._engine.console.warn(f"farspan: {saved.failure.what}")

    def _wait_for(self, thread: threading.Thread) -> None:
        """Wait for a save as long as it goes on."""
        with self._progress:
            while self._limit_s is not None:
                if not self._progress.wait(min(limit_s := self._limit_s, threading.TIMEOUT_MAX)):
                    raise DeadlineError(
                        f"a save has not gone on for {limit_s:g} s.",
                        why="the disk is overloaded, stopped, or cannot be reached.",
                        hint="FARSPAN_DEADLINE=seconds allows longer waits",
                    )
        thread.join()

    def _note_life(self, limit_s: float | None) -> None:
        """The save goes on, and its next sign of life comes in so many seconds at most; None: it is over."""
        with self._progress:
            self._limit_s = limit_s
            self._progress.notify_all()

    def release(self) -> None:
        """Nothing is saved any more, or not yet: another program may save into the folder."""
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()

    def _run(self, task: Task, saved: Saved) -> None:
        """Save; notes the failure, if there is one: whatever it is, it must reach the program."""
        side = self.side  # to the end: that of other ranks would wait for another save
        saved.failure = self._failure_of(task, side)
        heard = side.failure
        outlives = self._engine.groups.outlives_losses or self._engine.losses.may_be_outlived
        if saved.failure is not None and outlives:
            saved.is_of_lost = isinstance(heard, RemoteError) and heard.is_loss
        if saved.is_of_lost:
            saved.failure = CheckpointError(
                f"the checkpoint {saved.path} is not whole: a rank was lost while it was written.",
                why="the one before it is.",
                hint="save again",
            )

    def _failure_of(self, task: Task, side: SideChannel) -> FarspanError | None:
        try:
            vote = self._vote_of(task)
            self._note_life(task.patience_s + 2 * self.deadline_s)
            side.contribute(f"votes on {task.key}", json.dumps(vote).encode(), receiver=0)
            verdict = {} if side.rank else self._decide(task, side)
            side.contribute(f"verdict on {task.key}", json.dumps(verdict).encode())
            first = side.gathered(f"verdict on {task.key}", task.patience_s + self.deadline_s)[0]
            side.forget(f"verdict on {task.key}")
            return _failure_of(json.loads(first))
        except FarspanError as error:
            return error
        except RuntimeError as error:  # the side channel has been closed
            return CheckpointError("the program has ended before a checkpoint was on the disk.", why=str(error))
        except Exception as error:
            return CheckpointError("a checkpoint could not be written.", why=f"{type(error).__name__}: {error}")
        finally:
            self.release()

    def _vote_of(self, task: Task) -> Vote:
        try:
            found = task.write(lambda: self._note_life(2 * self.deadline_s))
            if task.hosts is not None and found["file"] is not None:
                path = f"{task.draft.path}/{found['file'][0]}"
                task.hosts.copy_away(path, lambda: self._note_life(2 * self.deadline_s))
            return {**found, "states": task.states, "group": task.group}
        except OSError as error:
            return {"error": _described(error, task.draft.path)}
        except FarspanError as error:
            return {"error": [error.what, error.why, error.hint]}
        except Exception as error:
            return {"error": [f"rank {self.side.rank} could not write.", f"{type(error).__name__}: {error}", ""]}

    def _decide(self, task: Task, side: SideChannel) -> dict[str, Any]:
        """Returns what has become of the save, for all ranks; on rank 0."""
        try:
            return self._committed(task, side)
        finally:
            self.release()  # before anybody hears of it

    def _committed(self, task: Task, side: SideChannel) -> dict[str, Any]:
        blobs = side.gathered(f"votes on {task.key}", task.patience_s)
        side.forget(f"votes on {task.key}")
        try:
            commit_votes(task.draft, [json.loads(blob) for blob in blobs], task.head, task.keep, task.hosts)
        except OSError as error:
            return self._abandoned(task, _described(error, task.draft.path))
        except CheckpointError as error:
            return self._abandoned(task, [error.what, error.why, error.hint])
        except Exception as error:
            return self._abandoned(task, ["a checkpoint could not be written.", f"{type(error).__name__}: {error}", ""])
        note_saving(int(task.head["step"]))
        return {}

    def _abandoned(self, task: Task, error: list[str]) -> dict[str, Any]:
        try:
            discard(task.draft.path)
        except OSError as other:
            error[1] += f"\nWhat was written stays in {task.draft.path}: {other.strerror}."
        return {"error": error}

    def _end(self) -> None:
        """The program is over."""
        if os.getpid() != self._process:
            return
        try:
            self.finish()
        except FarspanError as error:
            fail_at_end(error)


_savers: weakref.WeakKeyDictionary[Engine, Saver] = weakref.WeakKeyDictionary()


def saver_of(engine: Engine) -> Saver:
    """The one of an engine, made where it is first asked for."""
    found = _savers.get(engine)
    if found is None:
        found = _savers[engine] = Saver(engine)
    return found


def _failure_of(verdict: dict[str, Any]) -> FarspanError | None:
    found: Sequence[str] | None = verdict.get("error")
    return None if found is None else CheckpointError(found[0], why=found[1], hint=found[2])


def _described(error: OSError, path: str) -> list[str]:
    where = error.filename or path
    hint = "free space there, or another folder" if error.errno in (28, 122, 27) else "look at that disk"
    return [f"a checkpoint could not be written: {where}", f"{error.strerror}; the one before it is whole.", hint]
