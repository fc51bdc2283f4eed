"""`farspan.save`: all ranks begin a checkpoint together, and go on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from farspan.errors import CheckpointError, naming_keywords
from farspan.execute.engine import Engine
from farspan.execute.optimizers.watched_steps import watch_state
from farspan.execute.process.world import engine_of_this_thread
from farspan.record.saving.reserved import fill_reserved
from farspan.state.counts import counts_to_json
from farspan.state.format import Draft, begin, discard, hold, make_root, remove_drafts, step_in
from farspan.state.generators import generators_to_json
from farspan.state.memory.folders import for_other_hosts, from_other_host, memory_of, newest_of_all, top_of_memory
from farspan.state.memory.hosts import hosts_of_memory, own_host
from farspan.state.memory.room import check_room, room_in
from farspan.state.names import check_key
from farspan.state.position.resumable import loaders_to_json
from farspan.state.saving.collect import Collected, collect
from farspan.state.saving.saver import Saved, Task, saver_of
from farspan.state.saving.snapshot import size_of
from farspan.state.saving.writer import HOW, Job, begin_write, failed

__all__ = ["save"]

_warned: weakref.WeakSet[Engine] = weakref.WeakSet()
_LEAST_BYTES_PER_S = 4 * 2**20
"""A disk that takes less of one rank is overloaded: until then others wait for its file, beyond the deadline."""


@naming_keywords
def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = False,
    snapshot: str = "auto",
    memory: bool = False,
) -> Saved:
    """Save where a program stands, so that `farspan.load` lets another run of it go on as if it had never ended.

    All ranks call it alike, between two steps of the optimizer. It returns when what is saved has been set apart, and
    the files are written while the program goes on; the next call of `save` waits for that, and so does the end of the
    program. Beside what is given it saves the random generators, how often models have been called, and where loaders
    stand (`farspan.resumable`). Gradients are not saved.

    Args:
        path: A folder of checkpoints; this one becomes `path/step-N` when all of it is on the disk. All ranks must see
            the same folder.
        model: A module, or a dictionary of modules.
        optimizer: An optimizer, or a dictionary of optimizers. What it keeps is saved by the names of parameters.
        scheduler: An object with `state_dict()` and `load_state_dict()`, or a dictionary of such.
        step: A number for this checkpoint; one more than that of the latest one by default.
        extra: What else is to be saved, by name: numbers, texts, lists, dictionaries, tensors, numpy arrays, random
            generators, modules, objects with `state_dict()` and `load_state_dict()`. Equal on every rank.
        keep: How many checkpoints stay in the folder; None for all. Old ones go when the new one is on the disk.
        wait: Return only when the checkpoint is on the disk. Nothing is copied then.
        snapshot: How what is saved is set apart: "copy" takes as much memory as what a rank owns, and keeps it for the
            next save (what an optimizer keeps, and nothing else of the program's uses, is copied while the program goes
            on: `optimizer.step()` waits for that); "fork" takes what changes meanwhile, page by page, and slows the
            steps until the checkpoint is on the disk (on Linux). "auto": a copy where there is memory for two, else a
            fork.
        memory: Save into memory that `farspan run --max-restarts` keeps until the run is over, instead of onto the
            disk: the newest save is there (`latest` and `load` find it by the same `path`), those before it are not.
            Without such a launcher nothing is saved.

    Returns:
        What `wait()` can be called on.

    Raises:
        CheckpointError: Something cannot be saved (nothing is written then), the ranks do not save the same, or the
            save before this one has failed.

    Example:
        >>> import tempfile, torch, farspan
        >>> model = torch.nn.Linear(4, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = farspan.save(folder, model=model, step=3, extra={"best": 0.5}).wait()
        ...     loaded = farspan.load(folder, model=model)
        >>> loaded.step, loaded.extra
        (3, {'best': 0.5})
    """
    engine = engine_of_this_thread(None)
    saver = saver_of(engine)
    saver.finish()
    engine.check()
    _check_arguments(step, keep, optimizer, snapshot)
    if memory and not memory_of(os.path.abspath(path)):
        _warn_of_no_memory(engine)
        return Saved("", saver)
    if engine.recorder.has_pending():
        engine.flush("farspan.save")
    engine.barrier("farspan.save")  # where programs differ, that is said; and who is lost by now is left out
    engine.slices.come_home("farspan.save")
    engine.recorder.draws.settle()
    fill_reserved()  # a thread writes what is in `extra`
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if not extra and all(each is None for each in things.values()):
        raise CheckpointError(
            "there is nothing to save.",
            why="model=, optimizer=, scheduler= and extra= are left out, and parameters are saved by no other name.",
            hint="farspan.save(path, model=model, optimizer=optimizer, step=step)",
        )
    extra = {check_key(key, "extra"): item for key, item in (extra or {}).items()}
    found = Collected()
    watch_state()
    try:
        request = _Request(
            path=os.fspath(path),
            step=step,
            keep=1 if memory else keep,
            how="none" if wait else snapshot,
            is_in_memory=memory,
        )
        task = _begin(engine, found, things | {"extra": extra}, request)
        saved = saver.begin(task, is_asynchronous=not wait)
    except BaseException:
        _end_loans(found)
        saver.release()
        raise
    if wait:
        saved.wait()
    return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the program asks for.

    Attributes:
        path: The folder of checkpoints.
        step: The checkpoint's number; None for the next one.
        keep: How many checkpoints stay.
        how: What is saved is set apart, a word of `HOW`.
        is_in_memory: Whether it goes into memory instead of onto the disk.
    """

    path: str
    step: int | None
    keep: int | None
    how: str
    is_in_memory: bool


def _begin(engine: Engine, found: Collected, things: Mapping[str, Any], request: _Request) -> Task:
    """Set apart what is saved; returns what is left to do, in another thread or in this one.

    Args:
        engine: This rank's.
        found: What is saved, empty so far.
        things: What the program gives, by name.
        request: How, and where to.
    """
    refused, saver = None, saver_of(engine)
    try:
        collect(engine, things, found, lends=request.how in ("auto", "copy"))
    except CheckpointError as error:  # what an optimizer keeps is seen by its parameter's owner alone
        refused = error
    tensors, compared = _own_part(engine, found)
    draft, step, most_bytes = _agree(engine, found, refused, request, size_of(tensors))
    rank = engine.agreement_of_all.side.rank
    hosts = hosts_of_memory() if request.is_in_memory else None
    job = Job(
        path=f"{draft.path}/rank-{rank:05}.safetensors",
        about={"save_id": draft.save_id, "rank": str(rank)},
        tensors=tensors,
        compared=compared,
    )
    try:
        if hosts is not None:
            make_root(draft.path)  # rank 0 has made that of its own host
        write = begin_write(job, saver.arena, found.loans, how=request.how, deadline_s=engine.deadline_s)
    except Exception as error:  # no memory, no process: the others go on, and hear of it by this rank's vote
        _end_loans(found)
        write = failed(error)
    return Task(
        key=f"checkpoint {saver.num_begun}",
        draft=draft,
        write=write,
        states=found.states,
        group=_of_group(engine),
        keep=request.keep,
        patience_s=engine.deadline_s + most_bytes / _LEAST_BYTES_PER_S,
        head={"step": step, "state": {"objects": found.objects}, "about": _about(engine)},
        hosts=hosts,
    )


def _warn_of_no_memory(engine: Engine) -> None:
    if engine not in _warned:
        _warned.add(engine)
        engine.console.warn("farspan: save(memory=True) saves nothing here: farspan run --max-restarts N keeps memory")


def _end_loans(found: Collected) -> None:
    for loan in found.loans:
        loan.end()


def _check_arguments(step: Any, keep: Any, optimizer: Any, snapshot: Any) -> None:
    if snapshot not in HOW[:3] or (snapshot == "fork" and sys.platform != "linux"):
        raise CheckpointError(
            f"snapshot={snapshot!r:.60} is not possible here.", why=_SNAPSHOTS, hint='snapshot="copy"'
        )
    if step is not None and (type(step) is not int or not 0 <= step < 10**15):
        raise CheckpointError(f"step={step!r:.60} is no number of a checkpoint.", why=_COUNTS, hint="step=100")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r:.60} is no number of checkpoints.", why=_COUNTS, hint="keep=3")
    given: list[Any] = [*optimizer.values()] if isinstance(optimizer, dict) else [optimizer]
    for each in given:
        lacks = [name for name in ("state_dict", "step") if not hasattr(each, name)]
        is_other = isinstance(each, (torch.nn.Module, LRScheduler))
        if is_other or (lacks and each is not None and not isinstance(each, (Optimizer, dict))):
            raise CheckpointError(
                f"optimizer= is a {type(each).__name__}.",
                why=f"it has no {lacks[0]}." if lacks else "it is no optimizer.",
                hint="an optimizer, or a dictionary of optimizers",
            )


