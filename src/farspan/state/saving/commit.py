"""Commits what all ranks have written as a checkpoint, if it is whole and they agree: on rank 0, from their votes.

vote    {"file": [name, size, bytes of the header, checksum] or None,
         "tensors": {name: [dtype, shape, first byte, checksums]},      in that file
         "compared": {name: checksums},                                 that another rank has written
         "states": {optimizer: {parameter: what is kept for it}},
         "group": {"number": 0, "generators": ..., "counts": ..., "loaders": [...]}}
    or  {"error": [what, why, hint]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farspan.errors import CheckpointError
from farspan.state.format import Draft, Manifest, Piece, StoredFile, StoredTensor, commit, disk, point_to
from farspan.state.format.manifest_text import manifest_to_text
from farspan.state.memory.hosts import Hosts

__all__ = ["Vote", "commit_votes"]

Vote = dict[str, Any]


def commit_votes(
    draft: Draft, votes: Sequence[Vote], head: dict[str, Any], keep: int | None, hosts: Hosts | None = None
) -> str:
    """Commit a draft; its folder.

    Args:
        draft: What was written.
        votes: By rank.
        head: Of the manifest: `step`, `state`, `about`.
        keep: How many checkpoints stay.
        hosts: Those in whose memory it is; None where it is in one folder.

    Raises:
        CheckpointError: A rank could not write, or two have other bytes for the same tensor, or a file is not here.
        OSError: The disk fails.
    """
    _raise_first_error(votes)
    files: list[StoredFile] = []
    tensors: dict[str, StoredTensor] = {}
    by: dict[str, int] = {}
    for rank, vote in enumerate(votes):
        if vote["file"] is None:
            continue
        name, size, header_bytes, checksum = vote["file"]
        if hosts is None:
            _check_here(f"{draft.path}/{name}", size, rank)
        stored = StoredFile(name=name, size_bytes=size, header_bytes=header_bytes, header_checksum=checksum)
        for key, (dtype, shape, begin, checksums) in vote["tensors"].items():
            if key in tensors:
                raise CheckpointError(f"ranks {by[key]} and {rank} have both written {key}.")
            piece = Piece(
                file=len(files),
                begin=begin,
                offset=(0,) * len(shape),
                shape=tuple(shape),
                checksums=tuple(checksums),
            )
            tensors[key] = StoredTensor(dtype=dtype, shape=tuple(shape), pieces=(piece,))
            by[key] = rank
        files.append(stored)
    _compare(votes, tensors, by)
    manifest = Manifest(
        save_id=draft.save_id,
        step=head["step"],
        serial=draft.serial,
        files=tuple(files),
        tensors=tensors,
        state=_with_states(head["state"], votes),
        about=head["about"],
    )
    if hosts is not None:
        hosts.publish(draft.path, draft.target, manifest_to_text(manifest))
    path = commit(draft, manifest)
    point_to(draft, keep=keep)
    if hosts is not None:
        hosts.remove_all_but(draft.target)
    return path


def _raise_first_error(votes: Sequence[Vote]) -> None:
    failed = [(rank, vote["error"]) for rank, vote in enumerate(votes) if "error" in vote]
    if failed:
        rank, (what, why, hint) = failed[0]
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank}{others}: {what}", why=why, hint=hint)


def _check_here(path: str, size_bytes: int, rank: int) -> None:
    """Raise unless rank 0 sees what another rank has written."""
    try:
        with disk.opened(path) as file:
            found = disk.size_of(file)
    except OSError as error:
        raise CheckpointError(
            f"rank 0 does not see what rank {rank} has written: {path}",
            why=f"{error.strerror}: the ranks' folders of this name are not the same folder.",
            hint="a folder on a file system that all hosts share",
        ) from None
    if found != size_bytes:
        raise CheckpointError(
            f"rank 0 sees {found} of the {size_bytes} bytes that rank {rank} has written: {path}",
            why="the file system does not show a file as it is when its writer has synced it.",
            hint="another file system",
        )


def _compare(votes: Sequence[Vote], tensors: dict[str, StoredTensor], by: dict[str, int]) -> None:
    for rank, vote in enumerate(votes):
        for key, checksums in vote["compared"].items():
            stored = tensors.get(key)
            if stored is None or list(stored.pieces[0].checksums) != checksums:
                first = by.get(key, 0)
                raise CheckpointError(
                    f"ranks {first} and {rank} have different values for {key}.",
                    why="every rank has it, and one of them would have been saved for all.",
                    hint=f"what is saved must be equal on all ranks; farspan.from_rank({first}, ...) makes it so",
                )


def _with_states(state: dict[str, Any], votes: Sequence[Vote]) -> dict[str, Any]:
    merged: dict[str, dict[str, Any]] = {}
    for vote in votes:
        for optimizer, kept in vote["states"].items():
            into = merged.setdefault(optimizer, {})
            for name, value in kept.items():
                if into.setdefault(name, value) != value:
                    raise CheckpointError(f"ranks keep different values for {name} in {optimizer}.")
    return {**state, "optimizers": merged, "groups": _groups_of(votes)}


def _groups_of(votes: Sequence[Vote]) -> list[Any]:
    """Returns what each group has of its own, as its first rank says; loaders may be another rank's."""
    groups: dict[int, dict[str, Any]] = {}
    for vote in votes:
        known = groups.setdefault(vote["group"]["number"], vote["group"])
        known["loaders"] = known["loaders"] or vote["group"]["loaders"]
    return [groups[number] for number in sorted(groups)]
