"""Measured profiles on disk: a step that was measured once is not measured again on the same kind of device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farspan.outputs import keep_text
from farspan.profile.step import AtomProfile, Operation, PassedValue, StepProfile

__all__ = ["ProfileCache", "cache_folder"]

_log = logging.getLogger(__name__)
_VERSION = "farspan-profile/4"


def cache_folder(kind: str) -> Path:
    """Where "profiles" or "plans" lie: in $XDG_CACHE_HOME/farspan, by default ~/.cache/farspan."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farspan" / kind


class ProfileCache:
    """Profiles in a folder, a file each.

    Args:
        folder: Made when the first is saved.
        is_fresh: Nothing is read; what is measured is saved all the same.
    """

    def __init__(self, folder: Path, *, is_fresh: bool = False) -> None:
        self.folder = folder
        self.is_fresh = is_fresh

    def path_of(self, signature: Iterable[object]) -> Path:
        """The file of what has that signature: all that the seconds depend on, in values that print alike."""
        digest = hashlib.sha256(repr((_VERSION, *signature)).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def load(self, path: Path) -> StepProfile | None:
        """The profile in a file; None where there is none that can be read."""
        if self.is_fresh or not path.is_file():
            return None
        try:
            return _read(json.loads(path.read_text(encoding="utf-8")), path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is no profile (%s): it is measured anew", path, error)
            return None

    def save(self, path: Path, profile: StepProfile) -> None:
        """Write a profile, if the folder can be written to."""
        members = {"measured": time.strftime("%Y-%m-%d %H:%M"), "profile": dataclasses.asdict(profile)}
        keep_text(path, json.dumps(members), "the profile")


def _read(members: dict[str, Any], path: Path) -> StepProfile:
    profile: dict[str, Any] = members["profile"]
    atoms = tuple(
        AtomProfile(
            **{
                **atom,
                "forward_work": tuple(Operation(**each) for each in atom["forward_work"]),
                "backward_work": tuple(Operation(**each) for each in atom["backward_work"]),
                "weight_work": tuple(Operation(**each) for each in atom["weight_work"]),
                "saved_with_others": tuple((name, size) for name, size in atom["saved_with_others"]),
            }
        )
        for atom in profile["atoms"]
    )
    values = tuple(PassedValue(**value) for value in profile["values"])
    note = f"seconds of {members['measured']}, from {path}; --fresh measures anew"
    return StepProfile(**{**profile, "atoms": atoms, "values": values, "notes": (note,)})
