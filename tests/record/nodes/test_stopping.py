"""A backward that stops at hooks: what has come there, and what goes on from there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farspan.graph import Meta, Value
from farspan.record.nodes import stopping


class Stop:
    """A share of a backward that ends at one value, to which nothing has come but what the backward began with."""

    def __init__(self, value: Value) -> None:
        self.incoming: list[Any] = []
        self.outgoing = [SimpleNamespace(key=value, dst=SimpleNamespace(calls=[]))]
        self.stage = 0


class Called:
    """A call with hooks."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def value_of(index: int) -> Value:
    return Value(Meta((2,), (1,), torch.float32, torch.device("cpu"), True), 0, None, index)


def recorder_of(given: dict[Value, torch.Tensor]) -> Any:
    engine = SimpleNamespace(num_ranks=1, new_sources=lambda items: [])
    engine.executor = SimpleNamespace(put=lambda edge, data: given.update({edge.key: data}))
    deferred = SimpleNamespace(record_one=lambda gradient: None)
    return SimpleNamespace(engine=engine, deferred=deferred, pending=[], current=SimpleNamespace(sources=[]))


def test_a_root_that_is_given_several_times_begins_with_the_sum() -> None:
    value, other = value_of(0), value_of(1)
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    backward: Any = SimpleNamespace(roots=[value, other, value, value], gradients=[first, torch.zeros(2), second, None])
    stops: Any = [Stop(value), Stop(other)]
    found = stopping._arrived(recorder_of({}), backward, stops)
    assert [each.tolist() for each in found] == [[12.0, 23.0], [0.0, 0.0]]
    assert first.tolist() == [1.0, 2.0]


def test_a_gradient_that_a_hook_takes_away_goes_on_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three results the first gets a gradient that stays, the second one that goes, and the third none at all."""
    values, went_on = [value_of(0), value_of(1)], []
    stops: Any = [Stop(value) for value in values]
    hooks = SimpleNamespace(run=lambda gradients: [2 * gradients[0], None, None])

    call: Any = Called(outputs=(*values, value_of(2)), hooks=hooks)
    waiting = SimpleNamespace(waiting={call: stops}, go_on=went_on.append)
    backward: Any = SimpleNamespace(stops=waiting, requested=None)
    monkeypatch.setattr(stopping, "_arrived", lambda *args: [torch.ones(2), torch.ones(2)])
    given: dict[Value, torch.Tensor] = {}
    stopping.run_hooks(recorder_of(given), backward, call)
    assert [given[value].tolist() for value in values] == [[2.0, 2.0], [0.0, 0.0]]
    assert went_on == [call]
