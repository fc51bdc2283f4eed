"""A folder of checkpoints: how a new one comes to be in it, at once or not at all.

    checkpoints/
      latest                          "step-200 5f1c0a...": the newest, and its save's id
      lock                            while a program saves (`lock`)
      step-100/                       a checkpoint is committed when its folder has this name
        manifest.json
        rank-00000.safetensors ...
      step-200/
      step-300.tmp-9e02.../           one that is being written, or that a crash has left: nobody reads it

    make step-300.tmp-ID    files, each synced    manifest, synced    folder, synced    rename to step-300    sync
    then                    latest.tmp-ID, synced    rename to latest    sync    old ones are removed

Nothing that is committed is ever written into. A step that is saved again (by a program that has gone back) gets a
folder of its own: step-300.2.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from farspan.errors import CheckpointError
from farspan.state.format import disk
from farspan.state.format.manifest import Manifest
from farspan.state.format.manifest_text import head_in, manifest_from_text, manifest_to_text
from farspan.state.format.read import MANIFEST

__all__ = [
    "Draft",
    "begin",
    "candidates",
    "commit",
    "committed",
    "discard",
    "has_name_of_one",
    "is_checkpoint",
    "make_root",
    "newest",
    "point_to",
    "remove_drafts",
    "serial_of",
    "step_in",
]

_POINTER = "latest"
_COMMITTED = re.compile(r"step-([0-9]{1,18})(?:\.([0-9]{1,9}))?")
_DRAFT = re.compile(r"(?:step-[0-9.]+|latest)\.tmp-[0-9a-f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint that is being written.

    Attributes:
        root: The folder of checkpoints.
        name: What it will be called there.
        save_id: Of this save.
        serial: How many saves into the same folder came before it.
    """

    root: str
    name: str
    save_id: str
    serial: int

    @property
    def path(self) -> str:
        """The folder in which it is written."""
        return f"{self.root}/{self.name}.tmp-{self.save_id}"

    @property
    def target(self) -> str:
        """The folder that it will be."""
        return f"{self.root}/{self.name}"


def make_root(root: str) -> None:
    """Make the folder of all checkpoints where it is missing.

    Raises:
        OSError: It cannot be made.
    """
    missing: list[str] = []
    folder = root
    while not disk.exists(folder):
        missing.append(folder)
        folder = folder.rpartition("/")[0] or "/"
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was first
            disk.make_folder(folder)
        disk.fsync_folder(folder.rpartition("/")[0] or "/")


def begin(root: str, step: int, save_id: str, *, beside: str = "") -> Draft:
    """Make the folder of a new draft, and the one of all checkpoints where it is missing.

    Args:
        root: The folder of checkpoints.
        step: Of the new one.
        save_id: Of this save.
        beside: Another folder of checkpoints of the same program; its saves come before this one, too.

    Raises:
        OSError: They cannot be made.
    """
    make_root(root)
    taken = [number for other, number, _ in _committed(root) if other == step]
    name = f"step-{step}" + (f".{max(taken) + 1}" if taken else "")
    draft = Draft(root=root, name=name, save_id=save_id, serial=_next_serial(root, beside))
    disk.make_folder(draft.path)
    return draft


def commit(draft: Draft, manifest: Manifest) -> str:
    """Make a draft, all files of which are there, a checkpoint; its folder.

    Raises:
        CheckpointError: What is beside its tensors is more than can be read again.
    """
    text = manifest_to_text(manifest)
    try:
        manifest_from_text(text, "its manifest")
    except CheckpointError as error:
        raise CheckpointError(
            "what is saved beside tensors could not be read again.",
            why=f"{error.what} {error.why}",
            hint='long lists as tensors or arrays: extra={"losses": torch.tensor(losses)}',
        ) from None
    disk.write_small(f"{draft.path}/{MANIFEST}", text)
    disk.fsync_folder(draft.path)
    disk.rename(draft.path, draft.target)
    disk.fsync_folder(draft.root)
    return draft.target