_SNAPSHOTS = 'the ways are "auto", "copy" and, on Linux, "fork".'
_COUNTS = "steps are whole numbers from 0; as many checkpoints as keep= says stay, at least 1."


def _agree(
    engine: Engine, found: Collected, refused: CheckpointError | None, request: _Request, own_bytes: int
) -> tuple[Draft, int, int]:
    """All ranks save the same, into the folder that rank 0 has made.

    Args:
        engine: This rank's.
        found: What it saves.
        refused: Why it cannot.
        request: What the program asks for.
        own_bytes: What this rank writes.

    Returns:
        What is written, its number, and the most bytes that a rank may write.

    Raises:
        CheckpointError: A rank cannot save, or saves something else; raised on every rank, and nothing is left.
    """
    entries = _entries(found, request)
    most = size_of(found.owned | found.alone | found.shared)
    own = {"digest": _digest("\n".join(entries)), "size": most, "writes": own_bytes}
    while True:
        part, draft = _begun(engine, refused, request)
        try:
            blobs = engine.agreement_of_all.gather("farspan.save", json.dumps(own | part).encode())
            parts = [json.loads(blob) for blob in blobs]
            _check_alike(engine, parts, entries)
            if request.is_in_memory:
                check_room([(item["host"], item["writes"], item["room"]) for item in parts])
        except BaseException:
            if draft is not None:
                discard(draft.path)
            raise
        if "draft" in parts[0]:  # else the rank that was the first is lost: the one that is now begins
            root, name, save_id, serial = parts[0]["draft"]
            draft = Draft(root=from_other_host(root), name=name, save_id=save_id, serial=serial)
            return draft, int(parts[0]["step"]), max(item["size"] for item in parts)


