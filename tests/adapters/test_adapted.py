"""What adapters do to another package, on stand-ins for it: the real ones are those of `make test-trainers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from farspan.adapters import lightning, transformers


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_alone_is_rank_0_of_lightning(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "is_first", lambda: is_first)
    module = SimpleNamespace(rank_zero_only=SimpleNamespace(rank=7))
    lightning._adapt_rank(module)
    assert (module.rank_zero_only.rank == 0) is is_first


def _noting(found: list[bytes]) -> Callable[[str, bytes], bytes]:
    def noted(what: str, text: bytes) -> bytes:
        found.append(text)
        return found[0]

    return noted


def test_what_saving_sets_in_a_configuration_every_rank_gets_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bytes] = []
    monkeypatch.setattr(transformers, "noted_by_first", _noting(found))
    writer = SimpleNamespace(kind="old", same=1, changed=[1], added="x", object=object())
    before = {"kind": "old", "same": 1, "changed": [2], "object": None}
    transformers._take_config(writer, before)
    other = SimpleNamespace(kind="own", same=5, changed=[2])
    transformers._take_config(other, dict(vars(other)))
    assert json.loads(found[0]) == {"changed": [1], "added": "x"}
    assert vars(other) == {"kind": "own", "same": 5, "changed": [1], "added": "x"}
