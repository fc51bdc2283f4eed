"""What a rank has written behind the place of an exception becomes what it was, or is lost; what is before it stays."""

from __future__ import annotations

import pytest
import torch

from farspan.call.infer.entry import meta_of
from farspan.call.leaf import Placed
from farspan.errors import RecordError
from farspan.execute.abort.interruption import Undo
from farspan.execute.abort.order import Place

BEFORE, END, BEHIND = (0, 0, 1), (0, 0, 2), (0, 0, 3)
PLACES = [BEFORE, END, BEHIND]


def placed(name: str, *, is_parameter: bool) -> Placed:
    tensor = torch.zeros(2, requires_grad=is_parameter)
    tensor.grad = torch.ones(2) if is_parameter else None
    return Placed(name, 0, tensor, meta_of(tensor), True, is_parameter, torch.Tensor)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_written_behind_an_exception_are_lost_and_no_others(place: Place) -> None:
    item = placed("w", is_parameter=True)
    undo = Undo({"w": item})
    undo._gradients.append((place, "w"))
    undo.undo(END, failed=None)
    assert item.tensor.grad is not None
    assert bool(item.tensor.grad.isnan().all()) is (place is BEHIND)


@pytest.mark.parametrize("place", PLACES)
def test_buffers_written_behind_an_exception_are_what_they_were(place: Place) -> None:
    item = placed("b", is_parameter=False)
    undo = Undo({"b": item})
    undo._before.append((place, item, item.tensor.clone()))
    item.tensor.fill_(1.0)
    undo.undo(END, failed=None)
    assert item.tensor.tolist() == ([0.0, 0.0] if place is BEHIND else [1.0, 1.0])


@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_written_behind_an_exception_ends_the_program(place: Place) -> None:
    undo = Undo({"w": placed("w", is_parameter=True)})
    undo._weights.append((place, "w"))
    if place is BEHIND:
        with pytest.raises(RecordError, match="w is written to"):
            undo.check(END, "ValueError")
    else:
        undo.check(END, "ValueError")
