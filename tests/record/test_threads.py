"""Threads of the program that go on while a rank finds out what a call gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.support.plainly import assert_same_as_plainly, train
from torch import Tensor, nn

from farspan.call.infer import predict

NOTES: list[str] = []


class Notes(nn.Module):
    """Looks at a list that a thread of the program writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert len(NOTES) >= 0
        return self.b(torch.tanh(self.a(x)))


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Notes() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_a_thread_writes_meanwhile_is_not_the_modules_doing(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one rank's thread does: the ranks would not agree what is called as a whole."""
    nothing_changed_around = predict.nothing_changed_around
    written = list(range(2))

    @contextlib.contextmanager
    def while_a_thread_writes(modules: Sequence[nn.Module]) -> Iterator[None]:
        with nothing_changed_around(modules):
            yield
            if isinstance(modules[0], Notes) and written and written.pop() == 0:
                NOTES.append("by another thread")

    monkeypatch.setattr(predict, "nothing_changed_around", while_a_thread_writes)

    assert_same_as_plainly(Noting, train, num_ranks)
    assert not written
