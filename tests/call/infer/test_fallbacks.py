"""Runs on fakes that are tried again, and what is noted of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farspan.call.infer import fallbacks
from farspan.call.infer.watch import Watch
from farspan.call.surroundings.around import AroundError
from farspan.torch_private import on_fakes


def test_an_exception_that_the_program_handles_keeps_its_traceback_where_a_run_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[int] = []

    def predict(*args: Any, **given: Any) -> str:
        runs.append(len(runs))
        if len(runs) == 1:
            raise AroundError("a thread of the program has changed it")
        return "found"

    monkeypatch.setattr(fallbacks, "predict", predict)
    tracebacks: list[Any] = []
    try:
        raise KeyError("the program's own")
    except KeyError as error:
        found: Any = fallbacks._predict_on_fakes(torch.relu, (), [], (), [], ())
        tracebacks.append(error.__traceback__)
    assert found == "found" and tracebacks != [None]
    assert runs == [0, 1]


def test_a_write_through_a_view_is_one_into_the_tensor_that_is_no_fake() -> None:
    plain = torch.zeros(2, 3)
    watch = Watch([], ())
    with on_fakes(), watch:
        plain[0].add_(1.0)
    assert [*watch.written_plain.values()] == [plain]
