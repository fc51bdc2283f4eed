"""What rules say of operations on tensors that are not all sharded alike: rows that may meet are never said to be
apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farspan.call.rows.elementwise import factory
from farspan.call.rows.layout import Layout, Mixed, Op, Partial, Replicate, Shard
from farspan.call.rows.products import PRODUCTS

SUM = 2
ROWS = 6


class OfRows(Op):
    """An operation that is given the number of rows."""

    def units(self, size: Any) -> int:
        return int(size == ROWS)

    def follows_rows(self, argument: Any) -> bool:
        return True


def said(name: str, result: tuple[int, ...], layouts: dict[str, Layout], **given: Any) -> Any:
    """The layout of what an operation gives, where the tensors named in `layouts` lie so, and the others are the same
    for all rows."""
    known = {id(given[key]): layout for key, layout in layouts.items()}
    of = lambda item: known.get(id(item), Replicate())  # noqa: E731
    return PRODUCTS[name](Op(name, given, [torch.empty(result)], of, None))


@pytest.mark.parametrize(
    ("added", "is_apart"),
    [((6,), True), ((1, 6), True), ((1, 1), True), ((6, 6), False), ((6, 1), False)],
)
def test_what_is_added_to_a_product_of_rows_is_the_same_for_each_row(added: tuple[int, ...], is_apart: bool) -> None:
    one, two = torch.empty(6, 6), torch.empty(6, 6)
    found = said("addmm", (6, 6), {"mat1": Shard(0)}, self=torch.empty(added), mat1=one, mat2=two)
    assert found == Shard(0) if is_apart else isinstance(found, Mixed)


@pytest.mark.parametrize(
    ("own", "target", "wanted"),
    [
        (Shard(0), Shard(0), [Partial(), Partial()]),
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Replicate(), Mixed),
        (Replicate(), Shard(0), Mixed),
    ],
)
def test_classes_of_other_rows_than_the_scores_are_never_said_to_be_apart(own: Any, target: Any, wanted: Any) -> None:
    given: dict[str, Any] = {"self": torch.empty(6, 5), "target": torch.empty(6), "weight": None, "reduction": SUM}
    found = said("nll_loss_forward", (), {"self": own, "target": target}, **given)
    assert isinstance(found, Mixed) if wanted is Mixed else found == wanted


@pytest.mark.parametrize(
    ("given", "are_numbers"),
    [
        ({}, True),
        ({"start": 0, "step": 1}, True),
        ({"start": 1}, False),
        ({"start": 0, "step": 2}, False),
        ({"start": 0.0}, False),
    ],
)
def test_the_numbers_of_the_rows_begin_at_0_and_leave_none_out(given: dict[str, Any], are_numbers: bool) -> None:
    op = OfRows("arange", {**given, "end": ROWS}, [torch.arange(ROWS)], lambda item: Replicate(), None)
    found = factory(op)
    assert found == Shard(0, is_index=True) if are_numbers else isinstance(found, Mixed)
