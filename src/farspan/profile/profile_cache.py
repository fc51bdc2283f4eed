"""Measured profiles on disk: a step that was measured once is not measured again on the same kind of device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from farspan.documents import as_count, as_flag, as_list, as_number, as_object, as_text, parse_json, read_text
from farspan.errors import PlanError
from farspan.outputs import keep_text
from farspan.profile.step import Operation, PassedValue, StepProfile, UnitProfile

__all__ = ["ProfileCache", "cache_folder"]

_log = logging.getLogger(__name__)
_VERSION = "farspan-profile/5"
_HINT = "farspan plan --fresh train.py"
_T = TypeVar("_T")


def cache_folder(kind: str) -> Path:
    """Returns the folder of "profiles" or "plans": in $XDG_CACHE_HOME/farspan, by default ~/.cache/farspan."""
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
        """Returns the file of what has that signature: all that the seconds depend on, in values that print alike."""
        digest = hashlib.sha256(repr((_VERSION, *signature)).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def load(self, path: Path) -> StepProfile | None:
        """Returns the profile in a file; None where there is none that can be read."""
        if self.is_fresh or not path.is_file():
            return None
        try:
            return _read(parse_json(read_text(path, hint=_HINT), str(path)), path)
        except PlanError as error:
            _log.warning("%s is no profile (%s): it is measured again", path, error.what)
            return None

    def save(self, path: Path, profile: StepProfile) -> None:
        """Write a profile, if the folder can be written to."""
        members = {"measured": time.strftime("%Y-%m-%d %H:%M"), "profile": dataclasses.asdict(profile)}
        keep_text(path, json.dumps(members), "the profile")


def _read(value: object, path: Path) -> StepProfile:
    where = str(path)
    members = as_object(value, where, known=("measured", "profile"), needed=("measured", "profile"))
    profile = as_object(members["profile"], where)
    units = as_list(profile.get("units"), f"{where}: units")
    values = as_list(profile.get("values"), f"{where}: values")
    last = len(units) - 1
    for each in (as_object(each, f"{where}: values") for each in values):
        as_count(each.get("source"), f"{where}: source", most=last)
        as_count(each.get("target"), f"{where}: target", most=last)
    made = {
        "units": tuple(_made(UnitProfile, unit, f"{where}: units[{i}]") for i, unit in enumerate(units)),
        "values": tuple(_made(PassedValue, each, f"{where}: values[{i}]") for i, each in enumerate(values)),
        "notes": (
            f"seconds of {as_text(members['measured'], f'{where}: measured')}, from {path}; --fresh measures again",
        ),
    }
    return _made(StepProfile, profile, where, made)


def _made(kind: type[_T], value: object, where: str, made: Mapping[str, Any] | None = None) -> _T:
    """Returns a dataclass of its members, each of its type; those in `made` are taken as they are."""
    fields: dict[str, Any] = dict(made or {})
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    members = as_object(value, where, known=tuple(types), needed=tuple(types))
    for name in types.keys() - fields.keys():
        fields[name] = _READERS[types[name]](members[name], f"{where}: {name}")
    return kind(**fields)


def _works(value: object, where: str) -> tuple[Operation, ...]:
    return tuple(_made(Operation, each, where) for each in as_list(value, where))


def _pairs(value: object, where: str) -> tuple[tuple[str, float], ...]:
    pairs = (as_list(pair, where, length=2) for pair in as_list(value, where))
    return tuple((as_text(name, where), as_number(size, where)) for name, size in pairs)


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "str": as_text,
    "int": as_count,
    "bool": as_flag,
    "float": as_number,
    "int | None": lambda value, where: None if value is None else as_count(value, where),
    "float | None": lambda value, where: None if value is None else as_number(value, where),
    "tuple[Operation, ...]": _works,
    "tuple[tuple[str, float], ...]": _pairs,
}
"""Readers of values by the type of a field, as it is written in `step.py`."""
