"""`farspan.load`: all ranks restore a checkpoint together, or none of them changes anything."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farspan.control.channel import SideChannel
from farspan.documents import as_object
from farspan.errors import CheckpointError, DamageError, FarspanError, naming_keywords
from farspan.execute.engine import Engine
from farspan.execute.process.world import current_engine, engine_of_this_thread, num_ranks_to_be
from farspan.outputs import write_line
from farspan.record.recorder import Recorder
from farspan.record.unrecorded import plainly
from farspan.state.counts import restore_counts
from farspan.state.format import Reader, read_manifest
from farspan.state.generators import generators_from_json
from farspan.state.loading.choice import choices, offer
from farspan.state.loading.restore import Restorer
from farspan.state.memory.folders import fetches
from farspan.state.names import parameter_names
from farspan.state.position.resumable import loaders_from_json
from farspan.state.saving.saver import saver_of

__all__ = ["Loaded", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of `farspan.load`.

    Attributes:
        path: The checkpoint's folder.
        step: Its number.
        extra: What was saved as `extra` and is plain data.
    """

    path: str
    step: int
    extra: dict[str, Any]


@naming_keywords
def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    resume: bool = True,
) -> Loaded:
    """Restore what `farspan.save` has saved, in place, under whatever plan and on however many ranks.

    All ranks call it alike, before or after `farspan.distribute`; after it, each reads only what it owns. All that is
    read is verified first: where anything is damaged, nothing of the program's has been changed.

    Args:
        path: A folder of checkpoints, of which the latest is taken, or one checkpoint in it.
        model: What was saved as `model`: a module, or a dictionary of modules.
        optimizer: What was saved as `optimizer`.
        scheduler: What was saved as `scheduler`.
        extra: By name the objects that were saved in `extra` and keep their own state (modules, random generators, what
            has `load_state_dict`). Plain data are returned.
        strict: Raise where the checkpoint is damaged. False: take the newest one that is whole, and say so.
        resume: Also go on with the random generators, the counts of calls and the places of loaders
            (`farspan.resumable`), as if the run that saved them had not ended.

    Returns:
        Which checkpoint it was, its step, and plain data of `extra`.

    Raises:
        CheckpointError: There is none; it is damaged, which names the file and the tensor, and the newest one that is
            whole; or it is of another model or optimizer. The same on every rank.

    Example:
        >>> import tempfile, torch, farspan
        >>> model = torch.nn.Linear(4, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = farspan.save(folder, model=model, step=7, wait=True)
        ...     farspan.load(folder, model=model).step
        7
    """
    engine = _engine()
    saver_of(engine).finish()
    engine.check()
    if engine.recorder.has_pending():
        engine.flush("farspan.load")
    engine.barrier("farspan.load")  # where programs differ, that is said
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": dict(extra or {})}
    tried = choices(engine, os.fspath(path), is_strict=strict)
    for number, folder in enumerate(tried):
        found = _attempt(engine, folder, objects, resume=resume)
        if isinstance(found, Loaded):
            return found
        if not isinstance(found, DamageError):
            raise found
        if number + 1 == len(tried):
            raise _with_offer(engine, found, os.fspath(path), folder) if strict else found
        if engine.agreement_of_all.side.rank == 0:
            write_line(f"farspan: {found.what} {found.why} Trying {tried[number + 1]}.")
    raise AssertionError("there is at least one")


def _engine() -> Engine:
    """Returns this rank's engine; before there is one, where there will be others, one for this rank alone."""
    if current_engine() is not None or num_ranks_to_be() == 1:
        return engine_of_this_thread(None)
    return Engine(Recorder(), SideChannel.alone(), None, seed=None, deadline_s=300.0)


def _attempt(engine: Engine, folder: str, objects: Mapping[str, Any], *, resume: bool) -> CheckpointError | Loaded:
    """Restore one checkpoint on all ranks; or why none has."""
    mine: CheckpointError | None = None
    with contextlib.ExitStack() as stack:
        restorer: Restorer | None = None
        extra: dict[str, Any] = {}
        try:
            fetch = fetches(folder)
            reader = stack.enter_context(Reader(folder, read_manifest(folder), fetch=fetch))
            restorer = Restorer(engine, reader, parameter_names(engine, objects), folder)
            with plainly(engine.recorder):
                extra = _plan(restorer, objects)
                restorer.verify()
        except CheckpointError as error:
            mine = error
        except FarspanError as error:  # about a document that is not as farspan writes it
            mine = CheckpointError(error.what, why=error.why, hint=error.hint)
        error = _vote(engine, mine)
        if error is not None:
            return error
        assert restorer is not None
        restorer.apply()
        manifest = restorer.manifest
        if resume and manifest.state["groups"]:  # there are none in what was made of other files
            _resume(engine, manifest.state["groups"], folder)
    return Loaded(path=folder, step=manifest.step, extra=extra)


def _plan(restorer: Restorer, objects: Mapping[str, Any]) -> dict[str, Any]:
    state = as_object(restorer.manifest.state, restorer.folder, needed=("objects", "optimizers", "groups"))
    saved = as_object(state["objects"], restorer.folder)
    for key in ("model", "optimizer", "scheduler"):
        if objects[key] is not None:
            if key not in saved:
                raise CheckpointError(
                    f"{restorer.folder} has no {key}.", why=f"it has {', '.join(saved)}.", hint=f"leave out {key}="
                )
            restorer.restore(objects[key], saved[key], key)
    extra = saved.get("extra", {"kind": "mapping", "items": {}})
    restorer.restore(objects["extra"], extra, "extra")
    return restorer.plain(extra, "extra")


def _vote(engine: Engine, mine: CheckpointError | None) -> CheckpointError | None:
    """Returns the error of the first rank that has one, on all ranks."""
    said = None if mine is None else [isinstance(mine, DamageError), mine.what, mine.why, mine.hint]
    blobs = engine.agreement_of_all.gather("what was read", json.dumps(said).encode())
    for blob in blobs:
        found = json.loads(blob)
        if found is not None:
            is_damage, what, why, hint = found
            return (DamageError if is_damage else CheckpointError)(what, why=why, hint=hint)
    return None


def _with_offer(engine: Engine, error: DamageError, path: str, folder: str) -> DamageError:
    other = offer(engine, path, folder)
    if other is None:
        return DamageError(error.what, why=error.why, hint="there is no other checkpoint beside it that is whole")
    hint = f'farspan.load("{other}", ...), the newest that is whole, or strict=False, which takes it'
    return DamageError(error.what, why=error.why, hint=hint)


def _resume(engine: Engine, groups: Any, folder: str) -> None:
    number, num_groups = engine.groups.number, engine.groups.num_groups
    group = groups[number] if number < len(groups) else groups[0]
    loaders_from_json(group["loaders"], num_groups, f"loaders in {folder}")
    restore_counts(engine, group["counts"], f"counts in {folder}")
    generators_from_json(engine.recorder.draws.generator, group["generators"], f"generators in {folder}")