def point_to(draft: Draft, *, keep: int | None) -> None:
    """Let a committed checkpoint be the latest one, and remove all but `keep`, and what crashes have left."""
    pointer = f"{draft.root}/{_POINTER}"
    disk.write_small(f"{pointer}.tmp-{draft.save_id}", f"{draft.name} {draft.save_id}\n".encode())
    disk.rename(f"{pointer}.tmp-{draft.save_id}", pointer)
    disk.fsync_folder(draft.root)
    old = [] if keep is None else [path for path in candidates(draft.root) if path != draft.target][keep - 1 :]
    for path in old:
        away = f"{path}.tmp-{draft.save_id}"  # half removed, it must not look like a checkpoint
        disk.rename(path, away)
    remove_drafts(draft.root)


def remove_drafts(root: str) -> None:
    """Remove what crashes have left in a folder into which nobody else saves."""
    for name in disk.names_in(root):
        if _DRAFT.fullmatch(name):
            discard(f"{root}/{name}")


def discard(path: str) -> None:
    """Remove a draft, or what a crash has left."""
    disk.remove_tree(path)


def is_checkpoint(path: str) -> bool:
    """Returns whether a folder is a checkpoint, rather than one of checkpoints."""
    return disk.exists(f"{path}/{MANIFEST}")


def has_name_of_one(path: str) -> bool:
    """Returns whether a folder is called as a committed checkpoint is."""
    return _COMMITTED.fullmatch(path.rpartition("/")[2]) is not None


def step_in(path: str) -> int:
    """The step of a committed checkpoint, by its folder's name."""
    match = _COMMITTED.fullmatch(path.rpartition("/")[2])
    assert match is not None
    return int(match[1])


def committed(root: str) -> list[str]:
    """All checkpoints of a folder, by step."""
    return [f"{root}/{name}" for _, _, name in _committed(root)]


def candidates(root: str) -> list[str]:
    """All checkpoints of a folder, the one to load first; those without a readable manifest come last."""
    serials = {path: serial_of(path) for path in reversed(committed(root))}
    first = _pointed_to(root)
    return sorted(serials, key=lambda path: (path != first, -serials[path]))


def newest(root: str) -> str | None:
    """The checkpoint to load from a folder; None if it has none.

    Manifests alone are looked at. One that is damaged hides no checkpoint: who loads it hears of it.
    """
    first = _pointed_to(root)
    if first is not None:
        return first
    found = candidates(root)
    later = reversed(committed(root))  # by step
    broken = next((path for path in later if serial_of(path) < 0), None)
    if broken is None or committed(root).index(broken) < committed(root).index(found[0]):
        return next(iter(found), None)
    return broken


def _pointed_to(root: str) -> str | None:
    """Returns what `latest` names, if that is there."""
    try:
        name, _, save_id = disk.read_small(f"{root}/{_POINTER}").decode().strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return None
    path = f"{root}/{name}"
    if not _COMMITTED.fullmatch(name) or not disk.exists(path):
        return None
    head = _head_of(path)
    return path if head is None or head[0] == save_id else None  # damaged, it is to be heard of


def serial_of(path: str) -> int:
    """Returns how many saves came before a checkpoint; -1 where its manifest is damaged."""
    head = _head_of(path)
    return -1 if head is None else head[1]


def _head_of(path: str) -> tuple[str, int] | None:
    try:
        return head_in(disk.read_small(f"{path}/{MANIFEST}"))
    except OSError:
        return None


def _committed(root: str) -> list[tuple[int, int, str]]:
    """Returns of all checkpoints the step, which one of this step, the name."""
    found: Iterable[tuple[str, re.Match[str] | None]] = ((name, _COMMITTED.fullmatch(name)) for name in _names(root))
    return sorted([(int(match[1]), int(match[2] or 1), name) for name, match in found if match])


def _names(root: str) -> list[str]:
    try:
        return disk.names_in(root)
    except NotADirectoryError:
        return []


def _next_serial(root: str, beside: str) -> int:
    known = committed(root) + (committed(beside) if beside else [])
    return max([-1, *map(serial_of, known)]) + 1
