"""Texts of megabytes over many ranks: only digests are compared, and only what differs is shown."""

from __future__ import annotations

import pytest
from tests.support.side import LONG_S, each, open_ranks

from farspan.errors import DivergenceError
from farspan.execute.agreement.agreement import Agreement

_NUM_RANKS = 30
_NAMES = [f"layers.{layer}.mlp.experts.{expert}.weight: float32[7168]" for layer in range(61) for expert in range(256)]


@pytest.mark.parametrize("differs", [None, 17])
def test_names_of_many_experts_are_agreed_on_by_many_ranks(differs: int | None) -> None:
    text = "\n".join(_NAMES * 4)
    assert len(text) > 2_800_000
    other = text.replace("layers.60.mlp.experts.255.weight: float32", "layers.60.mlp.experts.255.weight: float16")

    def act(channel):  # type: ignore[no-untyped-def]
        agreement = Agreement(channel, LONG_S)
        assert agreement.broadcast("the plan", text.encode(), 3) == text.encode()
        agreement.agree_on("model", other if channel.rank == differs else text)

    with open_ranks() as make:
        errors = each(make(_NUM_RANKS), act)
    if differs is None:
        assert errors == [None] * _NUM_RANKS
        return
    for error in errors:
        assert isinstance(error, DivergenceError)
        assert error.what == "ranks 0 and 17 call farspan.distribute with different models."
        name = "layers.60.mlp.experts.255.weight"
        assert error.why == f"rank 0: {name}: float32[7168]\nrank 17: {name}: float16[7168]"
