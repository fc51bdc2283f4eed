"""How one process starts, what it ends when another has failed, and what it hints at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farspan.errors import FarspanError
from farspan.execute.engine import Engine
from farspan.execute.process import world
from farspan.execute.process.console import Console


def test_a_rank_that_cannot_start_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []
    side = SimpleNamespace(fail=failed.append)
    network: Any = SimpleNamespace(rank=1, world_size=2, launcher="run", join=lambda limit_s: side)
    error = FarspanError("it has another argument")

    def differs(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(world, "install", lambda: None)
    monkeypatch.setattr(world, "keep_log_apart", lambda: None)
    monkeypatch.setattr(world, "Agreement", differs)
    with pytest.raises(FarspanError, match="another argument"):
        world._set_up(None, 1, network)
    assert failed == [error]


@pytest.mark.parametrize("has_transport", [True, False])
def test_a_failure_ends_all_transfers_that_this_rank_may_wait_for(has_transport: bool) -> None:
    ended: list[str] = []
    engine: Any = SimpleNamespace(
        values=SimpleNamespace(pulls=SimpleNamespace(abort=lambda: ended.append("pulls"))),
        groups=SimpleNamespace(abort=lambda: ended.append("groups")),
        transport=SimpleNamespace(abort=lambda: ended.append("transport")) if has_transport else None,
    )
    Engine.interrupt(engine)
    assert sorted(ended) == ["groups", "pulls", *["transport"] * has_transport]


@pytest.mark.parametrize(
    ("gain", "num_micro_batches", "may_cut", "is_told"),
    [(1.7, 1, True, True), (1.05, 1, True, False), (1.7, 2, True, False), (1.7, 1, False, False)],
)
def test_more_micro_batches_are_hinted_at_where_they_would_gain(
    gain: float, num_micro_batches: int, may_cut: bool, is_told: bool
) -> None:
    plan = SimpleNamespace(num_stages=2, micro_batches=1, is_split=lambda stage: False)
    console: Any = SimpleNamespace(plan=plan, best_lanes=None, may_cut=lambda: may_cut)
    assert Console._micro_batches_hint(console, [1.0, 2.0], num_micro_batches) == ""  # nobody knows how many
    console.best_lanes = lambda busy_s: (len(busy_s) * 4, gain)
    hint = Console._micro_batches_hint(console, [1.0, 2.0], num_micro_batches)
    assert ("micro_batches=8" in hint and "up to 1.7 times" in hint) == is_told == bool(hint)
