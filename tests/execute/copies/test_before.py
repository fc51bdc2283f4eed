"""What one rank keeps of what a step finds, and puts back where the step is run again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farspan.execute.copies.before import _put_back, _written_by
from farspan.graph import Value


@pytest.mark.parametrize(
    ("before", "is_same_memory"),
    [
        (torch.ones(3), True),
        (torch.ones(2), False),
        (torch.ones(3, dtype=torch.float64), False),
    ],
)
def test_a_tensor_is_put_back_in_its_own_memory_unless_it_has_become_another(
    before: torch.Tensor, is_same_memory: bool
) -> None:
    tensor = torch.zeros(3)
    view = tensor[:1]
    _put_back(tensor, before)
    assert tensor.dtype is before.dtype and tensor.equal(before)
    assert view.item() == (1.0 if is_same_memory else 0.0)


def test_what_a_call_writes_of_what_was_there_before_is_kept() -> None:
    graph, graph_before = SimpleNamespace(index=1), SimpleNamespace(index=0)

    def value(data: Any, of: Any) -> Any:
        found = Value.__new__(Value)
        found.call, found.data = (None if of is None else SimpleNamespace(graph=of)), data  # type: ignore[assignment]
        return found

    source, earlier = torch.zeros(1), torch.zeros(2)
    arguments = [value(source, None), value(earlier, graph_before), value(torch.zeros(3), graph), torch.zeros(4)]
    arguments.append(value(torch.zeros(5), None))  # is read alone
    entry = SimpleNamespace(mutated=(0, 1, 2, 3))
    call: Any = SimpleNamespace(target=torch.add, entry=entry, arguments=arguments)
    assert [*map(id, _written_by(call, [graph]))] == [id(source), id(earlier)]  # type: ignore[list-item]
    call.arguments = None  # not known on this rank
    assert _written_by(call, [graph]) == []  # type: ignore[list-item]