def _begun(engine: Engine, refused: CheckpointError | None, request: _Request) -> tuple[dict[str, Any], Draft | None]:
    """Returns what this rank says about a save that begins: where it goes, on rank 0, and why it cannot."""
    part: dict[str, Any] = {}
    draft, step = None, request.step
    try:
        if refused is not None:
            raise refused
        if engine.agreement_of_all.side.rank == 0:
            root = os.path.abspath(request.path)
            memory = memory_of(root)
            into, beside = (memory, root) if request.is_in_memory else (root, memory)
            make_root(into)
            saver_of(engine).lock = hold(into)
            if step is None:
                latest = newest_of_all(root)
                step = 0 if latest is None else step_in(latest) + 1
            if request.is_in_memory:
                remove_drafts(into)
            draft = begin(into, step, secrets.token_hex(8), beside=beside)
            part |= {"draft": [for_other_hosts(draft.root), draft.name, draft.save_id, draft.serial], "step": step}
        if request.is_in_memory:
            part |= {"host": own_host(), "room": room_in(top_of_memory())}
    except OSError as error:
        where = error.filename or request.path
        part["error"] = [f"{where} cannot be made.", f"{error.strerror}.", "a folder that can be written"]
    except CheckpointError as error:
        part["error"] = [error.what, error.why, error.hint]
    return part, draft


