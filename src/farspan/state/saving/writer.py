"""One rank's file of a checkpoint: what is in it, and who writes it while the program goes on.

    copy    tensors are copied at the call (what is lent: by the thread), and a thread writes the copies: the least that
            keeps the program
    fork    where memory is short (Linux, tensors on the CPU): a child process has the memory as it is at the call, and
            the kernel copies, page by page, what the program changes from then on; that costs the program more
    none    the program waits: tensors are written from where they are

The child is one as a DataLoader's worker is: of all threads it has only this one, so it calls no torch function, closes
what it does not need, and ends without a trace.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farspan.comm.tensor_bytes import buffer_of
from farspan.errors import CheckpointError, DeadlineError
from farspan.execute.optimizers.lent_state import Loan
from farspan.state.format import Part, disk, write_file
from farspan.state.format.checksum import blocks_of, checksum_of
from farspan.state.saving.snapshot import Arena, copy_bytes, fits
from farspan.state.values import dtype_name
from farspan.torch_private import DisableTorchFunction

__all__ = ["HOW", "Job", "Write", "begin_write", "failed"]

HOW = ("auto", "copy", "fork", "none")
_LONGEST_S = 1e6
Write = Callable[[Callable[[], object]], dict[str, Any]]
"""Does a job, or waits until it is done, as `Job.run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank does for a checkpoint.

    Attributes:
        path: Of its file.
        about: For the file's header.
        tensors: To be written.
        compared: That another rank writes, and that must be the same here.
    """

    path: str
    about: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    compared: Mapping[str, torch.Tensor]

    def of(self, found: Mapping[str, torch.Tensor]) -> Job:
        """Returns the same, of other tensors in the place of its own, by name."""
        tensors = {name: found[name] for name in self.tensors}
        compared = {name: found[name] for name in self.compared}
        return Job(path=self.path, about=self.about, tensors=tensors, compared=compared)

    def run(self, on_progress: Callable[[], object]) -> dict[str, Any]:
        """Write the file, if there is anything to write; where everything lies, and its checksums, as JSON has it.

        Args:
            on_progress: Called every now and then, before what may take long.
        """
        compared = {name: _checksums(item, on_progress) for name, item in self.compared.items()}
        if not self.tensors:
            return {"file": None, "tensors": {}, "compared": compared}
        parts = [_part(name, item) for name, item in self.tensors.items()]
        done = write_file(self.path, parts, self.about, on_progress)
        tensors = {
            part.key: [part.dtype, part.shape, begin, checksums]
            for part, begin, checksums in zip(parts, done.begins, done.checksums, strict=True)
        }
        file = [self.path.rpartition("/")[2], done.size_bytes, done.header_bytes, done.header_checksum]
        return {"file": file, "tensors": tensors, "compared": compared}


def begin_write(job: Job, arena: Arena, loans: Sequence[Loan] = (), *, how: str, deadline_s: float) -> Write:
    """Begin with a job: it sees the tensors as they are now.

    Args:
        job: What is to be done.
        arena: Memory for copies.
        loans: What may be copied later; they end with the job, or by whoever drops it.
        how: "copy", "fork", "none" (nothing is done before the returned function is called), or "auto".
        deadline_s: How long the disk may take for one operation.
    """
    tensors = {**job.tensors, **job.compared}
    if how == "auto":
        how = "fork" if sys.platform == "linux" and not fits(arena, tensors) else "copy"
    if how == "copy":
        return _copy(job, arena, loans)
    for loan in loans:
        loan.give_back()
    plain = job.of({name: _in_memory(item, to_fork=how == "fork") for name, item in tensors.items()})
    return plain.run if how == "none" else _fork(plain, deadline_s)


def _copy(job: Job, arena: Arena, loans: Sequence[Loan]) -> Write:
    tensors = {**job.tensors, **job.compared}
    lent = set[int]().union(*[loan.begin() for loan in loans])
    later = [name for name, item in tensors.items() if id(item) in lent]
    copies = arena.copy(tensors, later)
    pairs = [(tensors[name], copies[name]) for name in later]

    def write(on_progress: Callable[[], object]) -> dict[str, Any]:
        try:
            copy_bytes(pairs)
        finally:
            pairs.clear()
            for loan in loans:
                loan.end()
        return job.of(copies).run(on_progress)

    return write


def failed(error: Exception) -> Write:
    """A job that could not be begun: who does it hears why."""

    def write(on_progress: Callable[[], object]) -> dict[str, Any]:
        raise error

    return write


def _fork(job: Job, deadline_s: float) -> Write:
    path = job.path
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads: see above
        child = os.fork()
    if child == 0:
        _run_in_child(job, writing, parent)
    os.close(writing)

    def wait(on_progress: Callable[[], object]) -> dict[str, Any]:
        text = _read_all(reading, child, path, deadline_s, on_progress)
        _reap(child)
        try:
            found = json.loads(text)
        except ValueError:
            raise CheckpointError(
                f"the process that wrote {path} has ended early.",
                why="something has ended it: no memory was left, or a signal.",
                hint="farspan.save(..., wait=True), which writes in the program's own process",
            ) from None
        if "error" in found:
            raise _error_of(found["error"], path)
        return found

    return wait


def _run_in_child(job: Job, writing: int, parent: int) -> None:
    """Never returns."""
    code = 1
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)
        os.closerange(3, writing)
        os.closerange(writing + 1, os.sysconf("SC_OPEN_MAX"))
        try:
            found = job.run(lambda: os.write(writing, b" ") if os.getppid() == parent else os._exit(1))
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) else None
            found = {"error": [type(error).__name__, number, str(error)[:500]]}
        disk.write(writing, json.dumps(found).encode())
        code = 0
    finally:
        os._exit(code)


def _read_all(pipe: int, child: int, path: str, deadline_s: float, on_progress: Callable[[], object]) -> bytes:
    """Returns what the child says: blanks while it goes on, at last what it has found."""
    found = bytearray()
    try:
        waiting = select.poll()  # `select` takes no more than 1024 open files
        waiting.register(pipe, select.POLLIN)
        while waiting.poll(min(deadline_s, _LONGEST_S) * 1000):
            data = os.read(pipe, 1 << 20)
            if not data:
                return bytes(found)
            found += data.lstrip()
            on_progress()
    finally:
        os.close(pipe)
    os.kill(child, signal.SIGKILL)
    _reap(child)
    raise DeadlineError(
        f"the disk has taken more than {deadline_s:g} s for one write or sync of {path}.",
        why="it is overloaded, stopped, or cannot be reached.",
        hint="FARSPAN_DEADLINE=seconds allows longer waits",
    )


def _reap(child: int) -> None:
    try:
        os.waitpid(child, 0)
    except ChildProcessError:  # the program waits for all its children itself
        return


def _error_of(found: Sequence[Any], path: str) -> Exception:
    kind, number, text = found
    if number is not None:
        return OSError(number, os.strerror(number), path)
    return CheckpointError(f"{path} could not be written.", why=f"{kind}: {text}")


def _in_memory(tensor: torch.Tensor, *, to_fork: bool) -> torch.Tensor:
    """A tensor as a file has it: itself, if it lies so in the CPU's memory, and, `to_fork`, no process shares that."""
    with torch.no_grad(), DisableTorchFunction():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return plain.clone() if to_fork and plain.is_shared() else plain


def _part(name: str, tensor: torch.Tensor) -> Part:
    def data() -> Iterable[memoryview]:
        return (buffer_of(tensor),)

    return Part(key=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=data)


def _checksums(tensor: torch.Tensor, on_progress: Callable[[], object]) -> list[str]:
    data = buffer_of(tensor)
    found: list[str] = []
    for begin, end in blocks_of(len(data)):
        on_progress()
        found.append(checksum_of(data[begin:end]))
    return found
