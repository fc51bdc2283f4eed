"""Gathers on rank 0 what each rank has measured of its own share of a step. JSON: nothing is unpickled."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from farspan.call.pytree.template import flatten
from farspan.devices import memory_bytes, name_of_device
from farspan.execute.engine import Engine
from farspan.execute.optimizers.states import placed_in
from farspan.place.measure.measurements import Input, Measured, Sample, SegmentNote
from farspan.profile import Operation

__all__ = ["RankMeasured", "exchanged"]

_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_MOST_RANKS = 1 << 20
"""Pieces of memory have numbers that are theirs within a process only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasured:
    """The measurements of one rank's share.

    Attributes:
        host: What ranks of one machine and network have in common.
        device: The kind of device it computes on.
        memory_bytes: Of the device; of the whole host where it is a CPU.
        measured: Its own segments.
        state_bytes: What optimizers keep for each of its parameters, by name.
    """

    host: str
    device: str
    memory_bytes: float
    measured: Measured
    state_bytes: Mapping[str, int]


def exchanged(engine: Engine, measured: Measured, device: torch.device) -> tuple[list[str], list[RankMeasured]]:
    """Returns the hosts of all ranks, by rank, and all ranks' shares; these on rank 0 alone. Every rank calls it.

    Args:
        engine: This rank's.
        measured: Its share.
        device: Where it computes.
    """
    host = _host()
    own = {
        "host": host,
        "device": name_of_device(device),
        "memory_bytes": float(memory_bytes(device)),
        "notes": [_members(note) for note in measured.notes.values()],
        "samples": [[each.number, *each.key, each.kind, each.seconds] for each in measured.samples],
        "num_micro_batches": measured.num_micro_batches,
        "split_micro_batch": measured.split_micro_batch,
        "gradient_bytes": dict(measured.gradient_bytes),
        "state_bytes": _state_bytes(engine),
    }
    blobs = engine.agreement.gather_at(0, "what was measured", json.dumps(own).encode())
    hosts = engine.agreement.gather("hosts", host.encode())
    return [each.decode() for each in hosts], [_read(json.loads(blob), rank) for rank, blob in enumerate(blobs)]


def _host() -> str:
    """Returns a name of this machine with its kernel and network: host names may be the same on several machines and in
    containers."""
    parts = [socket.gethostname()]
    if _BOOT.exists():
        parts += [_BOOT.read_text().strip(), os.readlink(_NETWORK)]
    return " ".join(parts)


def _state_bytes(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, optimizer in engine.values.optimizers.numbered():
        for item in placed_in(optimizer, engine.recorder.placed):
            if item.is_owned:
                tensors = flatten(dict(optimizer.state.get(item.tensor, {})))[1]
                found[item.name] = found.get(item.name, 0) + sum(
                    each.shape.numel() * each.dtype.itemsize
                    for each in tensors  # some are shown, as recorded ones
                )
    return found


def _members(note: SegmentNote) -> dict[str, Any]:
    return {**asdict(note), "saved_values": sorted(note.saved_values)}


def _read(members: dict[str, Any], rank: int) -> RankMeasured:
    notes = [_note(each, rank) for each in members["notes"]]
    samples = [
        Sample(number=number, key=(level, stage), kind=kind, seconds=seconds)
        for number, level, stage, kind, seconds in members["samples"]
    ]
    return RankMeasured(
        host=members["host"],
        device=members["device"],
        memory_bytes=members["memory_bytes"],
        measured=Measured(
            notes={note.key: note for note in notes},
            samples=samples,
            num_micro_batches=members["num_micro_batches"],
            split_micro_batch=members["split_micro_batch"],
            gradient_bytes=members["gradient_bytes"],
        ),
        state_bytes=members["state_bytes"],
    )


def _note(members: dict[str, Any], rank: int) -> SegmentNote:
    inputs = [
        Input(**{**each, "source": None if each["source"] is None else tuple(each["source"])})
        for each in members["inputs"]
    ]
    return SegmentNote(
        **{
            **members,
            "key": tuple(members["key"]),
            "inputs": inputs,
            "saved": {int(number) * _MOST_RANKS + rank: size for number, size in members["saved"].items()},
            "saved_values": set(members["saved_values"]),
            "weight": [Operation(**each) for each in members["weight"]],
            "forward": [Operation(**each) for each in members["forward"]],
            "backward": [Operation(**each) for each in members["backward"]],
        }
    )