def _check_alike(engine: Engine, parts: Sequence[dict[str, Any]], entries: Sequence[str]) -> None:
    for rank, part in enumerate(parts):
        if "error" in part:
            what, why, hint = part["error"]
            raise CheckpointError(what if "error" in parts[0] else f"rank {rank}: {what}", why=why, hint=hint)
    for rank, part in enumerate(parts):
        first = rank - rank % engine.num_ranks
        if part["digest"] != parts[first]["digest"]:
            raise _differ(engine, entries, first, rank)


def _entries(found: Collected, request: _Request) -> list[str]:
    """A line for each part of what every rank must save alike."""
    lines = [f"path: {request.path}", f"step: {request.step}", f"memory: {request.is_in_memory}"]
    for key, value in found.objects.items():
        items = value["items"].items() if value["kind"] == "mapping" else [("", value)]
        lines += [f"{key}{'/' * bool(name)}{name}: {json.dumps(item, sort_keys=True)}" for name, item in items]
    return lines + [f"{name}: {item.dtype}{list(item.shape)}" for name, item in found.shared.items()]


def _differ(engine: Engine, entries: Sequence[str], first: int, rank: int) -> CheckpointError:
    """All ranks say what they have, in a few bytes for each line."""
    lines = json.dumps([_digest(line) for line in entries]).encode()
    blobs = engine.agreement_of_all.gather("what is saved", lines)
    ours, theirs = json.loads(blobs[first]), json.loads(blobs[rank])
    at = next((number for number, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    mine = entries[at] if at is not None and at < len(entries) else ""
    name, _, value = mine.partition(": ")
    return CheckpointError(
        f"ranks {first} and {rank} save different values for {name or 'their parts'}.",
        why=f"this rank has {value[:200] or 'more or fewer parts'}",
        hint="save on every rank alike; what depends on the rank does not belong into a checkpoint",
    )


def _own_part(engine: Engine, found: Collected) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns what this rank writes, and what it keeps for others to compare: one rank of all writes each tensor."""
    groups = engine.groups
    tensors: dict[str, torch.Tensor] = dict(found.alone)
    compared: dict[str, torch.Tensor] = {}
    if groups.number == 0:
        for number, (name, item) in enumerate(sorted(found.shared.items())):
            (tensors if number % engine.num_ranks == engine.rank else compared)[name] = item
    buffers = {item.name for item in engine.parameters.values() if not item.is_parameter}
    ids = {id(item.tensor) for item in engine.parameters.values() if item.name in buffers}
    for number, (name, item) in enumerate(sorted(found.owned.items())):
        if id(item) in ids:  # batch statistics: those of the first group count
            if groups.number == 0:
                tensors[name] = item
        else:
            (tensors if number % groups.num_groups == groups.number else compared)[name] = item
    return tensors, compared


def _of_group(engine: Engine) -> dict[str, Any]:
    """Returns what is the program's own in each group of ranks."""
    return {
        "number": engine.groups.number,
        "generators": generators_to_json(engine.recorder.draws.generator),
        "counts": counts_to_json(engine),
        "loaders": loaders_to_json(engine.groups.first_num_groups),
    }


@functools.cache
def _own_version() -> str:
    try:
        return version("farspan")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def _about(engine: Engine) -> dict[str, Any]:
    num_groups = engine.groups.num_groups
    return {
        "farspan": _own_version(),
        "torch": torch.__version__,
        "num_ranks": engine.num_ranks,
        "num_groups": num_groups,
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
