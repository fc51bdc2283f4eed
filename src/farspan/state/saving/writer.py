"""One rank's file of a checkpoint: what is in it, and who writes it while the program goes on.

On Linux, for tensors on the CPU, that is a child process: a fork has the memory as it is at the call, and what the
program changes from then on is copied by the kernel, page by page, so nothing is copied that does not change. Elsewhere
tensors are copied at the call, and a thread writes them.

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
from farspan.state.format import Part, disk, write_file
from farspan.state.format.checksum import Checksum, blocks_of, chunks_of
from farspan.state.values import dtype_name
from farspan.torch_private import DisableTorchFunction

__all__ = ["Job", "Write", "begin_write", "can_fork"]

_LONGEST_S = 1e6
Write = Callable[[], dict[str, Any]]
"""Waits until a job is done; what it has found, as `Job.run` gives it."""


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

    def prepared(self, *, is_copied: bool) -> Job:
        """The same, of tensors that lie in the CPU's memory as a file has them; copies, if nothing else is."""
        return Job(
            path=self.path,
            about=self.about,
            tensors={name: _in_memory(item, is_copied) for name, item in self.tensors.items()},
            compared={name: _in_memory(item, is_copied) for name, item in self.compared.items()},
        )

    def run(self) -> dict[str, Any]:
        """Write the file, if there is anything to write; where everything lies, and its checksums, as JSON has it."""
        compared = {name: _checksums(buffer_of(item)) for name, item in self.compared.items()}
        if not self.tensors:
            return {"file": None, "tensors": {}, "compared": compared}
        parts = [_part(name, item) for name, item in self.tensors.items()]
        done = write_file(self.path, parts, self.about)
        tensors = {
            part.key: [part.dtype, part.shape, begin, checksums]
            for part, begin, checksums in zip(parts, done.begins, done.checksums, strict=True)
        }
        file = [self.path.rpartition("/")[2], done.size_bytes, done.header_bytes, done.header_checksum]
        return {"file": file, "tensors": tensors, "compared": compared}


def can_fork() -> bool:
    return sys.platform == "linux"


def begin_write(job: Job, *, is_asynchronous: bool, deadline_s: float) -> Write:
    """Begin with a job: it sees the tensors as they are now.

    Args:
        job: What is to be done.
        is_asynchronous: Whether the program goes on meanwhile; else nothing is copied, and nothing is done before the
            returned function is called.
        deadline_s: How long the disk may take for one operation.
    """
    if not is_asynchronous:
        return job.prepared(is_copied=False).run
    if can_fork():
        return _fork(job.prepared(is_copied=False), deadline_s)
    return job.prepared(is_copied=True).run


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

    def wait() -> dict[str, Any]:
        text = _read_all(reading, child, path, deadline_s)
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
        disk.before_write = lambda: os.write(writing, b" ") if os.getppid() == parent else os._exit(1)
        try:
            found = job.run()
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) else None
            found = {"error": [type(error).__name__, number, str(error)[:500]]}
        disk.before_write = lambda: None
        disk.write(writing, json.dumps(found).encode())
        code = 0
    finally:
        os._exit(code)


def _read_all(pipe: int, child: int, path: str, deadline_s: float) -> bytes:
    """What the child says: blanks while it goes on, at last what it has found."""
    found = bytearray()
    try:
        while select.select([pipe], [], [], min(deadline_s, _LONGEST_S))[0]:
            data = os.read(pipe, 1 << 20)
            if not data:
                return bytes(found)
            found += data.lstrip()
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


def _in_memory(tensor: torch.Tensor, is_copied: bool) -> torch.Tensor:
    with torch.no_grad(), DisableTorchFunction():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        is_same = plain.numel() > 0 and plain.data_ptr() == tensor.data_ptr()
        return plain.clone() if is_copied and is_same else plain


def _part(name: str, tensor: torch.Tensor) -> Part:
    def data() -> Iterable[memoryview]:
        return (buffer_of(tensor),)

    return Part(key=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=data)


def _checksums(data: memoryview) -> list[str]:
    found: list[str] = []
    for begin, end in blocks_of(len(data)):
        checksum = Checksum()
        for first, last in chunks_of(end - begin):
            checksum.update(data[begin + first : begin + last])
        found.append(checksum.hexdigest())
    return found
