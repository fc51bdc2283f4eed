"""A profile on disk is what was measured, or it is measured again."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.documents.edits import edited

from farspan.profile import ProfileCache
from farspan.profile.step import Operation, PassedValue, StepProfile, UnitProfile

WORK = (Operation(flops=2e9, moved_bytes=1e6, dtype="float32"),)
PROFILE = StepProfile(
    units=(
        UnitProfile(name="0", forward_s=0.5, forward_work=WORK, saved_with_others=(("x", 8.0),), can_remat=True),
        UnitProfile(name="1", backward_s=1.0, weight_work=WORK, memory_bytes=4096.0),
    ),
    values=(PassedValue(source=0, target=1, size_bytes=64.0, name="x", is_saved=True),),
    num_micro_batches=4,
    device="a cpu",
)


def written(path: Path, cache: ProfileCache) -> Any:
    cache.save(path, PROFILE)
    return json.loads(path.read_text())


def test_a_profile_is_read_as_it_was_measured(tmp_path: Path) -> None:
    path, cache = tmp_path / "profile.json", ProfileCache(tmp_path)
    measured = written(path, cache)["measured"]
    read = cache.load(path)
    assert read is not None and measured in read.notes[0]
    assert dataclasses.replace(read, notes=()) == PROFILE


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("measured",), 5),
        (("more",), 1),
        (("profile",), []),
        (("profile", "units"), {}),
        (("profile", "device"), None),
        (("profile", "num_micro_batches"), 1.5),
        (("profile", "num_micro_batches"), -1),
        (("profile", "units", 0, "forward_s"), "0.5"),
        (("profile", "units", 0, "forward_s"), -1),
        (("profile", "units", 0, "can_remat"), 1),
        (("profile", "units", 0, "nmae"), "0"),
        (("profile", "units", 0, "forward_work", 0, "flops"), None),
        (("profile", "units", 0, "saved_with_others", 0), ["x"]),
        (("profile", "values", 0, "source"), 2),
        (("profile", "values", 0, "target"), 2),
        (("profile", "values", 0), 7),
    ],
)
def test_what_is_no_profile_is_measured_again(
    keys: tuple[str | int, ...], value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = tmp_path / "profile.json", ProfileCache(tmp_path)
    inner = document = written(path, cache)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(document))
    with caplog.at_level(logging.WARNING, logger="farspan"):
        assert cache.load(path) is None
    assert "is no profile" in caplog.text


@given(edited(json.dumps({"measured": "today", "profile": dataclasses.asdict(PROFILE)})))
@settings(derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_edit_of_a_file_is_more_than_a_warning(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    ProfileCache(tmp_path).load(path)
